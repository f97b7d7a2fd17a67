"""Fingerprints: equal for every layout, different for every flipped bit, and fast enough to take at every save."""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.fingerprint import Fingerprints, Signing, fingerprint
from meshwright.layout import fingerprint as formula
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, flat_rectangles, full

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]


def window(x: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    return x[tuple(slice(low, high) for low, high in zip(rectangle.start, rectangle.stop, strict=True))]


def by_hand(x: torch.Tensor) -> int:
    """The formula in Python integers: 64 bits are two numbers of 32."""
    size = x.element_size()
    units = max(size // 4, 1)
    bits = x.contiguous().reshape(-1).view({1: torch.uint8, 2: torch.uint16}.get(size, torch.uint32)).numpy()
    shape = x.shape or (1,)
    total = 0
    for number, place in enumerate(np.ndindex(*shape[:-1], shape[-1] * units)):
        weight = 1
        for dim, index in enumerate(place):
            weight *= int(formula.multipliers(dim, index, 1)[0])
        total += int(bits[number]) * weight
    return total % (1 << 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)])
def test_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    assert fingerprint(x, full(shape)) == by_hand(x)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.lists(st.floats(0, 1), max_size=4))
def test_pieces_add_up_to_the_whole(shape: tuple[int, ...], cuts: list[float]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    size = x.numel()
    bounds = sorted({0, size, *(int(cut * size) for cut in cuts)})
    tiles = [tile for low, high in itertools.pairwise(bounds) for tile, _ in flat_rectangles(shape, low, high)]
    prints = Fingerprints()
    for tile in tiles:
        prints.take(Piece("w", tile), window(x, tile))
    assert prints.sums == {"w": fingerprint(x, full(shape))}
    assert formula.add(formula.fingerprint(window(x, tile).numpy(), tile) for tile in tiles) == by_hand(x)


def test_chunks_change_nothing() -> None:
    """Rows longer than a chunk, many rows in a chunk, a column cut that is not contiguous."""
    for shape in ((3, 70_000), (40_000, 3), (2, 2, 66_000), (2, 300, 301), (150_000,)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        whole = fingerprint(x, full(shape))
        assert whole == formula.fingerprint(x.numpy(), full(shape))
        half = shape[-1] // 2
        left = Rectangle((0,) * len(shape), (*shape[:-1], half))
        right = Rectangle((*(0,) * (len(shape) - 1), half), (*shape[:-1], shape[-1] - half))
        assert formula.add(fingerprint(window(x, part), part) for part in (left, right)) == whole


def test_every_flipped_bit_is_seen() -> None:
    """600 single bits in tensors of each width, the sign of zero and the payload of a NaN included."""
    chance = random.Random(4)
    for dtype, bits in ((torch.float64, 64), (torch.float32, 32), (torch.bfloat16, 16)):
        x = torch.randn(33, 17, generator=torch.Generator().manual_seed(5)).to(dtype)
        x[0, 0], x[1, 1] = 0.0, torch.nan
        before = fingerprint(x, full((33, 17)))
        integers = x.view({64: torch.int64, 32: torch.int32, 16: torch.int16}[bits])
        for _ in range(200):
            place, bit = (chance.randrange(33), chance.randrange(17)), chance.randrange(bits)
            flip = torch.tensor(-(1 << bit) if bit == bits - 1 else 1 << bit, dtype=integers.dtype)
            integers[place] ^= flip
            assert fingerprint(x, full((33, 17))) != before
            integers[place] ^= flip
        assert fingerprint(x, full((33, 17))) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_flipped_signs_do_not_cancel(dtype: torch.dtype) -> None:
    """Every odd number times 2^63 is 2^63: as 64-bit patterns, any two signs would."""
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(7)).to(dtype)
    before = fingerprint(x, full((12, 12)))
    for one, other in itertools.combinations(range(0, 144, 5), 2):
        flipped = x.clone().view(-1)
        flipped[[one, other]] *= -1
        assert fingerprint(flipped.view(12, 12), full((12, 12))) != before


def test_taken_as_it_lands_it_is_what_it_is_in_the_end() -> None:
    """Parts in any order, of any shape: a piece of three dimensions, its elements in boxes."""
    piece = Rectangle((2, 5, 3), (4, 6, 7))
    x = torch.randn(piece.extent, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    signing = Signing(piece, x)
    bounds = [0, 5, 41, 42, 100, 168]
    parts = [part for low, high in itertools.pairwise(bounds) for part, _ in flat_rectangles(piece.extent, low, high)]
    for part in reversed(parts):
        signing.took(part)
    assert signing.value() == fingerprint(x, piece)


def test_swapped_rows_columns_and_dimensions_are_seen() -> None:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(6))
    others = [x[[1, 0, *range(2, 16)]], x[:, [1, 0, *range(2, 16)]], x.T.contiguous(), x.roll(1, 0), x.flip(0)]
    prints = {fingerprint(each, full((16, 16))) for each in (x, *others)}
    assert len(prints) == len(others) + 1


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) is not the rectangle of \(2, 3\)"):
        fingerprint(torch.zeros(3, 2), full((2, 3)))


def test_speed() -> None:
    """A save must not wait for it: 4 GB/s a thread measured; a small part of that is asked, for busy machines."""
    x = torch.randn(2048, 4096)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        fingerprint(x, full((2048, 4096)))
        best = min(best, time.perf_counter() - begin)
    assert x.numel() * 4 / best > 0.14e9
