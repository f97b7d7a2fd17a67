"""What a command is: a module of ``cli/commands`` with these names."""

from __future__ import annotations

import argparse
from typing import Protocol

__all__ = ["Command"]


class Command(Protocol):
    """A module that is a command. It imports nothing heavy before ``run``."""

    NAME: str
    """The word typed."""
    HELP: str
    """One line."""
    EXAMPLES: str
    """Command lines that work, one a line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's own arguments; ``--json``, ``--debug`` and ``--help`` are there already."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code: 0 done, 1 the run or the check failed. Raises ``RequestError``."""
