"""Carries out moves between ranks.

    moves      a long list, equal on every rank
    messages   rectangles of at most a limit of elements, in the order of the list
    rounds     runs of messages in which no rank has more than the limit under way in either direction

A rank posts all receives of a round, then all sends, then waits: it depends on earlier rounds only, so the exchange
cannot lock up, and messages between two ranks arrive in the order of the list, so none needs a tag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.views import Held, Views
from meshwright.layout.moves import Move, Piece
from meshwright.layout.rectangles import flat_rectangles

__all__ = ["ROUND_ELEMENTS", "exchange"]

ROUND_ELEMENTS = 8 << 20
"""64 MiB of float64."""


@torch.no_grad()
def exchange(
    moves: Iterable[Move],
    rank: int,
    source: Held,
    target: Held,
    *,
    group: dist.ProcessGroup | None = None,
    round_elements: int = ROUND_ELEMENTS,
) -> None:
    """Fill `target`, this rank's pieces of the new layout, from every rank's `source`, along `moves`.

    Ends are ranks of the default process group. Collective over `group` (None: all of them): each member passes the
    same list. Dtypes of both ends must agree. Extra memory: at most `round_elements` for sends, as many for receives.
    Raises LookupError for a move whose end is this rank and whose rectangle lies in none of its pieces.
    """
    here, there = Views(source), Views(target)
    for messages in _rounds(moves, round_elements):
        _carry_out([move for move in messages if rank in (move.source, move.target)], rank, here, there, group)


def _carry_out(
    messages: Sequence[Move], rank: int, source: Views, target: Views, group: dist.ProcessGroup | None
) -> None:
    receives: list[dist.P2POp] = []
    sends: list[dist.P2POp] = []
    landings: list[tuple[Tensor, Tensor]] = []
    for move in messages:
        if move.source == move.target:
            target.view(_piece(move)).copy_(source.view(_piece(move)))
        elif move.target == rank:
            place = target.view(_piece(move))
            buffer = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            landings.append((place, buffer))
            receives.append(dist.P2POp(dist.irecv, buffer, _rank(move.source), group))
        else:
            view = source.view(_piece(move)).contiguous()
            sends.append(dist.P2POp(dist.isend, view, _rank(move.target), group))
    if receives or sends:
        for work in dist.batch_isend_irecv([*receives, *sends]):
            work.wait()
    for place, buffer in landings:
        if buffer is not place:
            place.copy_(buffer)


def _rounds(moves: Iterable[Move], limit: int) -> Iterator[list[Move]]:
    """Cut the list where a rank would have more than `limit` elements under way: the same cuts on every rank."""
    out: list[Move] = []
    under_way: dict[tuple[object, bool], int] = defaultdict(int)
    for move in moves:
        for message in _messages(move, limit):
            size = message.rectangle.numel
            ends = ((move.source, True), (move.target, False))
            if out and any(under_way[end] + size > limit for end in ends):
                yield out
                out, under_way = [], defaultdict(int)
            out.append(message)
            for end in ends:
                under_way[end] += size
    if out:
        yield out


def _messages(move: Move, limit: int) -> Iterator[Move]:
    """A move as messages of at most `limit` elements."""
    size = move.rectangle.numel
    if size <= limit:
        yield move
        return
    for first in range(0, size, limit):
        for inner, _ in flat_rectangles(move.rectangle.extent, first, min(first + limit, size)):
            yield replace(move, rectangle=inner.offset_by(move.rectangle.start))


def _piece(move: Move) -> Piece:
    return Piece(move.tensor, move.rectangle)


def _rank(end: object) -> int:
    if not isinstance(end, int):
        raise TypeError(f"{end!r} is no rank: only ranks exchange messages")
    return end
