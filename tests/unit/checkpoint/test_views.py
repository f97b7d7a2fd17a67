"""Which pieces are certainly nobody else's."""

from __future__ import annotations

import torch

from meshwright.checkpoint.views import alone
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, full


def piece(name: str, view: torch.Tensor) -> Piece:
    return Piece(name, full(tuple(view.shape)))


def names(held: dict[str, torch.Tensor]) -> set[str]:
    return {each.tensor for each in alone({piece(name, view): view for name, view in held.items()})}


def test_pieces_side_by_side_are_alone_and_overlapping_ones_are_not() -> None:
    flat = torch.zeros(40)
    assert names({"a": flat[:10], "b": flat[10:20].view(2, 5), "c": flat[20:]}) == {"a", "b", "c"}
    assert names({"a": flat[:10], "b": flat[9:20], "c": flat[20:]}) == {"c"}
    assert names({"all": flat, "a": flat[3:5], "b": flat[30:31]}) == set()
    assert names({"a": flat[:10], "same": flat[:10]}) == set()


def test_columns_between_columns_count_as_overlapping() -> None:
    matrix = torch.zeros(4, 10)
    assert names({"left": matrix[:, :5], "right": matrix[:, 5:], "other": torch.zeros(3)}) == {"other"}


def test_a_piece_of_nothing_has_no_memory() -> None:
    assert list(alone({Piece("a", Rectangle((0,), (0,))): torch.zeros(0)})) == []
