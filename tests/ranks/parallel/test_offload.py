"""Offload changes where numbers live, and no number: equal to the bit on and off, to host memory and to disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config.choices import Dtype, Offload
from meshwright.config.errors import RequestError
from meshwright.parallel.allocator import Event
from meshwright.parallel.engine import Engine
from meshwright.parallel.offload import mapped_zeros
from meshwright.plan.category import Category
from meshwright.plan.folds.memory import memory
from meshwright.plan.plan import Execution, Precision
from meshwright.plan.rules import check_plan
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from tests.ranks.parallel.plain import ADAMW, SGD, Case
from tests.ranks.parallel.running import difference, engine_of, masters, train

SINGLE, MIXED = Precision(), Precision(Dtype.BFLOAT16, Dtype.FLOAT32, Dtype.FLOAT32)
FLAT = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.MASTER)


def away(offload: Offload, to: str = "memory") -> Execution:
    return Execution(offload=offload, offload_to=to)


def equal_to_the_bit(rank: int, case: Case) -> None:
    """5 steps with clipping: weights, masters, norms and optimizer states."""
    here, there = engine_of(replace(case, execution=Execution()).plan), engine_of(case.plan)
    one, other = train(here, 5), train(there, 5)
    assert one.results == other.results
    assert min(result.grad_norm for result in one.results) > case.optimizer.clip_norm, "clipping is off"
    for name in ("weights", "gradients"):
        assert difference(getattr(other, name), getattr(one, name)) == 0.0, name
    assert difference([masters(there)], [masters(here)]) == 0.0
    for mine, theirs in zip(here.stores, there.stores, strict=True):
        for a, b in zip(mine.runs, theirs.runs, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.state, b.state, strict=True))
            assert torch.equal(a.step, b.step)
            assert float(a.step) == 5.0


def test_on_and_off_are_equal_to_the_bit(tmp_path: Path) -> None:
    wide = replace(ADAMW, clip_norm=0.05)
    layouts = [(Offload.OPTIMIZER, zero) for zero in range(4)] + [(Offload.PARAMS, 3)]
    cases = [
        Case(f"{offload}, stage {zero}, {acc} micro-batches, {to}, {precision.compute}", 2, zero, acc,
             optimizer=wide, precision=precision, execution=away(offload, str(tmp_path) if to == "disk" else to))
        for offload, zero in layouts
        for acc, to, precision in ((1, "memory", MIXED), (4, "memory", SINGLE), (4, "disk", MIXED))
    ]  # fmt: skip
    run_cases(equal_to_the_bit, 2, cases, timeout=110)
    assert list(tmp_path.iterdir()) == [], "files of a run that ended are left"


def live_bytes_are_planned(rank: int, case: Case) -> list[int]:
    """After every change within a step, the flat memory of each category is what the fold says; returns peaks."""
    plan = case.plan
    engine = engine_of(plan)
    timeline = memory(plan, rank)
    assert {name: engine.allocator.live[name] for name in FLAT} == {name: timeline.states[name] for name in FLAT}
    seen: list[Event] = []
    engine.allocator.on_event = seen.append
    engine.step(local_share(plan, global_batches(plan, 1)[0], rank), 0.01)
    found, wanted = Levels(), Levels()
    for event in seen:
        found.add(event.action, event.category, event.num_bytes)
    for change in timeline.events:
        wanted.add(change.index, change.category, change.change)
    assert found.course == wanted.course
    assert found.most == wanted.most
    return [engine.allocator.total, engine.allocator.peak]


class Levels:
    """Flat bytes by category above those between steps: after each action, and the most within it."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(FLAT, 0)
        self.after: dict[int, dict[Category, int]] = {}
        self.most: dict[Category, int] = dict.fromkeys(FLAT, 0)

    def add(self, action: int, category: Any, num_bytes: int) -> None:
        if category in self.now:
            self.now[category] += num_bytes
            self.after[action] = dict(self.now)
            self.most[category] = max(self.most[category], self.now[category])

    @property
    def course(self) -> list[tuple[int, dict[Category, int]]]:
        """(action, levels) wherever an action leaves other levels than it found."""
        out: list[tuple[int, dict[Category, int]]] = []
        last = dict.fromkeys(FLAT, 0)
        for action, levels in self.after.items():
            if levels != last:
                out.append((action, levels))
            last = levels
        return out


def test_live_bytes_are_those_of_the_plan_and_offload_saves_what_it_says() -> None:
    cases = [
        Case(f"stage {zero}, {acc}, {offload}, {precision.compute}", 2, zero, acc, tied=acc == 4,
             optimizer=ADAMW, precision=precision, execution=away(offload))
        for zero in range(4)
        for acc in (1, 4)
        for offload in (Offload.NONE, Offload.OPTIMIZER, *([Offload.PARAMS] if zero == 3 else []))
        for precision in (SINGLE, MIXED)
    ]  # fmt: skip
    (totals, _) = run_cases(live_bytes_are_planned, 2, cases, timeout=110)
    between = {case.name: total for case, (total, _) in zip(cases, totals, strict=True)}
    for zero in range(4):
        here, there = between[f"stage {zero}, 1, none, bfloat16"], between[f"stage {zero}, 1, optimizer, bfloat16"]
        share = 1 if zero == 0 else 2
        plain = 2 if zero < 3 else 2 / share
        assert there / here == pytest.approx(plain / (plain + 12 / share)), "master and two moments are away"


def test_parameters_stay_where_they_are_whole() -> None:
    with pytest.raises(RequestError, match="stage 3"):
        check_plan(Case("stage 1", 2, 1, execution=away(Offload.PARAMS)).plan)


def test_an_optimizer_without_state_has_nothing_to_send_away() -> None:
    assert Case("sgd", 2, 1, optimizer=SGD, execution=away(Offload.OPTIMIZER)).plan.execution == Execution()


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"400 bytes of offloaded state.*offload") as caught:
        mapped_zeros(tmp_path / "offload", 100, torch.float32)
    assert caught.value.errno == 28


def test_homes_are_a_second_buffer() -> None:
    from meshwright.comm.mesh import Mesh

    engine = Engine(Case("one rank", 1, precision=MIXED, execution=away(Offload.OPTIMIZER)).plan, Mesh())
    held = {category: engine.allocator.live[category] for category in FLAT}
    assert held[Category.MASTER] == held[Category.OPTIMIZER] == 0
    store = engine.stores[1]
    assert store.master.untyped_storage().data_ptr() != store.whole.untyped_storage().data_ptr()
    assert {store.master.dtype, *(state.dtype for run in store.runs for state in run.state)} == {torch.float32}
