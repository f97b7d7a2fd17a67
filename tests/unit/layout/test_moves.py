"""Moves: any layout reaches any other, each element once and bit for bit; ends may be anything."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.moves import Move, Piece, UncoveredError, moves, owned
from meshwright.layout.rectangles import Rectangle, flat_rectangles, full

Arrays = dict[str, np.ndarray]
Held = dict[Any, list[tuple[Piece, np.ndarray]]]


def window(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(rectangle.start, rectangle.stop, strict=True))


def scatter(whole: Arrays, layout: dict[Any, list[Piece]]) -> Held:
    return {
        end: [(piece, whole[piece.tensor][window(piece.rectangle)].copy()) for piece in pieces]
        for end, pieces in layout.items()
    }


def carry_out(listed: tuple[Move, ...], source: Held, target: dict[Any, list[Piece]]) -> tuple[Held, Counter]:
    """Runs the list on numpy arrays; also counts how often each element was written."""
    out = {
        end: [(piece, np.full(piece.rectangle.extent, np.nan)) for piece in pieces] for end, pieces in target.items()
    }
    written: Counter = Counter()
    for move in listed:
        piece, values = next(held for held in source[move.source] if covers(held[0], move.tensor, move.rectangle))
        part = values[window(move.rectangle.within(piece.rectangle))]
        piece, values = next(held for held in out[move.target] if covers(held[0], move.tensor, move.rectangle))
        values[window(move.rectangle.within(piece.rectangle))] = part
        for element in np.ndindex(move.rectangle.extent):
            place = tuple(map(sum, zip(element, move.rectangle.start, strict=True)))
            written[move.target, move.tensor, place] += 1
    return out, written


def covers(piece: Piece, tensor: str, rectangle: Rectangle) -> bool:
    return piece.tensor == tensor and piece.rectangle.intersect(rectangle) == rectangle


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Rectangle]:
    """Disjoint rectangles that cover a box: cut in two again and again, or a run of flat ranges."""
    if draw(st.booleans()) and shape and 0 not in shape:
        size = int(np.prod(shape))
        bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=5))})
        return [part for low, high in pairwise(bounds) for part, _ in flat_rectangles(shape, low, high)]
    tiles = [full(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        tile = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, tile.extent[dim]))
        for start, size in ((tile.start[dim], at), (tile.start[dim] + at, tile.extent[dim] - at)):
            corner = (*tile.start[:dim], start, *tile.start[dim + 1 :])
            tiles.append(Rectangle(corner, (*tile.extent[:dim], size, *tile.extent[dim + 1 :])))
    return tiles


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], ends: list[Any]) -> dict[Any, list[Piece]]:
    """Every element somewhere, some on several ends; no end holds one twice."""
    layout: dict[Any, list[Piece]] = {end: [] for end in ends}
    for name, shape in shapes.items():
        for tile in draw(tilings(shape)):
            holders = draw(st.lists(st.sampled_from(ends), min_size=1, max_size=len(ends), unique=True))
            for end in holders:
                layout[end].append(Piece(name, tile))
    return layout


SHAPES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    min_size=1,
)
RANKS, FILES = [0, 1, 2, 3], ["first.safetensors", "second.safetensors"]


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_any_layout_reaches_any_other_bit_for_bit(data: st.DataObject, shapes: dict[str, tuple[int, ...]]) -> None:
    random = np.random.default_rng(0)
    whole = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    source, target = data.draw(layouts(shapes, RANKS)), data.draw(layouts(shapes, FILES))
    reached, written = carry_out(moves(source, target), scatter(whole, source), target)
    for end, pieces in scatter(whole, target).items():
        assert all(same_bits(got, want) for (_, got), (_, want) in zip(reached[end], pieces, strict=True))
    assert set(written.values()) <= {1}


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_what_an_end_holds_already_is_not_fetched(data: st.DataObject, shapes: dict[str, tuple[int, ...]]) -> None:
    layout = data.draw(layouts(shapes, RANKS))
    other = data.draw(layouts(shapes, RANKS))
    assert all(move.source == move.target for move in moves(layout, layout))
    held = {(end, piece) for end, pieces in layout.items() for piece in pieces}
    for move in moves(layout, other):
        here = any(
            end == move.target and piece.tensor == move.tensor and piece.rectangle.intersect(move.rectangle)
            for end, piece in held
        )
        assert move.source == move.target or not here


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_owned_pieces_are_every_element_once_on_its_first_holder(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]]
) -> None:
    layout = data.draw(layouts(shapes, RANKS))
    count = {name: np.zeros(shape, dtype=int) for name, shape in shapes.items()}
    first = {name: np.full(shape, 99) for name, shape in shapes.items()}
    for end in reversed(RANKS):
        for piece in layout[end]:
            first[piece.tensor][window(piece.rectangle)] = end
    for end, pieces in owned(layout).items():
        for piece in pieces:
            count[piece.tensor][window(piece.rectangle)] += 1
            assert (first[piece.tensor][window(piece.rectangle)] == end).all()
    assert all((counted == 1).all() for counted in count.values())


def test_an_element_nobody_holds_is_named() -> None:
    source = {0: [Piece("w", Rectangle((0, 0), (2, 4)))], 1: [Piece("w", Rectangle((2, 0), (1, 3)))]}
    with pytest.raises(UncoveredError, match=r"element \(2, 3\) of w, wanted by disk, is held by no source"):
        moves(source, {"disk": [Piece("w", full((3, 4)))]})
    with pytest.raises(UncoveredError, match=r"element \(\) of count"):
        moves(source, {"disk": [Piece("count", full(()))]})


def test_a_target_that_wants_an_element_twice_is_refused() -> None:
    wanted = [Piece("w", full((4,))), Piece("w", Rectangle((3,), (1,)))]
    with pytest.raises(ValueError, match="of w on 1 overlap"):
        moves({0: [Piece("w", full((4,)))]}, {1: wanted})


def test_copies_share_the_sending() -> None:
    replicas = {rank: [Piece(f"w{i}", full((8,))) for i in range(8)] for rank in range(4)}
    sent = Counter(move.source for move in moves(replicas, {"host": replicas[0]}))
    assert sent == {0: 2, 1: 2, 2: 2, 3: 2}


def test_the_list_is_equal_wherever_it_is_computed() -> None:
    source = {rank: [Piece("w", Rectangle((4 * (rank // 2),), (4,)))] for rank in range(4)}
    target = {rank: [Piece("w", full((8,)))] for rank in (5, 4)}
    listed = moves(source, target)
    assert listed == moves(dict(source), dict(target))
    assert [(move.source, move.target, move.rectangle.start[0]) for move in listed] == [
        (0, 5, 0),
        (2, 5, 4),
        (1, 4, 0),
        (3, 4, 4),
    ]


def test_many_shards_take_time_in_proportion() -> None:
    """A tensor of 2^20 rows from 3,000 flat shards to 2,000: what overlaps is found, not searched for."""
    shape, ends = (1 << 20, 8), {}
    for ways in (3000, 2000):
        block = -(-shape[0] * shape[1] // ways)
        bounds = [(block * i, min(block * (i + 1), shape[0] * shape[1])) for i in range(ways)]
        ends[ways] = {i: [Piece("w", r) for r, _ in flat_rectangles(shape, *span)] for i, span in enumerate(bounds)}
    listed = moves(ends[3000], ends[2000])
    assert sum(move.rectangle.numel for move in listed) == shape[0] * shape[1]
    assert len(listed) < 30_000
