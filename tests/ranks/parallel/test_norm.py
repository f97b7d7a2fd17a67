"""The norm and the clipping of gradients where tensors have different copies: experts, routers, anything, on any mesh.

Nothing here runs experts: gradients are set by hand into stores of owned tensors, and the executor's own norm and
update do the rest. What each rank counts follows from ownership alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.arch.arch import Experts
from meshwright.arch.parameters import tensors
from meshwright.arch.tensors import Init, LogicalAxis
from meshwright.arch.tensors import Tensor as LogicalTensor
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import OptimizerKind
from meshwright.data.batch import Batch
from meshwright.layout.axes import DEFAULT_ORDER, Axis, Degrees, split, whole
from meshwright.layout.groups import GroupName
from meshwright.layout.ownership import Cut, Ownership
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.executor import Executor
from meshwright.parallel.split import WeightProducts
from meshwright.parallel.store import Store
from meshwright.plan.action import Action, Kind, Op, Phase
from meshwright.plan.buckets import ALIGN, Bucket, Segment, ceil_to, stage_buckets
from meshwright.plan.lowering.listing import Listing
from meshwright.plan.owners import owners
from meshwright.plan.plan import Optimizer, Plan
from meshwright.plan.program import Program
from meshwright.testing.ranks import run_cases
from tests.ranks.parallel.plain import DOUBLE
from tests.unit.plan.plans import make_plan

CLIP = 6.5
SGD = Optimizer(kind=OptimizerKind.SGD, weight_decay=0.0, clip_norm=CLIP)
Gradients = dict[str, Tensor]
"""Whole logical gradients, by name."""


@dataclass(frozen=True)
class Case:
    """Whole gradients over a plan's mesh: set by hand over what is `owned`, or any over what the plan itself owns."""

    name: str
    plan: Plan
    owned: tuple[Ownership, ...] = ()
    by_hand: tuple[tuple[str, tuple[int, int], float], ...] = ()

    @property
    def gradients(self) -> Gradients:
        random = torch.Generator().manual_seed(7)
        if not self.owned:
            shapes = {each.name: each.shape for each in tensors(self.plan.arch)}
            return {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
        found = {each.tensor.name: torch.zeros(each.tensor.shape, dtype=torch.float64) for each in self.owned}
        for name, place, value in self.by_hand:
            found[name][place] = value
        return found


def buckets_of(case: Case, stage: int) -> tuple[Bucket, ...]:
    """The plan's own, or one for each owned tensor."""
    if not case.owned:
        return stage_buckets(case.plan, stage)
    return tuple(_bucket(case.plan.degrees, index, owner) for index, owner in enumerate(case.owned))


def _bucket(degrees: Degrees, index: int, owner: Ownership) -> Bucket:
    segment = Segment(owner, 0, owner.local_shape(degrees))
    numel = ceil_to(segment.numel, ALIGN * degrees.ranks)
    return Bucket(index, (0,), (segment,), owner.replicas, (), True, False, numel, 0)


@lru_cache(maxsize=16)
def mesh_of(degrees: Degrees) -> Mesh:
    """Communicators are made once a launch."""
    ways = {axis.value: degrees.on(axis) for axis in Axis}
    return Mesh(**ways, order=degrees.order).start()


def clips(rank: int, case: Case) -> tuple[float, float, float]:
    """Set, norm, clip and update; the norm as this rank has it and as one process would, and the largest error of what
    its weights did."""
    plan = case.plan
    mesh = mesh_of(plan.degrees)
    buckets, allocator = buckets_of(case, mesh.coordinates.pp), Allocator(torch.device("cpu"))
    stores = [Store(plan, bucket, mesh.coordinates, allocator) for bucket in buckets]
    listing = Listing()
    listing.wait(listing.add(Action(Op.NORM, Phase.NORM, group=GroupName.WORLD)))
    for bucket in buckets:
        listing.add(Action(Op.UPDATE, Phase.UPDATE, bucket=bucket.index))
    program = Program(mesh.coordinates.pp, Kind.TRAIN, tuple(listing.actions), buckets)
    executor = Executor(plan, program, mesh, {}, stores, allocator, WeightProducts(stores))
    gradients = case.gradients
    norm = float(torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients.values()])))
    wanted = {id(store): _flat(plan, mesh, store, gradients) for store in stores}

    def before(action: Action) -> None:
        if action.op is Op.NORM:
            for store in stores:
                store.seal()
                store.reduced.copy_(wanted[id(store)])

    executor.before = before
    executor.run(Batch.of_tokens(np.zeros((1, 2), dtype=np.int64)), rate=1.0)
    coefficient = min(CLIP / (norm + 1e-6), 1.0)
    moved = [store.master + coefficient * wanted[id(store)] for store in stores if store.first < store.last]
    return executor.norm, norm, max((float(each.abs().max()) for each in moved), default=0.0)


def _flat(plan: Plan, mesh: Mesh, store: Store, gradients: Gradients) -> Tensor:
    """(last - first,) the pieces of the whole gradients that a rank's store holds."""
    flat = torch.zeros(store.bucket.numel, dtype=torch.float64)
    for segment in store.bucket.segments:
        box = segment.owner.rectangle(plan.degrees, mesh.coordinates)
        held = flat[segment.offset : segment.stop].view(segment.shape)
        piece = gradients[segment.name][tuple(map(slice, box.start, box.stop))]
        held[tuple(map(slice, box.extent))] = piece
    return flat[store.first : store.last]


# ------------------------------------------------------------------ 3, 4 and 12 make 13


def tensor(name: str, *axes: LogicalAxis, shape: Sequence[int]) -> LogicalTensor:
    return LogicalTensor(name, tuple(shape), axes, Init(), 0, (0,))


EXPERTS = tensor("experts", LogicalAxis.EXPERTS, LogicalAxis.EXPERT_FFN, shape=(4, 4))
SHARED = tensor("router", LogicalAxis.ROUTES, LogicalAxis.HIDDEN, shape=(4, 4))


def by_hand(name: str, zero: int, cuts: tuple[Cut, ...], degrees: Degrees, experts: tuple[int, int]) -> Case:
    """Expert `experts[0]` has the gradient [3], `experts[1]` has [4], the router, which all hold, [12]."""
    plan = make_plan(zero=zero, precision=DOUBLE, optimizer=SGD)
    plan = replace(plan, degrees=degrees)
    owned = (Ownership(EXPERTS, (0,), cuts, GroupName.EXPERT), Ownership(SHARED, (0,)))
    values = ("experts", (experts[0], 1), 3.0), ("experts", (experts[1], 2), 4.0), ("router", (3, 0), 12.0)
    return Case(f"{name}, stage {zero}, experts {experts}", plan, owned, values)


def placements(degrees: Degrees) -> dict[str, tuple[Cut, ...]]:
    """Ways to lay out experts on ep and tp; how far tp cuts them need not be how far it cuts everything else."""
    by_expert, by_width = Cut(0, whole(degrees, Axis.EP)), Cut(1, whole(degrees, Axis.TP))
    found = {"experts over ep": (by_expert,)}
    if degrees.tp > 1:
        found["and their width over tp"] = (by_expert, by_width)
        found["experts over ep x tp"] = (Cut(0, whole(degrees, Axis.EP, Axis.TP)),)
        outer, inner = split(degrees, 2, Axis.EP, Axis.TP)
        found["experts over the inner digit of ep x tp"] = (Cut(0, inner),)
        found["width over the outer one as well"] = (Cut(0, inner), Cut(1, outer))
    return found


EP_FIRST = (Axis.EP, *(axis for axis in DEFAULT_ORDER if axis is not Axis.EP))
EP_LAST = (*(axis for axis in DEFAULT_ORDER if axis is not Axis.EP), Axis.EP)
GRID = {
    2: [Degrees(ep=2)],
    4: [
        Degrees(ep=4), Degrees(ep=2, tp=2), Degrees(ep=2, tp=2, order=EP_FIRST), Degrees(ep=2, tp=2, order=EP_LAST),
        Degrees(ep=2, dp=2), Degrees(ep=2, dp=2, order=EP_LAST), Degrees(ep=2, cp=2),
    ],
}  # fmt: skip


def hand_set(ranks: int) -> list[Case]:
    return [
        by_hand(f"{degrees}: {name}", zero, cuts, degrees, experts)
        for degrees in GRID[ranks]
        for name, cuts in placements(degrees).items()
        for zero in (0, 2)
        for experts in ((0, 3), (3, 0), (1, 2))
    ]


# ------------------------------------------------------------------ the tensors of a model with experts


def of_a_model(name: str, zero: int, tied: bool = False, **degrees: int) -> Case:
    """Eight experts of which a token takes two; any gradient."""
    arch = {"experts": Experts(8, 2, 16), "tie_embeddings": tied}
    return Case(f"{name}, stage {zero}", make_plan(zero=zero, precision=DOUBLE, optimizer=SGD, arch=arch, **degrees))


def models() -> list[Case]:
    meshes = [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "dp": 2}, {"ep": 2, "pp": 2}, {"tp": 4}, {"dp": 4}]
    found = [of_a_model(str(mesh), zero, **mesh) for mesh in meshes for zero in (0, 3)]
    return [*found, *(of_a_model("tied", zero, tied=True, ep=2, pp=2) for zero in (0, 3))]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.prove), 4])
def test_everything_is_counted_once_wherever_it_lies(ranks: int) -> None:
    """B13, B15, B19: of 3, 4 and 12 a mean of the ranks' norms would be 12.5, a sum over all holders more than 13, and
    other experts on other ranks would clip differently; of a model, the norm is that of one process."""
    cases = hand_set(ranks) + (models() if ranks == 4 else [])
    for of_rank in run_cases(clips, ranks, cases, timeout=100):
        for case, (norm, alone, error) in zip(cases, of_rank, strict=True):
            assert norm == (13.0 if case.owned else pytest.approx(alone, rel=1e-14, abs=0)), case.name
            assert error <= 1e-14, case.name


def test_experts_have_replicas_of_their_own() -> None:
    plan = of_a_model("ep 2 x dp 2", 0, ep=2, dp=2).plan
    found = {owner.tensor.name.split(".", 2)[-1]: owner for owner in owners(plan) if "layers.0" in owner.tensor.name}
    assert {name for name, owner in found.items() if owner.replicas is GroupName.EXPERT} == {
        "mlp.experts.gate", "mlp.experts.up", "mlp.experts.down",
    }  # fmt: skip
    boxes = [found["mlp.experts.up"].rectangle(plan.degrees, plan.degrees.coordinates(rank)) for rank in range(4)]
    assert [box.start[0] for box in boxes] == [0, 4, 0, 4]
    assert {box.extent[0] for box in boxes} == {4}
