"""``meshwright schema``: the JSON Schema of run files, for editors."""

from __future__ import annotations

import argparse
import sys

from meshwright.cli.output import print_json

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "schema"
HELP = "print the JSON Schema of run files, so that an editor completes and checks them"
EXAMPLES = """\
meshwright schema > run.schema.json
  then, as the first line of a run file: #:schema ./run.schema.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the schema: indented for people and files, on one line with ``--json``."""
    from meshwright.config.load import json_schema

    print_json(json_schema(), indent=None if arguments.json else 2, stream=sys.stdout)
    return 0
