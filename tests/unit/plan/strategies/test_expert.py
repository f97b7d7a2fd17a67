"""Expert parallelism, declared: what units send for their experts, with even loads and as it was observed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.arch.arch import Experts
from meshwright.config.choices import Recompute, Schedule
from meshwright.layout.groups import GroupName
from meshwright.plan.action import COMPUTE, Action, Kind, Op, Phase
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.operation import Operation
from meshwright.plan.plan import Moe, Plan
from meshwright.plan.program import program
from meshwright.plan.strategies.calls import unit_calls
from meshwright.plan.strategies.expert import Exchange, even_exchange, even_loads, rows_by_place
from tests.unit.plan.plans import make_plan

WIDTH = 64 * 4  # bytes of a row


def plan_of(experts: int = 8, active: int = 2, **fields: Any) -> Plan:
    arch = {"experts": Experts(count=experts, active=active, ffn=32), **fields.pop("arch", {})}
    return make_plan(arch=arch, **fields)


def moved(plan: Plan, rank: int = 0, **fields: Any) -> dict[Phase, Row]:
    return {row.phase: row for row in ledger(plan, rank, **fields) if row.group is GroupName.EP}


def test_even_loads_give_what_does_not_divide_to_the_first_experts() -> None:
    assert even_loads(11, 4) == [3, 3, 3, 2]
    assert rows_by_place([3, 3, 3, 2], 2) == (6, 5)
    plan = plan_of(experts=6, active=3, ep=3, micro=1)  # 32 tokens, 96 choices, 16 an expert
    assert even_exchange(plan, 1) == Exchange(1, (32, 32, 32), (32, 32, 32))
    odd = even_exchange(plan_of(experts=6, active=1, ep=2), 1)  # 32 choices: 6 6 5 5 5 5
    assert odd == Exchange(1, (17, 15), (15, 15))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_rows_go_there_and_back_behind_how_many_they_are(recompute: Recompute) -> None:
    found = moved(plan_of(ep=2, recompute=recompute, accumulation=3))
    passes, again = 2 * 3, recompute is Recompute.FULL  # blocks, micro-batches
    loads, rows = 8 * 8, 64 * WIDTH
    assert {row.operation for row in found.values()} == {Operation.ALL_TO_ALL}
    assert found[Phase.FORWARD].calls == 3 * passes
    assert found[Phase.FORWARD].payload_bytes == passes * (loads + 2 * rows)
    assert found[Phase.FORWARD].wire_bytes == found[Phase.FORWARD].sent_bytes == passes * (loads + 2 * rows) // 2
    assert found[Phase.BACKWARD].calls == (2 + 3 * again) * passes
    assert found[Phase.BACKWARD].payload_bytes == passes * (2 * rows + again * (loads + 2 * rows))


def test_a_split_backward_exchanges_once_and_dense_blocks_never() -> None:
    plan = plan_of(layers=4, pp=2, ep=2, schedule=Schedule.ZB_H1, accumulation=4)
    assert not [
        call for action in program(plan, 0).actions if action.op is Op.WEIGHT for call in unit_calls(plan, action)
    ]
    assert moved(plan)[Phase.BACKWARD].calls == 2 * 2 * 4
    experts = Experts(count=8, active=2, ffn=32, dense_layers=1)
    mixed = plan_of(layers=2, ep=2, arch={"experts": experts})
    assert moved(mixed)[Phase.FORWARD].calls == 3


def test_tensor_ranks_send_all_that_they_route() -> None:
    """Each has columns of every expert, so whole rows travel on each; sequence parallel gathers them first."""
    for sequence in (False, True):
        plan = plan_of(ep=2, tp=2)
        plan = replace(plan, execution=replace(plan.execution, sequence=sequence))
        assert moved(plan) == moved(plan_of(ep=2))


def test_a_step_that_was_taken_is_counted_by_its_own_rows() -> None:
    """Sent bytes are of the operation's formula, bytes on the wire are rows that left."""
    plan = plan_of(layers=1, ep=2)
    found = moved(plan, 1, routed={(1, 0): Exchange(1, (50, 14), (0, 14))})
    own, sent, came = 14 * WIDTH, 64 * WIDTH, 14 * WIDTH
    assert found[Phase.FORWARD].payload_bytes == 64 + sent + came
    assert found[Phase.FORWARD].sent_bytes == 32 + sent // 2 + came // 2
    assert found[Phase.FORWARD].wire_bytes == 32 + (sent - own) + (came - own)
    assert found[Phase.BACKWARD].wire_bytes == (sent - own) + (came - own)
    with pytest.raises(KeyError):
        ledger(plan, 1, routed={})
    assert ledger(plan_of(dp=2), 1, routed={}) == ledger(plan_of(dp=2), 1)


def test_terms_of_a_cut_sequence_need_the_choices_of_all_its_tokens() -> None:
    plan = replace(plan_of(layers=1, cp=2, ep=2, micro=3), moe=Moe(auxiliary_loss=0.01))
    forward = Action(Op.FORWARD, Phase.FORWARD, unit=1, micro=0)

    def sums(plan: Plan, action: Action, kind: Kind = Kind.TRAIN) -> list[int]:
        return [call.payload_bytes for call in unit_calls(plan, action, kind) if call.group is GroupName.CP
                and call.operation is Operation.ALL_REDUCE]  # fmt: skip

    assert forward.op in COMPUTE
    assert sums(plan, forward) == sums(plan, replace(forward, op=Op.RECOMPUTE)) == [3 * 8 * 8]
    assert not sums(plan, forward, Kind.EVALUATE)
    assert not sums(plan, replace(forward, op=Op.BACKWARD))
    assert not sums(replace(plan, moe=Moe(auxiliary_loss=0.0)), forward)
    assert not sums(plan_of(layers=1, ep=2, micro=3), forward)
