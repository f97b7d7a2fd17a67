"""The context axis, declared: factors of it, who holds which tokens, what attention sends, one form of a kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from meshwright.config.choices import Context, Recompute
from meshwright.config.errors import RequestError
from meshwright.layout.groups import GroupName
from meshwright.layout.rows import Rows, whole_rows
from meshwright.plan.action import Action, Op, Phase
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.meeting import plan_groups
from meshwright.plan.operation import Operation
from meshwright.plan.plan import ContextSplit, Plan
from meshwright.plan.rules import canonical, check_plan
from meshwright.plan.strategies.calls import unit_calls
from meshwright.plan.strategies.context import held_columns, ring_columns
from tests.unit.plan.plans import make_plan

RING, GATHER, ULYSSES = ContextSplit(), ContextSplit(Context.ALLGATHER), ContextSplit(Context.ULYSSES)
KINDS = {"ring": RING, "inner": ContextSplit(Context.RING, 2), "gather": GATHER, "ulysses": ULYSSES}


def plan_of(split: ContextSplit, cp: int = 4, **fields: Any) -> Plan:
    return replace(make_plan(cp=cp, **fields), context=split)


def documents(*lengths: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)[None]


def rows_of(*lengths: int) -> Rows:
    """One sequence of 32 tokens, of documents that are masked, or of none."""
    return whole_rows(0, np.zeros(1, dtype=np.int64), 32, documents(*lengths) if lengths else None)


def held(plan: Plan, rows: Rows) -> list[list[int]]:
    coordinates = [plan.degrees.coordinates(rank) for rank in range(plan.degrees.ranks)]
    return [rows.columns(held_columns(plan, at, rows)).offsets[0].tolist() for at in coordinates]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(), (32,), (5, 11, 16), (1,) * 32])
def test_every_token_is_held_once_and_groups_have_those_of_their_ring_coordinate(
    kind: str, lengths: tuple[int, ...]
) -> None:
    plan, rows = plan_of(KINDS[kind]), rows_of(*lengths)
    tokens = held(plan, rows)
    joined = list(chain(*tokens))
    assert sorted(joined) == list(range(32))
    assert {len(each) for each in tokens} == {8}
    by_coordinate = [rows.columns(each).offsets[0].tolist() for each in ring_columns(plan, rows)]
    assert joined == list(chain(*by_coordinate)), "the runs of a group, joined, are its coordinate, ascending"
    assert all(each == sorted(each) for each in by_coordinate)


def test_heads_and_tails_of_a_ring_of_groups() -> None:
    assert held(plan_of(RING), rows_of())[1] == [4, 5, 6, 7, 24, 25, 26, 27]
    assert held(plan_of(KINDS["inner"]), rows_of())[1] == list(range(24, 32))
    assert held(plan_of(ULYSSES), rows_of())[1] == list(range(8, 16))


def test_a_gather_of_a_length_without_halves_takes_runs() -> None:
    plan = plan_of(GATHER)
    rows = whole_rows(0, np.zeros(1, dtype=np.int64), 12, documents(5, 7))
    assert held(plan, rows) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_documents_are_even_work_on_every_rank(kind: str) -> None:
    """B43 (pytorch/pytorch#189902): documents of 4 and 12 tokens on two ranks are 44 query-key pairs each."""
    plan = plan_of(KINDS[kind], cp=2)
    rows = whole_rows(0, np.zeros(1, dtype=np.int64), 16, documents(4, 12))
    work = [rows.columns(held_columns(plan, plan.degrees.coordinates(rank), rows)).positions + 1 for rank in (0, 1)]
    assert [int(each.sum()) for each in work] == [44, 44]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [2, 4])
def test_positions_are_those_of_the_token_in_its_document(kind: str, cp: int) -> None:
    """B41 (NVIDIA/TransformerEngine#2077): documents of 5 and 27 tokens, whatever the rank."""
    plan = plan_of(KINDS[kind], cp=cp)
    rows = rows_of(5, 27)
    own = np.concatenate((np.arange(5), np.arange(27)))
    for rank in range(cp):
        mine = rows.columns(held_columns(plan, plan.degrees.coordinates(rank), rows))
        assert mine.positions[0].tolist() == own[mine.offsets[0]].tolist()


def calls(plan: Plan, op: Op, unit: int = 1, split: bool = False) -> list[tuple[str, str, int]]:
    action = Action(op, Phase.FORWARD, unit, 0, split=split)
    return [(call.group.value, call.operation.value, call.payload_bytes) for call in unit_calls(plan, action)]


def test_a_ring_sends_every_block_but_one_and_its_gradients_too() -> None:
    block = 8 * 2 * 2 * 16 * 4  # tokens, key and value, heads, elements, bytes
    hop = ("ring", "send", block)
    assert calls(plan_of(RING), Op.FORWARD) == calls(plan_of(RING), Op.RECOMPUTE) == [hop] * 3
    assert calls(plan_of(RING), Op.BACKWARD) == calls(plan_of(RING), Op.BACKWARD, split=True) == [hop] * 6
    assert (
        calls(plan_of(RING), Op.WEIGHT)
        == calls(plan_of(RING), Op.FORWARD, 0)
        == calls(plan_of(RING), Op.FORWARD, 3)
        == []
    )
    assert calls(plan_of(RING, cp=1), Op.FORWARD) == []


def test_a_gather_brings_all_and_a_scatter_takes_their_gradients_back() -> None:
    whole = 32 * 2 * 2 * 16 * 4
    assert calls(plan_of(GATHER), Op.FORWARD) == [("cp", "all_gather", whole)]
    assert calls(plan_of(GATHER), Op.BACKWARD) == [("cp", "reduce_scatter", whole)]


def test_an_exchange_brings_a_key_head_to_every_rank_whose_queries_it_serves() -> None:
    """Four query heads on two key/value heads: four ranks need four copies, two ranks the two that there are."""
    four = [("ulysses", "all_to_all", 8 * (4 + 4 + 4) * 16 * 4), ("ulysses", "all_to_all", 8 * 4 * 16 * 4)]
    two = [("ulysses", "all_to_all", 16 * (4 + 2 + 2) * 16 * 4), ("ulysses", "all_to_all", 16 * 4 * 16 * 4)]
    assert calls(plan_of(ULYSSES), Op.FORWARD) == four
    assert calls(plan_of(ULYSSES), Op.BACKWARD) == four[::-1]
    assert calls(plan_of(ULYSSES, cp=2), Op.FORWARD) == two


def test_a_ring_of_groups_sends_the_heads_that_an_exchange_left() -> None:
    plan = plan_of(KINDS["inner"])
    exchange = [("ulysses", "all_to_all", 8 * (4 + 2 + 2) * 16 * 4), ("ulysses", "all_to_all", 8 * 4 * 16 * 4)]
    hop = ("ring", "send", 16 * 2 * 1 * 16 * 4)  # the tokens of two ranks, one head of two
    assert calls(plan, Op.FORWARD) == [*exchange, hop]
    assert calls(plan, Op.BACKWARD) == [*exchange[::-1], hop, hop]


def test_tensor_ranks_send_their_own_heads() -> None:
    block = 16 * 2 * 1 * 16 * 4
    assert [call for call in calls(plan_of(RING, cp=2, tp=4), Op.FORWARD) if call[0] == "ring"] == [
        ("ring", "send", block)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_ledger_name_the_axis(kind: str) -> None:
    """What is made again is sent again, and counts as backward."""
    plans = [plan_of(KINDS[kind], accumulation=3, recompute=each) for each in (Recompute.NONE, Recompute.FULL)]
    plain, again = ([row for row in ledger(plan, 1) if row.group is GroupName.CP] for plan in plans)
    forward = {row.operation: row for row in plain if row.phase is Phase.FORWARD}
    backward = {row.operation: row.payload_bytes for row in plain if row.phase is Phase.BACKWARD}
    for row in forward.values():
        ways = 2 if kind == "inner" else 4
        sent = row.payload_bytes * (ways - 1) // ways
        assert row.sent_bytes == (row.payload_bytes if row.operation is Operation.SEND else sent)
    wanted = {operation: backward.get(operation, 0) for operation in {*backward, *forward}}
    for operation, row in forward.items():
        wanted[operation] += row.payload_bytes
    assert {row.operation: row.payload_bytes for row in again if row.phase is Phase.BACKWARD} == wanted
    assert {row.operation: row for row in again if row.phase is Phase.FORWARD} == forward


def test_groups_are_two_digits_of_the_axis() -> None:
    plan = plan_of(KINDS["inner"])
    table, at = plan_groups(plan), plan.degrees.coordinates(1)
    assert table[GroupName.RING].members(plan.degrees, at) == (1, 3)
    assert table[GroupName.ULYSSES].members(plan.degrees, at) == (0, 1)
    assert [plan_groups(plan_of(kind))[GroupName.ULYSSES].size for kind in (RING, GATHER, ULYSSES)] == [1, 1, 4]
    assert {name.reported for name in (GroupName.RING, GroupName.ULYSSES)} == {GroupName.CP}


def test_one_group_of_all_is_an_exchange_and_nothing_decides_without_the_axis() -> None:
    assert canonical(plan_of(ContextSplit(Context.RING, 4))).context == ULYSSES
    assert canonical(plan_of(KINDS["inner"])).context == KINDS["inner"]
    assert canonical(plan_of(KINDS["inner"], cp=1)).context == RING
    with pytest.raises(RequestError, match="decide nothing"):
        check_plan(plan_of(ContextSplit(Context.RING, 4)))
