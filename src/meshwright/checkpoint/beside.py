"""What lies beside imported weights: config, tokenizer and generation settings of the folder they came from."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.checkpoint.storage import Storage, write_small

__all__ = ["beside_of", "place_beside", "write_beside"]


def place_beside(path: str) -> str:
    """The folder inside the checkpoint at `path` that keeps it."""
    return f"{path}/huggingface" if path else "huggingface"


def beside_of(storage: Storage, path: str) -> dict[str, bytes]:
    """Name -> content; empty where the checkpoint was not imported. Raises DamagedError for links."""
    place = place_beside(path)
    read = {name: storage.read(f"{place}/{name}") for name in storage.names(place)}
    return {name: content for name, content in read.items() if content is not None}


def write_beside(storage: Storage, path: str, files: Mapping[str, bytes]) -> None:
    """Keep `files` with the checkpoint that is being written at `path`."""
    if files:
        storage.make(place_beside(path))
    for name, content in files.items():
        write_small(storage, f"{place_beside(path)}/{name}", content)
