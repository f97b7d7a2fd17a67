"""Exact tensors and their comparison."""

import pytest
import torch

from meshwright.testing.exact import check_equal, figure_of_difference, numbered, whole
from meshwright.testing.models import m0, m0_bytes, overrides


def test_whole_numbers_repeat_and_sum_exactly_in_any_order() -> None:
    x = whole(1000, seed=3)
    check_equal(x, whole(1000, seed=3))
    assert not torch.equal(x, whole(1000, seed=4))
    assert float(x.sum()) == float(x.flip(0).cumsum(0)[-1]) == sum(x.tolist())
    assert set(x.tolist()) == set(range(-4, 5))
    assert 0 not in whole(1000, zero=False).tolist()


def test_numbered() -> None:
    check_equal(numbered(2, 3, start=5), torch.tensor([[5.0, 6, 7], [8, 9, 10]]))
    with pytest.raises(ValueError, match=r"is not exact in torch\.bfloat16"):
        numbered(300, dtype=torch.bfloat16)


def test_check_equal_names_the_place() -> None:
    a, b = numbered(2, 3), numbered(2, 3)
    b[1, 2] = 9
    with pytest.raises(AssertionError, match=r"gain: 1 of 6 elements differ, the first at \(1, 2\): 5.0, expected 9.0"):
        check_equal(a, b, "gain")
    with pytest.raises(AssertionError, match="shape"):
        check_equal(a, b[0])
    with pytest.raises(AssertionError, match="dtype"):
        check_equal(a, a.double())
    with pytest.raises(AssertionError, match="1 of 1"):
        check_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    check_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_figure_of_difference() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert figure_of_difference(zero, zero) == 0.0
    assert figure_of_difference(one + 0.5, one) == 0.5
    assert figure_of_difference(one, zero, largest=1000.0) == 1.0
    assert figure_of_difference(one, zero) == float("inf")


def test_settings_are_fresh_copies() -> None:
    run = m0(mesh={"dp": 4})
    run["model"]["layers"] = 9
    assert m0()["model"]["layers"] == 2
    assert m0(mesh={"dp": 4})["mesh"] == {"dp": 4}
    assert m0_bytes()["model"]["vocab"] == 257


def test_overrides_are_what_a_user_types() -> None:
    assert "mesh.dp=2" in overrides(m0(mesh={"dp": 2}))
    assert 'model.family="llama"' in overrides(m0())
    assert overrides({"data": {"x": [1, True]}}) == ["data.x=[1, true]"]
