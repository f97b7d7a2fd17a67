"""Whatever layout saved a checkpoint, any other continues from it as if nothing had happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.manifest import Manifest
from meshwright.testing.exact import figure_of_difference
from meshwright.testing.ranks import run_cases
from tests.ranks.checkpoint.layouts import (
    ALL_EXPERTS,
    EXPERTS,
    HALF,
    LAYOUTS,
    TIED,
    Carried,
    Layout,
    continue_from,
    folder_of,
    save_and_go_on,
)


def _saved(layouts: Sequence[Layout], root: Path) -> dict[str, list[float]]:
    """Train and save every layout, worlds of one size in one launch; losses by layout."""
    losses: dict[str, list[float]] = {}
    for world, cases in _by_world(layouts).items():
        told = run_cases(save_and_go_on, world, cases, root, timeout=300)
        losses |= {layout.name: told[0][number] for number, layout in enumerate(cases)}
    return losses


def _check(carried: Sequence[Carried], losses: dict[str, list[float]], root: Path, exact: str) -> None:
    for world, cases in _by_world(carried).items():
        told = run_cases(continue_from, world, cases, root, timeout=900)
        for number, case in enumerate(cases):
            assert all(told[rank][number] == told[0][number] for rank in range(world)), case.name
            if case.source == case.target:
                assert told[0][number] == losses[case.target.name][HALF:], f"{case.name} is not bit-identical"
            reference = torch.tensor(losses[exact][HALF:], dtype=torch.float64)
            actual = torch.tensor(told[0][number], dtype=torch.float64)
            assert figure_of_difference(actual, reference) <= 1e-12, case.name


def _by_world(cases: Sequence[Layout] | Sequence[Carried]) -> dict[int, list]:
    out = defaultdict(list)
    for case in cases:
        out[case.target.world if isinstance(case, Carried) else case.world].append(case)
    return out


def _manifest(root: Path, layout: Layout) -> Manifest:
    return Folder(folder_of(root, layout)).manifest(HALF)


OWN = ("one", "dp 2, ZeRO 3", "pp 2 interleaved, dp 2, ZeRO 1", "tp 2, dp 2, ZeRO 3")
"""Continued bit for bit in the short test; the long one takes all."""


def test_layouts_continue_from_one_another(tmp_path: Path) -> None:
    """A ring through the table: every layout saves, every layout loads what another saved, some what they saved."""
    losses = _saved(LAYOUTS, tmp_path)
    ring = [Carried(LAYOUTS[number - 5], layout) for number, layout in enumerate(LAYOUTS)]
    own = [Carried(layout, layout) for layout in LAYOUTS if layout.name in OWN]
    _check(ring + own, losses, tmp_path, "one")


def test_biases_of_routers_are_carried(tmp_path: Path) -> None:
    losses = _saved(EXPERTS, tmp_path)
    ring = [Carried(EXPERTS[number - 1], layout) for number, layout in enumerate(EXPERTS)]
    _check([*ring, Carried(EXPERTS[0], EXPERTS[0])], losses, tmp_path, EXPERTS[0].name)
    prints = [
        {each.name: each.fingerprint for each in _manifest(tmp_path, layout).tensors if each.name.startswith("router")}
        for layout in EXPERTS
    ]
    assert len(prints[0]) == 2
    assert all(each == prints[0] and 0 not in each.values() for each in prints)


def test_tied_tensors_are_carried_once(tmp_path: Path) -> None:
    losses = _saved(TIED, tmp_path)
    ring = [Carried(TIED[number - 1], layout) for number, layout in enumerate(TIED)]
    _check(ring, losses, tmp_path, TIED[0].name)
    for layout in TIED:
        assert "head.weight" not in {tensor.name for tensor in _manifest(tmp_path, layout).tensors}


@pytest.mark.prove
@pytest.mark.timeout(3000)
def test_experts_on_every_layout_continue_from_every_other(tmp_path: Path) -> None:
    """Where experts lie is nobody's matter but the rank's: one fingerprint a tensor, whoever saved it."""
    losses = _saved(ALL_EXPERTS, tmp_path)
    _check([Carried(a, b) for a in ALL_EXPERTS for b in ALL_EXPERTS], losses, tmp_path, ALL_EXPERTS[-1].name)
    for layout in ALL_EXPERTS:  # of weights that are equal to rounding, names and number are
        assert len(_manifest(tmp_path, layout).tensors) == len(_manifest(tmp_path, ALL_EXPERTS[-1]).tensors)


@pytest.mark.prove
@pytest.mark.timeout(3000)
def test_every_layout_continues_from_every_other(tmp_path: Path) -> None:
    losses = _saved(LAYOUTS, tmp_path)
    _check([Carried(a, b) for a in LAYOUTS for b in LAYOUTS], losses, tmp_path, "one")
