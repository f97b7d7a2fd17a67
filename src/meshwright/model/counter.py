"""Counter-based numbers: a weight is a function of its name and index, never of who holds it.

A rank that owns a rectangle of a logical tensor computes exactly its elements. Everything up to the last step is
64-bit integer arithmetic that wraps around, which every device does alike; the last step is one float32 product.

    key       splitmix64's finaliser over (8 bytes of BLAKE2b of the name, seed)
    element i numbers 2i and 2i + 1 of a splitmix64 generator that starts at the key (Steele, Lea and Flood,
              "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 19)
    value     sum of the eight 16-bit fields of both numbers, minus its mean, an integer in [-262140, 262140]; it is
              normal-like (excess kurtosis -0.15), its variance is known exactly; times std / deviation in float32
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from meshwright.arch.tensors import Init

_BITS = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: successive states of a splitmix64 generator differ by it
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

_FIELD_PAIRS = 0x0000_FFFF_0000_FFFF
_MEAN = 8 * 0xFFFF // 2
_DEVIATION = math.sqrt(8 * ((1 << 32) - 1) / 12)  # a field is uniform on 65536 integers

_CHUNK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 20}  # cpu: both numbers and their scratch stay in the second cache


def signed(value: int) -> int:
    """The int64 with the bits of `value` mod 2^64: torch has no wrapping uint64 arithmetic."""
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value


def advance(count: int) -> int:
    """What `count` steps add to a generator's state, as int64."""
    return signed(count * _STEP)


def mix(value: int) -> int:
    """splitmix64's finaliser on a Python integer mod 2^64."""
    value &= _BITS
    for shift, factor in _ROUNDS:
        value = (value ^ (value >> shift)) * factor & _BITS
    return value ^ (value >> _LAST_SHIFT)


def mix_(z: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 `z` of any shape, in place; equal to `mix` bit by bit."""
    for shift, factor in _ROUNDS:
        z.bitwise_xor_(_shift_right(z, shift)).mul_(signed(factor))
    return z.bitwise_xor_(_shift_right(z, _LAST_SHIFT))


def _shift_right(z: Tensor, shift: int) -> Tensor:
    """Torch shifts int64 arithmetically; the mask drops the copies of the sign."""
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def key(name: str, seed: int) -> int:
    """Start of the generator of `name` under `seed`."""
    digest = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return mix(mix(digest) + seed * _STEP)


def token_keys(seed: int, step: Tensor, sample_ids_B: Tensor, offsets_BS: Tensor) -> Tensor:
    """Step () int64, sample ids (B,), offsets in the sample (B, S) -> (B*S,) int64, one key a token.

    What is random about a token (today: dropout) starts from its key, wherever the token lies.
    """
    state = mix_(step * advance(1) + signed(key("dropout", seed)))
    state_B = mix_(sample_ids_B * advance(1) + state)
    return mix_(offsets_BS * advance(1) + state_B[:, None]).flatten()


@torch.no_grad()
def fill(
    out: Tensor,
    name: str,
    seed: int,
    shape: Sequence[int],
    start: Sequence[int],
    extent: Sequence[int],
    init: Init,
) -> None:
    """Writes the rectangle [start, start + extent) of logical tensor `name` of `shape` into `out`.

    `out` has prod(extent) elements, viewable as `extent`, of any floating dtype (values are float32 before the cast)
    on any device. Extra memory is constant. Raises ValueError where the rectangle leaves the tensor.
    """
    if not len(shape) == len(start) == len(extent) or any(
        low < 0 or size < 0 or low + size > whole for low, size, whole in zip(start, extent, shape, strict=True)
    ):
        raise ValueError(f"rectangle at {tuple(start)} of {tuple(extent)} does not lie inside {name} {tuple(shape)}")
    box = out.view(tuple(extent))
    if not init.std:
        box.fill_(init.constant)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(low * stride for low, stride in zip(start, strides, strict=True))
    start_state = key(name, seed)
    for block, index in _blocks(box, strides, first):
        states = _states(block, strides[len(strides) - block.dim() :], start_state + 2 * index * _STEP)
        values = _centred_sums(mix_(states)).to(torch.float32).mul_(init.std / _DEVIATION)
        block.copy_(values.add_(init.constant) if init.constant else values)


def _blocks(box: Tensor, strides: list[int], first: int) -> Iterator[tuple[Tensor, int]]:
    """Cuts `box` into views of at most a chunk of elements, each with the logical index of its first element."""
    chunk = _CHUNK_ELEMENTS.get(box.device.type, 1 << 20)
    if box.numel() <= chunk:
        yield box, first
        return
    run = max(1, chunk // box[0].numel())
    for low in range(0, box.shape[0], run):
        block, index = box[low : low + run], first + low * strides[0]
        if block.numel() <= chunk:
            yield block, index
        else:
            yield from _blocks(block[0], strides[1:], index)


def _states(block: Tensor, strides: list[int], start_state: int) -> Tensor:
    """Generator states of both numbers of each element: block (...) -> (2, ...)."""
    dims = block.dim()
    states = torch.tensor([advance(1), advance(2)], device=block.device).view(2, *(1,) * dims)
    states = states + signed(start_state)
    for dim, stride in enumerate(strides):
        ramp = torch.arange(block.shape[dim], device=block.device).mul_(advance(2 * stride))
        states = states + ramp.view(-1, *(1,) * (dims - dim - 1))
    return states


def _centred_sums(numbers: Tensor) -> Tensor:
    """(2, ...) -> (...): the sum of the eight 16-bit fields minus its mean; two fields are added at a time."""
    pairs = (numbers >> 16).bitwise_and_(_FIELD_PAIRS).add_(numbers.bitwise_and_(_FIELD_PAIRS))
    both = pairs[0].add_(pairs[1])
    return (both >> 32).add_(both.bitwise_and_(0xFFFF_FFFF)).sub_(_MEAN)
