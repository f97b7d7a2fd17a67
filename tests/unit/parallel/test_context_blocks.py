"""What a ring holds and sends while it goes round: in a pretended world, where what arrives is anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.comm.communicator import Communicator
from meshwright.comm.mesh import Mesh
from meshwright.comm.operations import Handle
from meshwright.comm.pretend import pretended_world
from meshwright.comm.registry import registered
from meshwright.layout.blocks import Meeting, Sees, blocks, flat
from meshwright.layout.groups import GroupName
from meshwright.layout.rows import head_tail_columns, whole_rows
from meshwright.model.masks import attention_mask
from meshwright.parallel import context_blocks
from meshwright.plan.action import Phase

RANKS, LENGTH = 4, 16


def meeting_of(rank: int) -> Meeting:
    rows, columns = whole_rows(0, np.arange(2), LENGTH), head_tail_columns(LENGTH, RANKS)
    return Meeting(rows.columns(columns[rank]), rows.columns(columns.reshape(-1)), RANKS, rank)


@pytest.fixture(params=range(RANKS), ids=lambda rank: f"rank {rank}")
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(rank, its mesh), of a ring that is registered by this name."""
    rank: int = request.param
    with pretended_world(rank, RANKS):
        mesh = Mesh(cp=RANKS).start()
        with registered({"ring": mesh.communicator(GroupName.RING)}):
            yield rank, mesh
        mesh.close()


def go_round(
    mesh: Mesh, mask: Tensor | None, numbers: tuple[int, ...], between: Callable[[], None] = lambda: None
) -> None:
    """There and back."""
    q, kv = torch.randn(2, 4, 4, 6, requires_grad=True), torch.randn(2, 2, 4, 2, 6, requires_grad=True)
    mesh.ledger.phase = Phase.FORWARD
    out, _ = context_blocks.ring_attention(q, kv, mask, numbers, "ring")
    mesh.ledger.phase = Phase.BACKWARD
    between()
    out.sum().backward()


def test_a_ring_holds_two_foreign_blocks_at_most(ring: tuple[int, Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is worked on, in backward beside the gradients of one that arrive."""
    rank, mesh = ring
    arrived: list[weakref.ref[torch.UntypedStorage]] = []
    most: dict[str, int] = {}
    send_on = context_blocks._send_on

    def followed(over: Communicator, outgoing: Tensor, arriving: Tensor) -> Handle:
        arrived.append(weakref.ref(arriving.untyped_storage()))
        return send_on(over, outgoing, arriving)

    def counted(name: str) -> Any:
        work = getattr(context_blocks, name)

        def instead(*given: Any) -> Any:
            most[name] = max(most.get(name, 0), sum(each() is not None for each in arrived))
            return work(*given)

        return instead

    monkeypatch.setattr(context_blocks, "_send_on", followed)
    for name in ("attend_block", "block_gradients"):
        monkeypatch.setattr(context_blocks, name, counted(name))
    go_round(mesh, None, flat(blocks(meeting_of(rank))))
    assert most == {"attend_block": 2, "block_gradients": 3}
    assert len(arrived) == 3 * (RANKS - 1)


@pytest.mark.parametrize("window", [0, 2])
def test_hops_under_way_together_are_launched_in_one_order_by_all(
    ring: tuple[int, Mesh], monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Messages between two ranks are matched by it: keys and values, then gradients, whatever a rank sees."""
    rank, mesh = ring
    meeting, send_on = meeting_of(rank), context_blocks._send_on
    launched: list[str] = []
    came: list[Tensor] = []  # blocks of keys and values that arrived, which are what is sent on

    def followed(over: Communicator, outgoing: Tensor, arriving: Tensor) -> Handle:
        own = mesh.ledger.phase is Phase.FORWARD or "keys" not in launched
        launched.append("keys" if own or any(outgoing is each for each in came) else "gradients")
        if launched[-1] == "keys":
            came.append(arriving)
        return send_on(over, outgoing, arriving)

    monkeypatch.setattr(context_blocks, "_send_on", followed)
    offsets = [torch.from_numpy(each.offsets[:1]) for each in (meeting.queries, meeting.keys)]
    mask = attention_mask(*offsets, window=window) if window else None
    go_round(mesh, mask, flat(blocks(meeting, window)), between=launched.clear)
    assert launched == ["keys", "keys", "gradients", "keys", "gradients", "gradients"]


def test_what_nobody_sees_is_sent_and_not_worked_on(ring: tuple[int, Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of two tokens: most blocks are behind it, and every rank sends as many."""
    rank, mesh = ring
    meeting, worked = meeting_of(rank), [0]
    met, work = blocks(meeting, window=2), context_blocks.attend_block

    def counted(*given: Any) -> Any:
        worked[0] += 1
        return work(*given)

    monkeypatch.setattr(context_blocks, "attend_block", counted)
    offsets = [torch.from_numpy(each.offsets[:1]) for each in (meeting.queries, meeting.keys)]
    go_round(mesh, attention_mask(*offsets, window=2), flat(met))
    seen = sum(block.sees is not Sees.NOTHING for block in met)
    assert worked[0] == seen < RANKS
    sends = {row.phase: (row.calls, row.payload_bytes) for row in mesh.ledger.rows}
    block = 2 * 2 * 4 * 2 * 6 * 4
    assert sends == {Phase.FORWARD: (3, 3 * block), Phase.BACKWARD: (6, 6 * block)}
