"""The commands, one file each. A command exists when it stands in this tuple; help lists them in this order."""

from __future__ import annotations

from meshwright.cli.command import Command
from meshwright.cli.commands import (
    bench,
    checkpoint,
    convert,
    doctor,
    estimate,
    evaluate,
    explain,
    export,
    generate,
    import_,
    plan,
    schema,
    train,
    verify,
)

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (
    train,
    explain,
    estimate,
    plan,
    verify,
    checkpoint,
    evaluate,
    generate,
    import_,
    export,
    convert,
    doctor,
    bench,
    schema,
)
