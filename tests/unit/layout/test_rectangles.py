"""A rectangle counted from another corner, and back."""

from __future__ import annotations

from meshwright.layout.rectangles import Rectangle, full


def test_what_is_counted_from_a_corner_comes_back() -> None:
    inner, outer = Rectangle((5, 7), (2, 3)), Rectangle((4, 7), (6, 6))
    assert inner.within(outer) == Rectangle((1, 0), (2, 3))
    assert inner.within(outer).offset_by(outer.start) == inner
    assert full(()).offset_by(()) == full(())
