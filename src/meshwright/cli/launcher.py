"""A command that may be one of a launcher's ranks: its place, and who of them tells that a request was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.launch.environment import Place

__all__ = ["REFUSALS", "is_first_of_host", "place_of_launcher", "told_once"]

REFUSALS = (RequestError,)
"""What a rank may raise that means: the request was wrong."""


def place_of_launcher() -> Place | None:
    """This process's place among a launcher's ranks; None outside every launcher. Raises RequestError."""
    from meshwright.launch.environment import PlaceError, detect

    try:
        return detect()
    except PlaceError as error:
        raise RequestError("the launcher's environment", str(error)) from None


def is_first_of_host() -> bool:
    """Whether this process tells what all ranks of its host find; outside a launcher it does."""
    try:
        place = place_of_launcher()
    except RequestError:  # refused where the place is needed
        return True
    return place is None or place.local_rank == 0


@contextmanager
def told_once(place: Place | None) -> Iterator[None]:
    """What every rank finds wrong before it meets the others is told by the first of each host, for files may differ
    between hosts; the others leave with the same exit code, silent."""
    try:
        yield
    except RequestError:
        if place is None or place.local_rank == 0:
            raise
        from meshwright.launch.local import leave_silently

        raise SystemExit(leave_silently()) from None
