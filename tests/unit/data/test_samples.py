"""How a stream is cut: every label once, training and evaluation apart, nothing lost unsaid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.errors import RequestError
from meshwright.data.samples import plan_samples


@given(st.integers(2, 2**62), st.integers(1, 2**20), st.floats(0, 1, exclude_max=True))
def test_samples_account_for_every_token(num_tokens: int, length: int, eval_fraction: float) -> None:
    """B76 (gpt-neox#493): exact for sizes far above 2^31."""
    if num_tokens <= length:
        with pytest.raises(RequestError):
            plan_samples(num_tokens, length, eval_fraction)
        return
    plan = plan_samples(num_tokens, length, eval_fraction)
    num_samples = plan.num_train + plan.num_eval
    assert num_samples * length + 1 + plan.dropped_tokens == num_tokens
    assert 0 <= plan.dropped_tokens < length
    assert plan.num_train >= 1
    assert plan.num_eval >= (1 if eval_fraction > 0 and num_samples > 1 else 0)
    assert abs(plan.num_eval - num_samples * eval_fraction) <= max(1, num_samples * 1e-9)


def test_the_last_piece_is_dropped_and_counted() -> None:
    plan = plan_samples(100, 10, 0.2)
    assert (plan.num_train, plan.num_eval, plan.dropped_tokens) == (7, 2, 9)


def test_a_share_of_nothing_evaluates_nothing() -> None:
    assert plan_samples(101, 10, 0.0).num_eval == 0
    assert plan_samples(11, 10, 0.5).num_eval == 0  # one sample trains


def test_too_few_or_too_many_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match=r"sequence_length = 64.*has 33 tokens.*32"):
        plan_samples(33, 64, 0.0)
    with pytest.raises(RequestError, match=r"2\^62"):
        plan_samples(2**62 + 1, 64, 0.0)
