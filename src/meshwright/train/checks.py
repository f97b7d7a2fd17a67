"""What is checked once, when the ranks have met and after their first step: that they do one thing together."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.comm.gather import gather_integers
from meshwright.comm.mesh import Mesh
from meshwright.data import Batch, batch_place
from meshwright.plan.plan import Plan

__all__ = ["DisagreementError", "check_batches", "check_same_run"]

_MASK = (1 << 63) - 1


class DisagreementError(RuntimeError):
    """Ranks of one run do not do the same: one line that names the first that differs and what."""


def check_same_run(mesh: Mesh, plan: Plan, corpus: str) -> None:
    """Every rank has the plan and the corpus of rank 0. Collective. Raises DisagreementError on all ranks."""
    mine = [_number(plan.math), _number(plan.layout), _number(corpus[:16])]
    seen = gather_integers(mesh, mine)
    for place, what in enumerate(("the plan (math)", "the plan (layout)", "the corpus")):
        values = [row[place] for row in seen]
        if (rank := _first_other(values)) is not None:
            raise DisagreementError(f"{what} differs: rank {rank} has {values[rank]:x}, rank 0 has {values[0]:x}")


def check_batches(mesh: Mesh, plan: Plan, batch: Batch) -> None:
    """Ranks of one batch coordinate hold equal tokens, labels and samples: tp, pp and cp cut one and the same batch.

    `batch` is what this rank reads in a step, before any cut. Collective. Raises DisagreementError on all ranks.
    """
    place, _ = batch_place(plan, mesh.rank)
    seen = gather_integers(mesh, [place, batch.fingerprint() & _MASK])
    by_place: dict[int, int] = {}
    for rank, (coordinate, fingerprint) in enumerate(seen):
        first = by_place.setdefault(coordinate, rank)
        if seen[first][1] != fingerprint:
            raise DisagreementError(
                f"ranks {first} and {rank} share batch coordinate {coordinate} but read different samples"
            )


def _first_other(values: Sequence[int]) -> int | None:
    return next((place for place, value in enumerate(values) if value != values[0]), None)


def _number(digits: str) -> int:
    return int(digits, 16) & _MASK
