"""What the commands that read checkpoints have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.cli.output import print_error
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.checkpoint.storage import Storage

__all__ = ["found", "told"]


def found(address: str) -> tuple[Storage, str]:
    """The checkpoint at `address`: a step folder, `latest`, a run folder, an fsspec address. Raises RequestError,
    DamagedError for a broken `latest`."""
    from meshwright.checkpoint.errors import AddressError
    from meshwright.checkpoint.folder import find_checkpoint

    try:
        return find_checkpoint(address)
    except AddressError as error:
        raise RequestError(error.address, error.rule, ("runs/NAME", "a folder step-...")) from None


def told(action: Callable[[], int]) -> int:
    """Run a command's work; damage and full disks are one message and exit code 1, not a traceback."""
    from meshwright.checkpoint.errors import CheckpointError

    try:
        return action()
    except CheckpointError as error:
        print_error(str(error))
        return 1
    except BrokenPipeError:
        raise  # not ours to tell: the reader of our output has gone
    except OSError as error:
        print_error(f"{error.filename or 'input/output'}: {error.strerror or error}")
        return 1
