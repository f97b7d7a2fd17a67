"""What a step spent, by cause, and what another layout would have saved."""

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.config.load import dump_run, load_run
from meshwright.config.schema import RunConfig
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Action, Op, Phase
from meshwright.plan.plan import Plan
from meshwright.price import catalogue
from meshwright.price.price import price
from meshwright.price.search import search
from meshwright.train import stopwatch
from meshwright.train.regret import PARTS, cluster_name, predicted, rates, regret, regret_line, too_short_line
from meshwright.train.stopwatch import Stopwatch

TINY = ("model.family=llama", "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128",
        "model.vocab=257", "data.sequence_length=64", "batch.global=8", "batch.micro=4")  # fmt: skip


@pytest.fixture(autouse=True)
def never_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ "local" is the catalogue's, whatever was measured of the machine that runs this."""
    monkeypatch.setattr(catalogue, "calibrated_path", lambda: tmp_path / "local.toml")


def test_a_stopwatch_gives_each_action_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 7.5, 8.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch, seen = Stopwatch(), list[Action]()
    before = watch.over(seen.append)
    actions = (Action(Op.FORWARD, Phase.FORWARD), Action(Op.SUM, Phase.REDUCE, group=GroupName.DENSE),
               Action(Op.SEND, Phase.FORWARD, group=GroupName.PP), Action(Op.WAIT, Phase.REDUCE, group=GroupName.DENSE),
               Action(Op.UPDATE, Phase.UPDATE))  # fmt: skip
    for action in actions:
        before(action)
    watch.end()
    assert tuple(seen) == actions
    spent = {name: each for name, each in watch.seconds.items() if each}
    assert spent == {"computation": 1.0, "replicas": 2.0 + 4.0, "stages": 0.5, "optimizer": 0.5}


def test_the_parts_of_a_step_add_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 0.5, a unit of 3 s that waits 0.75 s for tensor ranks and 0.25 s for those of experts, two messages
    awaited 2 s and 0.25 s, 0.25 s more to the end."""
    clock = iter([0.0, 3.0, 3.0, 5.0, 5.25])
    inside = chain([{GroupName.TP: 0.5}], repeat({GroupName.TP: 1.25, GroupName.EP: 0.25}))
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(lambda: next(inside))
    before = watch.over(lambda action: None)
    watch.read(0.5)
    receive = Action(Op.RECEIVE, Phase.FORWARD, group=GroupName.PP)
    before(Action(Op.FORWARD, Phase.FORWARD))
    before(receive)
    before(replace(receive, op=Op.WAIT, of=1))
    before(replace(receive, op=Op.WAIT, of=1))
    watch.end(seconds=6.0)
    parts = watch.parts
    assert (parts["pp"], parts["bubble"]) == (0.5, 1.75)
    assert sum(parts.values()) == pytest.approx(6.0)
    assert (parts["compute"], parts["tp"], parts["ep"], parts["data"]) == (2.0, 0.75, 0.25, 0.5)
    assert watch.computed == {"forward": 2.0, "backward": 0.0, "recompute": 0.0}
    assert parts["other"] == pytest.approx(0.25)


def test_the_first_step_does_not_count() -> None:
    watch = Stopwatch()
    watch.over(lambda action: None)(Action(Op.FORWARD, Phase.FORWARD))
    watch.end(count=False)
    assert watch.steps == 0
    assert sum(watch.seconds.values()) == 0.0


def test_predicted_causes_add_up_to_the_step() -> None:
    own = price(mw.plan(load_run(None, ["mesh.dp=2"])), "h100-sxm")
    assert sum(predicted(own.parts).values()) == pytest.approx(own.step_seconds)


def test_rates_are_measured_over_predicted() -> None:
    own = price(mw.plan(load_run(None, ["mesh.dp=2"])), "h100-sxm")
    doubled = {name: 2 * seconds for name, seconds in predicted(own.parts).items()}
    assert rates(own, doubled, 2 * own.step_seconds) == pytest.approx(dict.fromkeys(PARTS, 2.0))
    assert rates(own, None, 3 * own.step_seconds) == pytest.approx(dict.fromkeys(PARTS, 3.0))


def test_slow_sums_make_another_layout_better() -> None:
    """Where replicas take ten times what was priced, a layout that sums less often wins."""
    run = load_run(None, ["mesh.dp=2", "batch.micro=1", "parallel.zero=3"])
    plan = mw.plan(run)
    spent = predicted(price(plan, "h100-sxm").parts)
    slow = spent | {"replicas": 10 * spent["replicas"]}
    found = regret(run, plan, "h100-sxm", slow, sum(slow.values()))
    assert found.seconds < 0.9 * found.present_seconds
    assert found.present_seconds == pytest.approx(sum(slow.values()), rel=0.05)
    line = regret_line(dump_run(run), plan, "h100-sxm", slow, sum(slow.values()))
    assert line.startswith("regret: ")
    assert "\n" not in line
    assert "checkpoint" in line


def test_devices_are_priced_as_themselves() -> None:
    assert cluster_name("NVIDIA H200") == "h200-sxm"
    assert cluster_name("NVIDIA A100-SXM4-80GB") == "a100-80gb-sxm"
    assert cluster_name("") == "local"


def slowed(words: list[str], cause: str, factor: float) -> tuple[RunConfig, Plan, dict[str, float]]:
    run = load_run(None, [*TINY, *words])
    plan = mw.plan(run)
    spent = predicted(price(plan, "local").parts)
    return run, plan, spent | {cause: factor * spent[cause]}


def test_the_layout_named_is_the_best_of_all_at_the_measured_rates() -> None:
    """It was the best of the twelve that were the fastest as predicted: all of them summed over replicas."""
    run, plan, spent = slowed(["mesh.dp=2"], "replicas", 100.0)
    found = regret(run, plan, "local", spent, sum(spent.values()))
    own = price(plan, "local")
    at = rates(own, spent, sum(spent.values()))
    every = search(run, 2, "local", top=1000, suggest=False, fixed={"mesh.cp": 1, "parallel.offload": "none"})
    assert len(every.rows) > 30
    least = min(sum(at[name] * each for name, each in predicted(row.price.parts).items()) for row in every.rows)
    assert found.seconds == pytest.approx(min(least, found.present_seconds))


def test_slow_sums_inside_units_do_not_make_computation_slow() -> None:
    """Both had one rate: a layout without them was told to compute in a small share of the time it takes."""
    _, plan, spent = slowed(["mesh.dp=1", "mesh.tp=2"], "tensor", 50.0)
    at = rates(price(plan, "local"), spent, sum(spent.values()))
    assert (at["computation"], at["tensor"]) == (pytest.approx(1.0), pytest.approx(50.0))


def test_what_the_present_layout_has_none_of_is_told_as_not_measured() -> None:
    run, plan, spent = slowed(["mesh.dp=2"], "replicas", 100.0)
    line = regret_line(dump_run(run), plan, "local", spent, sum(spent.values()))
    assert "pp 2" in line
    assert "stages not measured here" in line
    slow, plan, spent = slowed(["mesh.dp=2", "batch.micro=1"], "computation", 10.0)
    assert "not measured" not in regret_line(dump_run(slow), plan, "local", spent, sum(spent.values()))


def test_a_run_that_has_no_answer_says_why() -> None:
    run, plan, spent = slowed(["mesh.dp=2"], "replicas", 1.0)
    assert "no step was taken" in regret_line(dump_run(run), plan, "local", dict.fromkeys(spent, 0.0), 0.0)
    assert too_short_line(4).startswith("regret: not asked")
    large = load_run(None, ["mesh.dp=2", "model.preset=llama3-70b", "batch.global=2", "batch.micro=1"])
    own = mw.plan(large)
    line = regret_line(dump_run(large), own, "rtx4090", None, 1.0)
    assert line.startswith("regret: not known; on rtx4090 no layout is priced")
    assert "\n" not in line
