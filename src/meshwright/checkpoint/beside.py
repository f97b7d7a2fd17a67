"""What lies beside imported weights: config, tokenizer and generation settings of the folder they came from.

The manifest keeps the digest of each, so they are checked as the weights are. What somebody puts there later has none,
and is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.storage import Storage, write_small
from meshwright.checkpoint.strict import Reader

__all__ = ["BESIDE", "beside_of", "place_beside", "recorded", "write_beside"]

BESIDE = "beside"
"""The key of the digests in a manifest's `extra`: file name -> xxh3-128 of the whole file."""


def place_beside(path: str) -> str:
    """The folder inside the checkpoint at `path` that keeps it."""
    return f"{path}/huggingface" if path else "huggingface"


def recorded(files: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    """What `extra` says of `files`, name -> content."""
    return {BESIDE: {name: xxhash.xxh3_128_hexdigest(content) for name, content in files.items()}} if files else {}


def beside_of(storage: Storage, path: str, manifest: Manifest) -> dict[str, bytes]:
    """Name -> content; empty where the checkpoint was not imported. Raises DamagedError for links, and for files that
    are not what was written."""
    place = place_beside(path)
    digests = _digests(manifest, storage.where(path))
    read = {name: storage.read(f"{place}/{name}") for name in {*storage.names(place), *digests}}
    for name, digest in sorted(digests.items()):
        content = read[name]
        if content is None:
            raise DamagedError(storage.where(f"{place}/{name}"), "is missing")
        if (actual := xxhash.xxh3_128_hexdigest(content)) != digest:
            where = storage.where(f"{place}/{name}")
            raise DamagedError(where, f"the file, {len(content)} bytes", expected=digest, actual=actual)
    return {name: content for name, content in sorted(read.items()) if content is not None}


def write_beside(storage: Storage, path: str, files: Mapping[str, bytes]) -> None:
    """Keep `files` with the checkpoint that is being written at `path`."""
    if files:
        storage.make(place_beside(path))
    for name, content in files.items():
        write_small(storage, f"{place_beside(path)}/{name}", content)


def _digests(manifest: Manifest, where: str) -> dict[str, str]:
    """The digests that were kept; empty for a checkpoint that was written before they were."""
    if BESIDE not in manifest.extra:
        return {}
    reader = Reader(manifest.extra[BESIDE], where, "what the manifest says of the files beside the weights")
    named = {name: reader.text(name) for name in tuple(reader.keys())}
    if odd := [name for name in named if "/" in name or "\\" in name or name.startswith(".")]:
        reader.refuse(f"names the file {odd[0][:60]!r}: only plain names are opened")
    return named
