"""The entry point: find the command, run it, turn what it raises into one message and an exit code.

0 done   1 the run or the check failed   2 the request was wrong   130 SIGINT   143 SIGTERM
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from meshwright.cli.command import Command
from meshwright.cli.commands import COMMANDS
from meshwright.cli.output import logs_to_stderr, open_standard_streams, plain_warnings, print_error
from meshwright.cli.parser import find_command, front_parser, parse_arguments
from meshwright.config.errors import RequestError

__all__ = ["main"]

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run the command line and return its exit code; ``argv`` is without the program's name."""
    words = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    try:
        return _dispatch(words, commands)
    except RequestError as error:
        print_error(str(error))
        return WRONG
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; the interpreter's last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except SystemExit as leave:
        return _exit_code(leave)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        else:
            print_error(f"{type(error).__name__}: {error}\nRun again with --debug for the traceback.")
        return FAILED


def _dispatch(words: list[str], commands: Sequence[Command]) -> int:
    """Run the first word as a command on the rest; without one, show the front page."""
    if words[:1] == ["help"] and len(words) <= 2:
        words = [*words[1:], "--help"]
    if words and words[0] == "--debug" and len(words) > 1:
        words = [*words[1:], "--debug"]
    if not words or words[0].startswith("-"):
        front = front_parser(commands)
        if front.parse_args(words).version:
            from importlib.metadata import version

            print(f"meshwright {version('meshwright')}")
        else:
            front.print_help()
        return DONE
    command = find_command(commands, words[0])
    arguments = parse_arguments(command, words[1:])
    with logs_to_stderr(), plain_warnings():
        return command.run(arguments)


def _exit_code(leave: SystemExit) -> int:
    """Read an exit as Python does: nothing is success, a number is the code, anything else a message of failure."""
    if leave.code is None or isinstance(leave.code, int):
        return leave.code or DONE
    print_error(str(leave.code))
    return FAILED
