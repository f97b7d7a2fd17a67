"""The masks of dropout that ranks really drew, gathered: on every layout those of one process.

    tp 2                    sequence parallel        pp 2                     dp 2
    rank 0  all tokens      rank 0  tokens 0 - 3     rank 0  layers 0, 1      rank 0  samples 0 - 23
    rank 1  the same        rank 1  tokens 4 - 7     rank 1  layers 2, 3      rank 1  samples 24 - 47

A mask is kept by the token keys that it was drawn with, which name its tokens; so nothing here repeats how a layout
cuts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Recompute
from meshwright.layout.axes import Degrees
from meshwright.model import dropout
from meshwright.model.counter import token_keys
from meshwright.model.decoder import Block
from meshwright.model.dropout import Site
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan
from meshwright.plan.stages import balanced
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.test_tensor import Case

LAYERS, PROBABILITY = 4, 0.5
STEP = 1
"""Masks are of the second step."""


@dataclass(frozen=True)
class Cut:
    """A layout of four layers with dropout at every site."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence: bool = False
    zero: int = 0
    accumulation: int = 1
    recompute: Recompute = Recompute.NONE

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in vars(self).items() if value != getattr(Cut(), key))

    @property
    def plan(self) -> Plan:
        case = Case(
            dp=self.dp, accumulation=self.accumulation, dropout=PROBABILITY, zero=self.zero, recompute=self.recompute
        )
        plan = case.plan
        return replace(
            plan,
            arch=replace(plan.arch, layers=LAYERS),
            degrees=Degrees(dp=self.dp, tp=self.tp, pp=self.pp),
            pipeline=replace(plan.pipeline, stages=balanced([1.0] * LAYERS, 0.0, 0.0, self.pp)),
            execution=replace(plan.execution, sequence=self.sequence),
        )


@dataclass
class Drawn:
    """What one rank drew in a step: (site key, token keys (N,), mask (N, D)); and what its blocks gave, by name."""

    masks: list[tuple[int, Tensor, Tensor]]
    outputs: list[tuple[str, Tensor]]
    tensor_place: int
    batch_place: int


def drawn(rank: int, case: Cut) -> Drawn:
    """One training step with every call of `dropout_mask` kept."""
    plan = case.plan
    mesh = Mesh.of(plan).start()
    engine = Engine(plan, mesh)
    found = Drawn([], [], mesh.coordinates.tp, mesh.coordinates.dp)
    plain = dropout.dropout_mask

    def kept(keys_N: Tensor, site: Tensor, first: int, features: int, probability: float) -> Tensor:
        keep_ND = plain(keys_N, site, first, features, probability)
        assert (first, features) == (0, plan.arch.hidden)
        found.masks.append((int(site), keys_N.clone(), keep_ND.clone()))
        return keep_ND

    for name, module in engine.model.named_modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda _, __, y_ND, name=name: found.outputs.append((name, y_ND.detach())))
    with mock.patch.object(dropout, "dropout_mask", kept):
        engine.step(local_share(plan, global_batches(plan, STEP + 1)[STEP], rank), 0.0)
    mesh.close()
    return found


def gathered(parts: list[Drawn]) -> dict[int, dict[int, Tensor]]:
    """Site -> token key -> mask (D,): from all ranks, and where several drew one, they drew it alike."""
    whole: dict[int, dict[int, Tensor]] = {}
    for site, keys_N, mask_ND in (each for part in parts for each in part.masks):
        of_site = whole.setdefault(site, {})
        for key, row in zip(keys_N.tolist(), mask_ND, strict=True):
            assert torch.equal(of_site.setdefault(key, row), row)
    return whole


LAYOUTS = [
    Cut(dp=4), Cut(dp=4, zero=3), Cut(dp=2, tp=2), Cut(dp=2, tp=2, sequence=True), Cut(tp=4), Cut(tp=4, sequence=True),
    Cut(pp=4, accumulation=4), Cut(dp=2, pp=2, accumulation=2), Cut(tp=2, pp=2, sequence=True, accumulation=3),
    Cut(dp=4, recompute=Recompute.FULL), Cut(dp=4, recompute=Recompute.SELECTIVE, accumulation=2),
]  # fmt: skip


@pytest.fixture(scope="module")
def ran() -> dict[Cut, list[Drawn]]:
    results = run_cases(drawn, 4, LAYOUTS, timeout=110)
    return {case: [of_rank[number] for of_rank in results] for number, case in enumerate(LAYOUTS)}


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[int, Tensor]]:
    """The masks of one process."""
    return gathered([drawn(0, Cut())])


def test_one_process_drops_other_features_of_every_token_at_every_site(alone: dict[int, dict[int, Tensor]]) -> None:
    """Every token of the step at each site; no two rows alike but by chance (24 features: one in 16 million)."""
    plan = Cut().plan
    (batch,) = global_batches(plan, STEP + 1)[STEP:]
    samples, offsets = torch.from_numpy(batch.rows.sample_ids), torch.from_numpy(batch.rows.offsets)
    keys = token_keys(plan.seed, torch.tensor(STEP), samples, offsets).tolist()
    assert len(alone) == 1 + 2 * LAYERS == len({int(each) for each in sites()})
    assert set(alone) == {int(each) for each in sites()}
    rows = []
    for of_site in alone.values():
        assert sorted(of_site) == sorted(keys)
        rows += [tuple(row.tolist()) for row in of_site.values()]
    assert len(set(rows)) > 0.999 * len(rows)
    share = torch.tensor(rows).double().mean()
    assert abs(float(share) - (1 - PROBABILITY)) < 0.01


def sites() -> list[Tensor]:
    inner = (Site.ATTENTION_OUTPUT, Site.MLP_OUTPUT)
    return [dropout.site_key(Site.EMBEDDING, 0)] + [
        dropout.site_key(site, layer) for layer in range(LAYERS) for site in inner
    ]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_gathered_masks_are_those_of_one_process(
    case: Cut, ran: dict[Cut, list[Drawn]], alone: dict[int, dict[int, Tensor]]
) -> None:
    """B31 (tt-metal#55947): one seed rule for all axes made masks equal where they should differ, or the reverse."""
    whole = gathered(ran[case])
    assert whole.keys() == alone.keys()
    for site, of_site in alone.items():
        assert whole[site].keys() == of_site.keys()
        assert all(torch.equal(whole[site][key], row) for key, row in of_site.items())


def tokens_of(part: Drawn) -> set[int]:
    return {key for _, keys_N, _ in part.masks for key in keys_N.tolist()}


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_ranks_share_tokens_where_the_stream_is_whole_and_only_there(case: Cut, ran: dict[Cut, list[Drawn]]) -> None:
    """The residual stream is copied over tp, cut under sequence parallel, and other data on every dp rank."""
    for one in ran[case]:
        for other in ran[case]:
            if one is other:
                continue
            common = tokens_of(one) & tokens_of(other)
            if one.batch_place != other.batch_place or (case.sequence and one.tensor_place != other.tensor_place):
                assert not common
            else:
                assert common == tokens_of(one) == tokens_of(other)


@pytest.mark.parametrize("case", [case for case in LAYOUTS if case.tp > 1 and not case.sequence], ids=lambda c: c.name)
def test_copies_of_the_stream_stay_equal_bit_for_bit(case: Cut, ran: dict[Cut, list[Drawn]]) -> None:
    by_place: dict[int, Any] = {}
    for part in ran[case]:
        first = by_place.setdefault(part.batch_place, part)
        assert len(part.outputs) == len(first.outputs) == LAYERS
        for (name, y_ND), (same, x_ND) in zip(part.outputs, first.outputs, strict=True):
            assert name == same
            assert torch.equal(y_ND, x_ND)
