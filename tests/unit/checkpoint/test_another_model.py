"""Changes may be accepted, another model may not: a lacking weight is never made up, and none is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.resume import look
from meshwright.config.choices import OptimizerKind, Resume
from meshwright.config.errors import RequestError
from meshwright.plan.plan import Plan
from tests.unit.checkpoint.saved import engine_of, plan_of, save


def with_layers(count: int) -> Plan:
    plan = plan_of()
    return replace(plan, arch=replace(plan.arch, layers=count), pipeline=replace(plan.pipeline, stages=(count,)))


def wider() -> Plan:
    return replace(plan_of(), arch=replace(plan_of().arch, hidden=32))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (with_layers(3), r"has no layers\.2\.attention_norm\.weight \(\d+ tensors of this model are not in it\)"),
        (with_layers(1), r"holds layers\.1\.attention_norm\.weight \(9 tensors of it are not in this model\)"),
        (wider(), r"embedding\.weight has shape \[67, 24\], this model's has \[67, 32\]"),
    ],
)
def test_another_model_is_refused_before_ranks_start(plan: Plan, told: str, tmp_path: Path) -> None:
    """A run of one layer went on from a checkpoint of two, and said nothing."""
    save(engine_of(), tmp_path)
    with pytest.raises(RequestError, match="trains differently"):
        look(Folder(tmp_path), plan, Resume.AUTO)
    with pytest.raises(RequestError, match=f"{told}: no change of that can be accepted; what works: checkpoint.resume"):
        look(Folder(tmp_path), plan, Resume.AUTO, accept_changes=True)


def test_a_refusal_tells_of_newer_ones_that_are_damaged(tmp_path: Path) -> None:
    for step in (2, 4):
        save(engine_of(), tmp_path, step)
    (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    with pytest.raises(RequestError) as refused:
        look(Folder(tmp_path), wider(), Resume.AUTO)
    head, _, newer = str(refused.value).partition("and newer ones cannot be used:")
    assert "step-00000002: is of a run that trains differently" in head
    assert "step-00000004/manifest.json" in newer
    assert newer.rstrip().endswith("another name")


def test_another_optimizer_leaves_states_out(tmp_path: Path) -> None:
    save(engine_of(), tmp_path)
    plan = plan_of()
    kind = next(kind for kind in OptimizerKind if kind is not plan.optimizer.kind)
    other = replace(plan, optimizer=replace(plan.optimizer, kind=kind))
    assert look(Folder(tmp_path), other, Resume.AUTO, accept_changes=True) is not None
