"""The figure of difference at its edges."""

import math

from meshwright.verify.figure import figure, relative, scale
from meshwright.verify.trace import Figures, Kind, Quantity


def test_a_tensor_of_zeros_has_the_scale_of_its_kind() -> None:
    largest = {"gradient/zero": 0.0, "gradient/large": 8.0, "weight.0/zero": 500.0}
    figures = Figures(0.0, (), (), (), largest, dict.fromkeys(largest, (1,)))
    assert scale(figures, Quantity(Kind.GRADIENT, "zero")) == 8e-3
    assert scale(figures, Quantity(Kind.GRADIENT, "large")) == 8.0
    assert figure(8e-6, scale(figures, Quantity(Kind.GRADIENT, "zero"))) == 1e-3


def test_zero_over_zero_is_zero_and_something_over_zero_is_infinite() -> None:
    assert figure(0.0, 0.0) == 0.0
    assert figure(1e-300, 0.0) == math.inf


def test_numbers() -> None:
    assert relative(3.0, 2.0) == 0.5
    assert relative(0.0, 0.0) == 0.0
    assert relative(math.nan, 1.0) == relative(math.inf, 1.0) == math.inf
