"""Exchange: pieces travel between ranks bit for bit, whatever the layouts, in rounds of any size."""

from dataclasses import dataclass

import pytest
import torch

from meshwright.comm.exchange import exchange
from meshwright.comm.views import Held
from meshwright.layout.moves import Layout, Piece, moves
from meshwright.layout.rectangles import Rectangle, flat_rectangles, full
from meshwright.testing.exact import check_equal, numbered
from meshwright.testing.ranks import run_cases

SHAPES = {"w": (6, 10), "v": (7,), "count": ()}
WHOLE = {name: numbered(*shape, start=100 * i) for i, (name, shape) in enumerate(SHAPES.items())}
WORLD = 3


def rows() -> Layout[int]:
    """Dimension 0 of w on three ranks; the rest on all."""
    rest = [Piece("v", full((7,))), Piece("count", full(()))]
    return {rank: [Piece("w", Rectangle((2 * rank, 0), (2, 10))), *rest] for rank in range(WORLD)}


def columns() -> Layout[int]:
    """Columns of w: pieces that are not contiguous where they lie; v on rank 1 alone."""
    cuts = [Piece("w", Rectangle((0, low), (6, size))) for low, size in ((0, 4), (4, 4), (8, 2))]
    return {0: [cuts[0]], 1: [cuts[1], Piece("v", full((7,))), Piece("count", full(()))], 2: [cuts[2]]}


def flat() -> Layout[int]:
    """Flat shards that end in the middle of a row."""
    bounds = ((0, 23), (23, 46), (46, 60))
    layout = {r: [Piece("w", tile) for tile, _ in flat_rectangles((6, 10), *span)] for r, span in enumerate(bounds)}
    layout[2] += [Piece("v", Rectangle((0,), (3,))), Piece("count", full(()))]
    layout[0].append(Piece("v", Rectangle((3,), (4,))))
    return layout


def gathered() -> Layout[int]:
    """All of it on rank 2."""
    return {2: [Piece(name, full(shape)) for name, shape in SHAPES.items()]}


LAYOUTS = {"rows": rows(), "columns": columns(), "flat": flat()}


@dataclass(frozen=True)
class Case:
    name: str
    source: Layout[int]
    target: Layout[int]
    round_elements: int


CASES = [
    Case(f"{one} to {other}, {limit} elements a round", source, target, limit)
    for one, source in LAYOUTS.items()
    for other, target in {**LAYOUTS, "gathered": gathered()}.items()
    for limit in (1 << 20, 7, 1)
]


def _held(layout: Layout[int], rank: int, filled: bool) -> Held:
    """Views into whole tensors, so that a column cut is really strided."""
    held = {}
    for piece in layout.get(rank, ()):
        home = WHOLE[piece.tensor].clone() if filled else torch.full(SHAPES[piece.tensor], torch.nan)
        spans = zip(piece.rectangle.start, piece.rectangle.stop, strict=True)
        held[piece] = home[tuple(slice(*span) for span in spans)]
    return held


def _moves(rank: int, case: Case) -> int:
    source, target = _held(case.source, rank, filled=True), _held(case.target, rank, filled=False)
    exchange(moves(case.source, case.target), rank, source, target, round_elements=case.round_elements)
    for piece, expected in _held(case.target, rank, filled=True).items():
        check_equal(target[piece], expected, f"{piece.tensor} {piece.rectangle}")
    return len(target)


@pytest.mark.timeout(60)
def test_every_layout_reaches_every_other() -> None:
    results = run_cases(_moves, WORLD, CASES)
    for number, case in enumerate(CASES):
        assert [results[rank][number] for rank in range(WORLD)] == [len(case.target.get(r, ())) for r in range(WORLD)]
