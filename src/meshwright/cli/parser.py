"""Argument parsing: the front page, one parser a command, and mistakes told as requests that were wrong."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from meshwright.cli.command import Command
from meshwright.cli.output import print_styled
from meshwright.config.errors import RequestError

__all__ = ["Parser", "command_parser", "find_command", "front_parser", "parse_arguments"]

_STYLES = {r"(?m)^\w[\w ]*:": "bold", r"(?m)^  [\w-]+(?=  )": "cyan", r"(?<![\w-])--?[a-z][\w-]*": "cyan"}
_EXIT_CODES = "0 done; 1 the run or the check failed; 2 the request was wrong; 130, 143 interrupted"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``RequestError`` and colours its help on a terminal."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        if unknown is None:
            raise RequestError(self.prog, message, (f"{self.prog} --help",))
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        first = unknown[1].split()[0].partition("=")[0]
        near = difflib.get_close_matches(first, options, n=1, cutoff=0.5)
        raise RequestError(unknown[1], f"is no argument of {self.prog}", near or (f"{self.prog} --help",))

    def _print_message(self, message: str, file: Any = None) -> None:
        print_styled(message.rstrip("\n"), _STYLES, sys.stdout if file is None else file)


def front_parser(commands: Sequence[Command]) -> Parser:
    """Return the parser of ``meshwright`` itself: what stands before the command."""
    width = max(len(command.NAME) for command in commands)
    listing = "\n".join(f"  {command.NAME:<{width}}  {command.HELP}" for command in commands)
    parser = Parser(
        prog="meshwright",
        usage="meshwright COMMAND [RUN.toml] [section.key=value ...] [options]",
        description="Train transformer language models on a process mesh: see what a layout costs, run it, prove it.",
        epilog=f"commands:\n{listing}\n\nMore: meshwright COMMAND --help\nexit codes: {_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def command_parser(command: Command) -> Parser:
    """Return the parser of one command, with the options every command has."""
    parser = Parser(
        prog=f"meshwright {command.NAME}",
        description=command.HELP[0].upper() + command.HELP[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in command.EXAMPLES.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an unexpected error")
    return parser


def parse_arguments(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's words; options may stand between overrides. Raises ``RequestError``, or exits after help."""
    parser = command_parser(command)
    nested = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in parser._actions)
    return parser.parse_args(words) if nested else parser.parse_intermixed_args(words)


def find_command(commands: Sequence[Command], name: str) -> Command:
    """Return the command called ``name``. Raises ``RequestError`` that names the nearest."""
    by_name = {command.NAME: command for command in commands}
    if name in by_name:
        return by_name[name]
    near = difflib.get_close_matches(name.lower(), by_name, n=2, cutoff=0.5)
    raise RequestError(name, "is no command", near or tuple(by_name))
