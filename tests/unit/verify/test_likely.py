"""From a difference to its cause: tensors with a known fault, their traits, and the word for it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.layout.rectangles import full
from meshwright.plan.plan import Plan
from meshwright.verify.likely import Cause, Differing, Likely, likely_cause, likely_factor
from meshwright.verify.trace import Kind
from meshwright.verify.traits import largest_difference, traits_of
from tests.unit.plan.plans import make_plan

PLAN = make_plan(dp=3, tp=2, micro=1, accumulation=5)
ALLOWED = 1e-12


def reference(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(a: Tensor | dict[int, Tensor], b: Tensor, kind: Kind = Kind.GRADIENT, plan: Plan = PLAN) -> Likely:
    by_rank = a if isinstance(a, dict) else dict.fromkeys(range(plan.degrees.ranks), a)
    box = full(tuple(b.shape))
    pieces = [
        Differing(rank, box, traits_of(held, b, box.start, ALLOWED, lambda dim: b)) for rank, held in by_rank.items()
    ]
    size = max(largest_difference(held, b) for held in by_rank.values()) / float(b.abs().max())
    return likely_cause(plan, kind, size, pieces)


@pytest.mark.parametrize(
    ("factor", "name"),
    [(3, "dp"), (1 / 3, "1/dp"), (2, "tp"), (6, "dp x tp"), (1 / 15, "1/(dp x accumulation)"), (9, "dp^2")],
)
def test_a_factor_is_named_by_the_degrees_that_make_it(factor: float, name: str) -> None:
    b = reference(6, 5)
    likely = told(b * factor, b)
    assert likely.cause is Cause.FACTOR
    assert likely.text.endswith(f"which is {name}")


def test_what_the_precision_explains_hides_no_factor() -> None:
    b = reference(6, 5)
    for factor in (1 / 3, 2.0):
        box = full((6, 5))
        rounded = [(b * factor * (1 + 1e-6 * reference(6, 5, seed=rank + 1))) for rank in range(6)]
        pieces = [Differing(r, box, traits_of(a, b, box.start, ALLOWED, lambda dim: b)) for r, a in enumerate(rounded)]
        assert likely_cause(PLAN, Kind.GRADIENT, 0.5, pieces, rounding=1e-5).cause is Cause.FACTOR
        assert likely_cause(PLAN, Kind.GRADIENT, 0.5, pieces).cause is not Cause.FACTOR


def test_a_factor_that_is_no_degree_is_told_as_a_number() -> None:
    b = reference(6, 5)
    assert told(b * 0.7, b) == Likely(Cause.FACTOR, "a factor of 0.7")
    assert likely_factor(PLAN, 3.0).text == "a factor of 3, which is dp"


def test_parts_that_add_up_over_a_group_are_a_missing_sum_over_it() -> None:
    b = reference(6, 5)
    parts = [reference(6, 5, seed=1), reference(6, 5, seed=2)]
    parts.append(b - parts[0] - parts[1])
    degrees = PLAN.degrees
    over_dp = {rank: parts[degrees.coordinates(rank).dp] for rank in range(6)}
    assert told(over_dp, b) == Likely(Cause.MISSING_SUM, "each rank holds its own part: no sum over dp")
    halves = (reference(6, 5, seed=3), b - reference(6, 5, seed=3))
    over_tp = {rank: halves[degrees.coordinates(rank).tp] for rank in range(6)}
    assert told(over_tp, b) == Likely(Cause.MISSING_SUM, "each rank holds its own part: no sum over tp")


def test_a_part_of_a_sum() -> None:
    parts = [reference(60, 50, seed=seed) for seed in range(4)]
    assert told(sum(parts[1:], parts[0]) - parts[3], sum(parts[1:], parts[0])).cause is Cause.MISSING_SUM
    assert told(sum(parts[1:], parts[0]) + parts[3], sum(parts[1:], parts[0])).cause is Cause.DOUBLE


def test_wrong_rows_and_columns() -> None:
    b = reference(8, 6)
    assert told(b.roll(2, 0), b).text == "row 0 holds what belongs at 6"
    assert told(b.roll(1, 1), b).text == "column 0 holds what belongs at 5"
    swapped = b[[0, 1, 4, 3, 2, 5, 6, 7]]
    assert told(swapped, b) == Likely(Cause.ROWS, "row 2 holds what belongs at 4")


def test_rows_that_are_zero_or_alone_differ() -> None:
    b = reference(8, 6)
    zeroed = b.clone()
    zeroed[6:] = 0
    assert told(zeroed, b) == Likely(Cause.PADDING, "2 of 8 rows are zero, the first differing is 6")
    last = b.clone()
    last[7] += 1
    assert told(last, b) == Likely(Cause.PADDING, "only 1 of 8 rows differ, the first is 7")


def test_all_zero_and_not_finite() -> None:
    b = reference(4)
    assert told(torch.zeros(4), b).cause is Cause.UNWRITTEN
    broken = b.clone()
    broken[2] = math.nan
    assert told(broken, b) == Likely(Cause.NONFINITE, "1 elements are not finite")


def test_positions_of_an_activation_point_at_masks() -> None:
    b = reference(2, 8, 4)
    later = b.clone()
    later[:, 3:] += reference(2, 5, 4, seed=9)
    assert told(later, b, Kind.ACTIVATION) == Likely(Cause.MASK, "only 5 of 8 positions differ, from 3 on")
    everywhere = b + reference(2, 8, 4, seed=9)
    assert told(everywhere, b, Kind.ACTIVATION).cause is Cause.OTHER
    dropping = replace(PLAN, arch=replace(PLAN.arch, dropout=0.1))
    assert told(everywhere, b, Kind.ACTIVATION, dropping).cause is Cause.RANDOMNESS


def test_small_noise_is_order_or_precision() -> None:
    b = reference(6, 5)
    assert told(b.float().double(), b).cause is Cause.PRECISION
    assert told(b + 1e-11 * reference(6, 5, seed=1), b).cause is Cause.ORDER


def test_a_bias_has_no_rows_that_meet_by_chance() -> None:
    b = torch.zeros(5, dtype=torch.float64)
    b[1:] = 1.0
    a = b.flip(0)
    assert told(a, b).cause is not Cause.ROWS


def test_infinities_are_infinitely_different_unless_equal() -> None:
    infinite = torch.tensor([1.0, math.inf])
    assert largest_difference(infinite, infinite) == 0.0
    assert largest_difference(infinite, torch.tensor([1.0, 2.0])) == math.inf
    assert largest_difference(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert largest_difference(torch.zeros(0), torch.zeros(0)) == 0.0


def test_rows_here_and_there_are_no_padding() -> None:
    """A tied table of which the look-up's part counts twice differs in the rows that were read."""
    head, look_up = reference(12, 5), torch.zeros(12, 5, dtype=torch.float64)
    look_up[[1, 4, 7, 10]] = 3 * head[[1, 4, 7, 10]]
    assert told(head + 2 * look_up, head + look_up).cause is Cause.DOUBLE
    assert told(head, head + look_up).cause is Cause.MISSING_SUM
    cut = head.clone()
    cut[10:] = 0
    assert told(cut, head) == Likely(Cause.PADDING, "2 of 12 rows are zero, the first differing is 10")


def test_a_large_factor_is_one_in_any_precision() -> None:
    b = reference(6, 5)
    scaled = 65536 * b * (1 + 1e-4 * reference(6, 5, seed=1))
    piece = Differing(0, full((6, 5)), traits_of(scaled, b, (0, 0), ALLOWED, lambda dim: b))
    assert likely_cause(PLAN, Kind.GRADIENT, 65535.0, [piece], rounding=1e-2).cause is Cause.FACTOR


def test_an_update_that_did_nothing() -> None:
    updates = reference(4)
    assert told(torch.zeros(4), updates, Kind.FIRST) == Likely(Cause.UNWRITTEN, "unchanged: never updated")
