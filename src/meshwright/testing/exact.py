"""Tensors on which floating-point arithmetic makes no error, so that algebra is tested bit by bit.

Small whole numbers stored as floats add and multiply exactly in any order as long as every intermediate stays below
2^24 (float32) or 2^53 (float64); any difference is then a fault of the algorithm and never of rounding.
"""

import math

import torch

# Whole numbers up to this are exact, and so is every sum that stays below it.
_EXACT_BELOW = {torch.float64: 2**53, torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11}


def whole(
    *shape: int, seed: int = 0, largest: int = 4, dtype: torch.dtype = torch.float32, zero: bool = True
) -> torch.Tensor:
    """Random whole numbers from -largest to largest as floats, shape `shape`; equal for equal arguments.

    Args:
        zero: False leaves 0 out, so that every element tells whether it was moved.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1 if not zero else 0, largest + 1, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (values * signs).to(dtype)


def numbered(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Elements start, start+1, ... in row-major order: each names the place it came from.

    Raises:
        ValueError: the last number is not exact in `dtype`.
    """
    stop = start + math.prod(shape)
    if stop - 1 > _EXACT_BELOW[dtype]:
        raise ValueError(f"{stop - 1} is not exact in {dtype}; exact are whole numbers up to {_EXACT_BELOW[dtype]}")
    return torch.arange(start, stop).reshape(shape).to(dtype)


def check_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Compares bit by bit: shape, dtype, every element; NaN equals NaN, 0 does not equal -0.

    Raises:
        AssertionError: what differs, with the first place and the number of different elements.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    a, b = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    width = a.element_size()
    different = (a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).reshape(-1, width).any(1)
    if bool(different.any()):
        flat = int(different.nonzero()[0])
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
        raise AssertionError(
            f"{what}: {int(different.sum())} of {a.numel()} elements differ, the first at {place}: "
            f"{a.reshape(-1)[flat].item()!r}, expected {b.reshape(-1)[flat].item()!r}"
        )


def figure_of_difference(actual: torch.Tensor, expected: torch.Tensor, largest: float | None = None) -> float:
    """max|a-b| / max(max|b|, 1e-3·M); 0/0 is 0.

    Args:
        largest: M, the largest |b| over all tensors of this kind; None takes this tensor's own.
    """
    difference = float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0
    own = float(expected.double().abs().max()) if expected.numel() else 0.0
    scale = max(own, 1e-3 * (own if largest is None else largest))
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf
