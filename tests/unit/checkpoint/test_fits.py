"""The plan of a manifest and its tensors are of one model, or nothing is done with them: no weight is dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.fits import planned_checkpoint
from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.huggingface.convert import export_checkpoint
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.rewrite import reshard
from meshwright.cli.main import main
from meshwright.comm.agree import Side
from meshwright.train.standalone import plan_of as plan_of_checkpoint
from tests.unit.checkpoint.saved import engine_of, plan_of, save
from tests.unit.checkpoint.test_damage import rewritten

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(engine_of(), tmp_path / "run")


def arch(**values: Any) -> Change:
    return lambda manifest: manifest["plan"]["arch"].update(values)


def layers(count: int) -> Change:
    """A plan of another depth that is one all the same."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["plan"]["arch"]["layers"] = count
        manifest["plan"]["pipeline"]["stages"] = [count]

    return change


def plan(section: str, **values: Any) -> Change:
    return lambda manifest: manifest["plan"][section].update(values)


WRONG: dict[str, tuple[Change, str]] = {
    "fewer layers": (layers(1), r"holds layers\.1\.attention_norm\.weight \(9 tensors"),
    "more layers": (layers(3), r"has no layers\.2\."),
    "wider": (arch(hidden=32), r"embedding\.weight has shape \[67, 24\], this model's has \[67, 32\]"),
    "layers without end": (arch(layers=10**12), "holds no plan: model.layers = 1000000000000: must be at most"),
    "no layer": (arch(layers=0), "holds no plan: model.layers = 0"),
    "stages of other layers": (arch(layers=1), r"holds no plan: parallel\.stages = \[2\] \(sum 2\)"),
    "no stages": (plan("pipeline", stages=[]), r"holds no plan: parallel\.stages = \[\]: must have pp x chunks"),
    "no rank": (plan("degrees", dp=0), "holds no plan: .*dp"),
    "no batch": (plan("batch", sequences=0), r"holds no plan: batch\.global = 0: must be at least 1"),
    "a word without end": (plan("optimizer", learning_rate="9" * 5000), r"holds no plan: '9{399}\.\.\.$"),
    "family": (arch(family="gpt9"), "holds no plan: 'gpt9'"),
    "renamed": (lambda m: m["tensors"][0].update(name="x\n\x1b[31m"), r"has no embedding\.weight"),
    "dropped": (lambda m: m.update(tensors=[]), r"has no embedding\.weight"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_plan_of_another_model_is_refused_by_every_reader(kind: str, folder: Path, tmp_path: Path) -> None:
    """Export and evaluation used the part that fitted, `reshard` left a renamed weight out, and all said: done."""
    change, told = WRONG[kind]
    rewritten(folder, change)
    storage, path = find_checkpoint(folder)
    for use in (
        lambda: planned_checkpoint(storage, path),
        lambda: plan_of_checkpoint(storage, path),
        lambda: export_checkpoint(storage, path, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match=told):
            use()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [plan("degrees", ep=[]), plan("degrees", dp=0), plan("degrees", tp=1 << 63), plan("sharding", stage=4),
     lambda m: m["plan"].pop("degrees"),
     lambda m: m["plan"].update(sharding=1.5), lambda m: m.update(plan={}), lambda m: m.update(plan={"module": 1}),
     lambda m: m.update(plan={"module": [], "degrees": {"dp": -1}, "sharding": {"stage": 0}})],
)  # fmt: skip
def test_what_is_no_layout_is_told_in_one_line(
    change: Change, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` looked into the plan without reading it: a TypeError."""
    rewritten(folder, change)
    assert main(["checkpoint", "show", str(folder)]) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(rf"error: {folder}: the plan[^\n]+\n", told), told


def test_a_plan_of_another_release_can_be_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` asked for a whole plan that this release knows, to print degrees; what trains on it still does."""
    rewritten(folder, lambda manifest: [plan(name, further=1)(manifest) for name in ("optimizer", "degrees")])
    assert main(["checkpoint", "show", str(folder)]) == 0
    assert "saved on one process" in capsys.readouterr().out
    assert main(["checkpoint", "reshard", str(folder), f"{folder}-cut", "mesh.dp=1"]) == 1
    assert re.fullmatch(r"error: [^\n]+: holds no plan: [^\n]+ has unknown field further\n", capsys.readouterr().err)


@pytest.mark.parametrize("kind", ["renamed", "dropped"])
def test_a_new_layout_leaves_no_weight_out(kind: str, folder: Path, tmp_path: Path) -> None:
    change, told = WRONG[kind]
    rewritten(folder, change)
    storage, path = find_checkpoint(folder)
    with pytest.raises(CheckpointError, match=told):
        reshard(storage, path, tmp_path / "out", plan_of())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "kept", ["x", [1], {"value": "x", "good_steps": 1}, {"value": 2.0}, {"value": [], "good_steps": 1}]
)
def test_a_loss_scale_that_is_none_is_refused(kept: object, folder: Path) -> None:
    rewritten(folder, lambda manifest: manifest.update(extra={"loss_scale": json.loads(json.dumps(kept))}))
    with pytest.raises(CheckpointError, match=r"loss_scale = .*, which is none"):
        load(engine_of(0), folder, Side())
