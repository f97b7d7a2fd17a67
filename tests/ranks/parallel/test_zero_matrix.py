"""The whole matrix of ZeRO, and the oldest test of a sum: parts of 1, 2, 4 and 8 make 15 wherever they are added up.

A part that is left out, added twice or put in another's place makes another number, and which one tells what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.config.choices import Offload, Recompute
from meshwright.parallel.executor import Executor
from meshwright.plan.action import Action
from meshwright.plan.plan import Execution
from meshwright.plan.rules import check_plan
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, SGD, Case
from tests.ranks.parallel.running import engine_of
from tests.ranks.parallel.test_zero import equals_one_process

Backward = Callable[[Executor, Action], None]
PARTS, WHOLE = 4, 15.0


def sums_to_15(rank: int, case: Case) -> int:
    """Micro-batch number m of the global batch leaves 2^m in every gradient; elements that were looked at."""
    share = local_share(case.plan, global_batches(case.plan, 1)[0], rank)
    seen = 0

    def backward(original: Backward, self: Executor, action: Action) -> None:
        own = [store for store in self.stores if store.bucket.units == (action.unit,)]
        before = [s.gradient.clone() if s.gradient.untyped_storage().nbytes() else None for s in own]
        original(self, action)
        part = 2.0 ** (rank * case.accumulation + action.micro)
        for store, held in zip(own, before, strict=True):
            for segment in store.bucket.segments:
                span = slice(segment.offset, segment.stop)
                store.gradient[span] = part if held is None else held[span] + part

    def norm(original: Backward, self: Executor, action: Action) -> object:
        nonlocal seen
        for store in self.stores:
            held = torch.zeros(store.bucket.numel, dtype=torch.bool)
            for segment in store.bucket.segments:
                held[segment.offset : segment.stop] = True
            found = store.reduced[held[store.first : store.last]]
            assert bool((found == WHOLE).all()), f"{case.name}: {found.unique().tolist()}"
            assert not bool(store.reduced[~held[store.first : store.last]].any()), f"{case.name}: padding"
            seen += found.numel()
        return original(self, action)

    with _around("_backward", backward), _around("_norm", norm):
        engine_of(case.plan).step(share, 0.0)
    return seen


def _around(name: str, wrapped: Callable[..., object]) -> AbstractContextManager[object]:
    original = getattr(Executor, name)
    return patch.object(Executor, name, lambda self, action: wrapped(original, self, action))


def parts(dp: int) -> list[Case]:
    """All ways of four micro-batches on `dp` ranks."""
    cases = [
        Case(f"dp {dp}, stage {zero}, {recompute.value}", dp, zero, PARTS // dp, bucket_bytes=cut,
             execution=Execution(recompute=recompute))
        for zero, recompute, cut in product(range(4), Recompute, (0, 20_000))
    ]  # fmt: skip
    if dp == 4:
        cases += [Case(f"2 x 2, stage {zero}", dp, zero, 1, within=2) for zero in (1, 2, 3)]
    return cases


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_parts_of_1_2_4_and_8_sum_to_15(dp: int) -> None:
    for seen in zip(*run_cases(sums_to_15, dp, parts(dp)), strict=True):
        assert all(seen)  # no rank looked at nothing


AWAY: tuple[tuple[Offload, bool], ...] = (
    (Offload.NONE, False),
    (Offload.OPTIMIZER, False),
    (Offload.OPTIMIZER, True),
    (Offload.PARAMS, False),
    (Offload.PARAMS, True),
)
"""What is kept away from the device, and whether on disk."""


def everything(dp: int, within: int, folder: Path) -> Iterator[Case]:
    """Stages x accumulation x recomputation x offload; SGD has no states to keep away."""
    for zero, accumulation, recompute, (offload, disk) in product(
        range(1 if within else 0, 4), (1, 4), Recompute, AWAY
    ):
        if offload is Offload.PARAMS and zero != 3:
            continue
        where = str(folder) if disk else "memory"
        name = f"dp {dp}, within {within}, stage {zero}, {accumulation} micro-batches, {recompute.value}"
        case = Case(
            f"{name}, {offload.value} to {where}", dp, zero, accumulation, within, tied=accumulation == 4,
            execution=Execution(recompute=recompute, offload=offload, offload_to=where),
        )  # fmt: skip
        check_plan(case.plan)
        yield case
        if offload is Offload.NONE:
            yield replace(case, name=f"{name}, sgd", optimizer=SGD, tied=not case.tied)


def test_the_matrix_has_every_combination(tmp_path: Path) -> None:
    cases = [case for dp, within in GRID for case in everything(dp, within, tmp_path)]
    assert len(cases) == 408
    assert len({case.name for case in cases}) == len(cases)
    assert {case.optimizer for case in cases} == {SGD, ADAMW}


GRID = ((2, 0), (3, 0), (4, 0), (4, 2))


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("dp", "within"), GRID)
def test_all_of_zero_equals_one_process(dp: int, within: int, tmp_path: Path) -> None:
    cases = list(everything(dp, within, tmp_path))
    results = run_cases(equals_one_process, dp, cases, timeout=1790)
    print(f"dp {dp} within {within}: {len(cases)} cases on {len(results)} ranks equal one process")
