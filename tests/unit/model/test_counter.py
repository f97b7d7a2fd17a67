"""Counter-based weights: the same number for the same element, however the tensor is cut."""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.arch.tensors import Init
from meshwright.model import counter
from meshwright.model.counter import fill, key, mix, mix_, signed

NORMAL = Init(std=0.02)
GOLDEN = ["-0x1.eff9020000000p-8", "-0x1.de339e0000000p-7", "0x1.6f1e060000000p-7", "0x1.0382de0000000p-7"]
GOLDEN_KEY = 2402405478288118713


def whole(
    name: str, shape: tuple[int, ...], seed: int = 0, init: Init = NORMAL, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full(shape, torch.nan, dtype=dtype)
    fill(out, name, seed, shape, (0,) * len(shape), shape, init)
    return out


def reference(name: str, seed: int, index: int, std: float) -> np.float32:
    """One element, written down from the definition with Python's unbounded integers."""
    bits = (1 << 64) - 1

    def finalise(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    digest = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    start = finalise((finalise(digest) + seed * golden) & bits)
    total = 0
    for number in (2 * index, 2 * index + 1):
        value = finalise((start + (number + 1) * golden) & bits)
        total += sum((value >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    variance = 8 * (65536**2 - 1) / 12
    return np.float32(total - 8 * 65535 // 2) * np.float32(std / math.sqrt(variance))


def test_the_finaliser_gives_the_published_sequence() -> None:
    """The first outputs of splitmix64 from state 1234567, as its published test vectors have them."""
    states = [1234567 + number * 0x9E3779B97F4A7C15 for number in range(1, 6)]
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [mix(state) for state in states] == published
    assert mix_(torch.tensor([signed(state) for state in states])).tolist() == [signed(value) for value in published]


def test_golden_values_of_a_weight() -> None:
    """Weights of old runs must come out again: these numbers never change."""
    values = whole("layers.3.attention.query.weight", (4, 6), seed=7)
    assert [float(value).hex() for value in values.flatten()[:4]] == GOLDEN
    assert key("layers.3.attention.query.weight", 7) == GOLDEN_KEY


@pytest.mark.parametrize("seed", [0, 1, -3, 2**63, 2**64 - 1])
def test_every_element_equals_the_definition(seed: int) -> None:
    values = whole("a.weight", (3, 5, 7), seed)
    expected = [reference("a.weight", seed, index, 0.02) for index in range(105)]
    assert np.array_equal(values.flatten().numpy(), np.array(expected))


def test_indices_beyond_32_bits_equal_the_definition() -> None:
    shape, start, extent = (200_000, 200_000), (199_999, 199_990), (1, 10)
    out = torch.empty(10)
    fill(out, "huge", 3, shape, start, extent, NORMAL)
    first = 199_999 * 200_000 + 199_990
    assert np.array_equal(out.numpy(), np.array([reference("huge", 3, first + j, 0.02) for j in range(10)]))


@pytest.mark.parametrize("chunk", [1, 5, 64, 1 << 15])
@pytest.mark.parametrize(
    ("start", "extent"),
    [
        ((0, 0, 0), (6, 10, 14)),
        ((2, 0, 0), (3, 10, 14)),
        ((0, 3, 0), (6, 4, 14)),
        ((0, 0, 5), (6, 10, 1)),
        ((5, 9, 13), (1, 1, 1)),
        ((1, 2, 3), (0, 2, 2)),
        ((1, 2, 3), (4, 5, 6)),
    ],
)
def test_a_rectangle_is_that_part_of_the_whole(
    start: tuple[int, ...], extent: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole("b", (6, 10, 14))[tuple(slice(low, low + size) for low, size in zip(start, extent, strict=True))]
    monkeypatch.setitem(counter._CHUNK_ELEMENTS, "cpu", chunk)
    piece = torch.full((math.prod(extent),), torch.nan)  # a flat segment of a bucket
    fill(piece, "b", 0, (6, 10, 14), start, extent, NORMAL)
    assert torch.equal(piece.view(extent), expected)
    strided = torch.full((14, 10, 6), torch.nan).permute(2, 1, 0)
    target = strided[tuple(slice(0, size) for size in extent)]
    fill(target, "b", 0, (6, 10, 14), start, extent, NORMAL)
    assert torch.equal(target, expected)


def test_flat_and_scalar_tensors() -> None:
    assert torch.equal(whole("c", (70_000,))[40_000:], whole("c", (7, 10_000)).flatten()[40_000:])
    assert whole("c", ()).item() == whole("c", (1,)).item()


def test_other_dtypes_are_the_float32_numbers_cast_once() -> None:
    single = whole("d", (50, 40))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(whole("d", (50, 40), dtype=dtype), single.to(dtype))


def test_names_seeds_and_shards_do_not_repeat_each_other() -> None:
    seen = [whole("e", (64, 64)), whole("f", (64, 64)), whole("e", (64, 64), seed=1)]
    rows = torch.cat(seen)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    correlation = torch.corrcoef(torch.stack([tensor.flatten() for tensor in seen])) - torch.eye(3)
    assert correlation.abs().max() < 5 / 64  # 5 deviations of 4096 independent pairs


def test_constants_fill_and_shift() -> None:
    assert torch.equal(whole("g", (3,), init=Init(constant=1.0)), torch.ones(3))
    assert torch.equal(whole("g", (3,), init=Init(0.5, 2.0)), whole("g", (3,), init=Init(0.5)) + 2)


def test_moments_are_those_of_the_normal_distribution() -> None:
    """A million numbers: mean, deviation, tails and skew within 5 deviations of their estimators; bounded."""
    values = whole("h", (1000, 1000), init=Init(std=1.0)).double()
    num = values.numel()
    assert values.mean().abs() < 5 / math.sqrt(num)
    assert (values.var() - 1).abs() < 5 * math.sqrt(2 / num)
    assert (values**3).mean().abs() < 5 * math.sqrt(15 / num)
    assert ((values**4).mean() - 2.85).abs() < 5 * math.sqrt(96 / num)  # a sum of 8 uniforms: 3 - 6/5/8
    assert 4 < values.abs().max() <= math.sqrt(24)


def test_all_bits_of_the_hash_are_fair_and_independent() -> None:
    """Counts of the values of each 4-bit field over 65536 consecutive counters: chi-square, 15 degrees of freedom."""
    states = torch.arange(1 << 16).mul_(counter.advance(1)).add_(signed(key("bits", 0)))
    numbers = mix_(states).numpy().view(np.uint64)
    for shift in range(0, 64, 4):
        counts = np.bincount(((numbers >> np.uint64(shift)) & np.uint64(15)).astype(int), minlength=16)
        expected = len(numbers) / 16
        assert ((counts - expected) ** 2 / expected).sum() < 44  # p = 1e-4 for one field
    bits = ((numbers[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).astype(np.float64) * 2 - 1
    agreement = (bits.T @ bits / len(bits)) - np.eye(64)
    assert np.abs(agreement).max() < 5.5 / math.sqrt(len(bits))
    following = bits[1:].T @ bits[:-1] / (len(bits) - 1)
    assert np.abs(following).max() < 5.5 / math.sqrt(len(bits))


@pytest.mark.parametrize(("start", "extent"), [((0, 3), (2, 2)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (3, 4))])
def test_a_rectangle_outside_the_tensor_is_refused(start: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not lie inside w"):
        fill(torch.empty(math.prod(extent)), "w", 0, (2, 4), start, extent, NORMAL)


class LargestResult(TorchDispatchMode):
    """The elements of the largest tensor that any operation made, views of `out` left out."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.storage = out.untyped_storage().data_ptr()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self.storage:
            self.elements = max(self.elements, result.numel())
        return result


def test_extra_memory_does_not_grow_with_the_tensor() -> None:
    chunk = counter._CHUNK_ELEMENTS["cpu"]
    for shape in ((20 * chunk,), (5, 4 * chunk), (40 * chunk, 7), (3, 5, chunk)):
        out = torch.empty(shape)
        with LargestResult(out) as largest:
            fill(out, "i", 0, shape, (0,) * len(shape), shape, NORMAL)
        assert 0 < largest.elements <= 2 * chunk
