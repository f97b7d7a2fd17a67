"""The one process-wide table: name -> communicator, for custom operations that receive only a name.

A compiled graph may hold no Python object, so a collective inside a unit names its group; everything else is passed.
The table is filled by a context manager and empty outside it; names of several meshes may stand in it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from meshwright.comm.communicator import Communicator

_COMMUNICATORS: dict[str, Communicator] = {}


@contextmanager
def registered(communicators: Mapping[str, Communicator]) -> Iterator[None]:
    """Make `communicators` known by name for the length of the block. Names in use are refused."""
    taken = sorted(set(communicators) & set(_COMMUNICATORS))
    if taken:
        raise RuntimeError(f"communicators {', '.join(taken)} are registered already")
    _COMMUNICATORS.update(communicators)
    try:
        yield
    finally:
        for name in communicators:
            del _COMMUNICATORS[name]


def lookup(name: str) -> Communicator:
    """The communicator of that name; raises LookupError outside `registered`."""
    if name not in _COMMUNICATORS:
        raise LookupError(f"no communicator {name!r} is registered")
    return _COMMUNICATORS[name]
