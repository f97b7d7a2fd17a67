"""A split backward: its halves are halves, together they are the whole, and a schedule needs no line in the package."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshwright.arch.arch import Experts
from meshwright.arch.arithmetic import active_matmul_parameters
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import Dtype, Recompute
from meshwright.parallel.direct import apply_direct
from meshwright.parallel.engine import Engine
from meshwright.parallel.split import WeightProducts
from meshwright.plan.action import Action, Op
from meshwright.plan.plan import Plan, Precision
from meshwright.plan.schedules import ScheduleFunction, Slot, Work, one_f_one_b, zb_h1
from meshwright.verify.batches import global_batches
from tests.unit.plan.plans import make_plan

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


def weights_last(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
    """A schedule that the package does not know: one micro-batch at a time, all weight products at the very end."""
    pairs = ((Slot(Work.FORWARD, 0, micro), Slot(Work.BACKWARD, 0, micro, split=True)) for micro in range(micros))
    weights = (Slot(Work.WEIGHT, 0, micro) for micro in reversed(range(micros)))
    return (*(slot for pair in pairs for slot in pair), *weights)


def plan_of(
    dtype: Dtype = Dtype.FLOAT32,
    tied: bool = False,
    recompute: Recompute = Recompute.NONE,
    experts: Experts | None = None,
) -> Plan:
    arch = {"tie_embeddings": tied, "experts": experts}
    return make_plan(accumulation=3, recompute=recompute, precision=Precision(dtype, dtype, dtype), arch=arch)


def flops_by_action(schedule: ScheduleFunction, plan: Plan) -> Counter[tuple[Op, bool]]:
    """FLOPs of matrix products in one step, by (operation, split)."""
    engine = Engine(plan, Mesh(), schedule=schedule)
    counted: Counter[tuple[Op, bool]] = Counter()
    in_place = {torch.ops.aten.addmm_: lambda self, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as mode:
        running: list[Action] = []
        before = 0

        def look(action: Action) -> None:
            nonlocal before
            total = sum(mode.flop_counts["Global"].get(each, 0) for each in PRODUCTS)
            if running:
                counted[running[-1].op, running[-1].split] += total - before
            before = total
            running.append(action)

        engine.observe(look)
        (batch,) = global_batches(plan, 1)
        engine.step(batch, 0.1)
    return counted


EXPERTS = Experts(4, 2, 32, shared=1)


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_forward_backward_and_weight_do_the_same_products(experts: Experts | None) -> None:
    """Of experts as many as the tokens that were sent to them."""
    split, whole = (flops_by_action(each, plan_of(experts=experts)) for each in (zb_h1.slots, one_f_one_b.slots))
    forward = whole[Op.FORWARD, False]
    assert forward > 0
    assert split == {(Op.FORWARD, False): forward, (Op.BACKWARD, True): forward, (Op.WEIGHT, False): forward} | {
        key: 0 for key in split if key[0] not in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT)
    }
    assert whole[Op.BACKWARD, False] == 2 * forward
    assert split.total() == whole.total()
    if experts is not None:
        plan = plan_of(experts=experts)
        tokens = plan.batch.sequences * plan.data.sequence_length
        assert whole.total() == 6 * active_matmul_parameters(plan.arch) * tokens


def gradients(schedule: ScheduleFunction, plan: Plan) -> tuple[list[Tensor], float]:
    engine = Engine(plan, Mesh(), schedule=schedule)
    taken: dict[int, Tensor] = {}

    def take(action: Action) -> None:
        if action.op is Op.UPDATE:
            taken[action.bucket] = engine.stores[action.bucket].reduced.clone()

    engine.observe(take)
    (batch,) = global_batches(plan, 1)
    loss = engine.step(batch, 0.1).loss
    return list(taken.values()), loss


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize(("tied", "experts"), [(False, None), (True, None), (False, EXPERTS)])
def test_split_gradients_are_the_whole_ones(tied: bool, experts: Experts | None, recompute: Recompute) -> None:
    """Micro-batches are added in order in both, so the gradients are equal bit for bit."""
    plan = plan_of(tied=tied, recompute=recompute, experts=experts)
    whole, loss = gradients(one_f_one_b.slots, plan)
    split, same = gradients(zb_h1.slots, plan)
    assert loss == same
    assert all(torch.equal(one, other) for one, other in zip(split, whole, strict=True))


def test_a_schedule_of_this_file_runs_unchanged() -> None:
    plan = plan_of(Dtype.FLOAT64)
    whole, loss = gradients(one_f_one_b.slots, plan)
    other, same = gradients(weights_last, plan)
    assert loss == same
    for one, expected in zip(other, whole, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-15)


def test_gradients_in_a_wider_dtype() -> None:
    """Products of bfloat16 are added up in float32, split or not."""
    plan = replace(plan_of(), precision=Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32))
    whole, _ = gradients(one_f_one_b.slots, plan)
    split, _ = gradients(zb_h1.slots, plan)
    assert {each.dtype for each in whole} == {torch.float32}
    assert all(torch.equal(one, other) for one, other in zip(split, whole, strict=True))


def test_a_schedule_that_forgets_something_is_refused() -> None:
    def forgetful(stage: int, stages: int, micros: int, chunks: int) -> tuple[Slot, ...]:
        return one_f_one_b.slots(stage, stages, micros, chunks)[:-1]

    with pytest.raises(ValueError, match="B of micro-batch 2, chunk 0 stands 0 times"):
        Engine(plan_of(), Mesh(), schedule=forgetful)


def test_linears_are_replaced_once() -> None:
    engine = Engine(plan_of(), Mesh())
    with pytest.raises(ValueError, match="replaced already"):
        apply_direct([engine.model.layers[0]], WeightProducts(engine.stores))
