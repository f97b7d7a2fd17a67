"""Loading into an engine: each rank reads the blocks that hold its pieces, then all compare fingerprints.

A block digest tells that the disk gave back what was written to it; a fingerprint tells that the right elements ended
in the right places, whatever layout wrote them and whatever layout holds them now (`arrival`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshwright.checkpoint.arrival import Arrival
from meshwright.checkpoint.engine import subject_of
from meshwright.checkpoint.errors import CheckpointError, DamagedError, os_words
from meshwright.checkpoint.fingerprint import check_fingerprint
from meshwright.checkpoint.fits import check_fits, has_states
from meshwright.checkpoint.folder import find_checkpoint, load_manifest
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.source import Source, checkpoint_source, fill
from meshwright.checkpoint.state import is_bias
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.subject import Subject
from meshwright.comm.agree import Side, refused_by, words
from meshwright.config.errors import RequestError
from meshwright.parallel.engine import Engine

__all__ = ["agreed", "load", "load_checkpoint", "load_weights"]

T = TypeVar("T")


def load(held: Engine | Subject, address: str | Path, side: Side) -> Manifest:
    """Fill an engine, or another subject, from the checkpoint at `address` (a step folder, `latest`, or a run folder).

    Weights, states of the optimizer and the count of updates; the caller goes on from the manifest's step and samples.
    Collective. Raises DamagedError or CheckpointError, on every rank alike.
    """
    storage, path = agreed(side, lambda: find_checkpoint(address))
    return load_checkpoint(held, storage, path, side)


def load_checkpoint(held: Engine | Subject, storage: Storage, path: str, side: Side) -> Manifest:
    """`load` of the checkpoint at `path` of `storage`."""
    subject = subject_of(held)

    def read() -> tuple[Manifest, Arrival]:
        manifest = load_manifest(storage, path)
        subject.expect(manifest)
        check_fits(manifest, subject.known, storage.where(path))
        source, views = checkpoint_source(storage, path, manifest), subject.views()
        saved = {tensor.name for tensor in manifest.tensors}
        arrival = Arrival(subject, views, manifest)
        fill(source, {piece: view for piece, view in views.items() if piece.tensor in saved}, arrival.watch)
        fill(source, subject.stale())
        return manifest, arrival

    manifest, arrival = agreed(side, read)
    _compare(arrival, storage.where(f"{path}/{MANIFEST}"), side)
    subject.finish(manifest.updates if has_states(manifest, subject.known) else 0, manifest.extra)
    return manifest


def load_weights(held: Engine | Subject, source: Source, side: Side) -> None:
    """Fill the weights alone, and the routers' biases where there are any, from any source; the optimizer starts anew.
    Collective; raises as `load` does."""
    subject = subject_of(held)

    def read() -> None:
        wanted = subject.views().items()
        fill(source, {piece: view for piece, view in wanted if _is_model(piece.tensor, source)})
        fill(source, subject.stale())

    agreed(side, read)
    subject.finish(0, {})


def _is_model(name: str, source: Source) -> bool:
    return bool(source.of([name])) if is_bias(name) else "/" not in name


def agreed(side: Side, action: Callable[[], T]) -> T:
    """Do `action` on every rank; where it fails on one, all raise what the first of them raised; a refusal of the
    request is raised elsewhere as one that stops because of that rank. Collective."""
    result: T | None = None
    refusal: RequestError | None = None
    told: dict[str, object] = {}
    try:
        result = action()
    except RequestError as error:
        refusal, told = error, {"refused": words(error).decode()}
    except DamagedError as error:
        told = {"damaged": error.fields()}
    except CheckpointError as error:
        told = {"message": str(error)}
    except OSError as error:
        told = {"message": os_words(error, "input/output")}
    for rank, message in enumerate(side.together(json.dumps(told).encode())):
        value = json.loads(message)
        if "refused" in value:
            raise refused_by(side, rank, value["refused"].encode(), refusal)
        if "damaged" in value:
            raise DamagedError(**value["damaged"])
        if "message" in value:
            raise CheckpointError(value["message"])
    return result  # type: ignore[return-value]


def _compare(arrival: Arrival, where: str, side: Side) -> None:
    """Every tensor that was loaded in the type in which it is stored has its saved fingerprint."""
    for each, actual in zip(arrival.tensors, side.total(arrival.sums()), strict=True):
        check_fingerprint(where, each.name, each.fingerprint, actual)
