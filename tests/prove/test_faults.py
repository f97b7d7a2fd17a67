"""Every fault of the list is noticed, and the ladder names the right tensor in nine of ten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from meshwright.testing.faults import Fault, Trial, Trials
from tests.prove.faults import FAULTS

LIMIT_S = 600.0
"""Of one trial, which takes three seconds of a core: the machine may be shared."""


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as opened:
        yield opened


def _complaint(fault: Fault, trial: Trial) -> str:
    """What is wrong with the way a fault was noticed; empty where nothing is."""
    lacking = [
        *([] if trial.caught else ["not noticed"]),
        *([] if fault.program in trial.program else [f"program: {trial.program}"]),
        *(["not in the ledger"] if fault.ledger and not trial.ledger else []),
        *(["not in the memory"] if fault.memory and not trial.memory else []),
        *(["cause"] if fault.cause is not None and trial.first == fault.first and trial.cause != fault.cause else []),
    ]
    return ", ".join(lacking)


def _noticed(trial: Trial) -> str:
    by = [name for name in ("program", "ledger", "memory", "error") if getattr(trial, name)]
    return " ".join([*by, *(["ladder"] if trial.first is not None else [])])


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_all_faults_are_caught_and_nine_of_ten_named_right(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    found = {fault.name: trials.of(fault, timeout=LIMIT_S) for fault in FAULTS}
    named = [fault for fault in FAULTS if fault.first is not None]
    right = [fault for fault in named if found[fault.name].first == fault.first]
    with capsys.disabled():
        print(f"\n{'fault':62}{'noticed by':28}{'named':34}")
        for fault in FAULTS:
            trial = found[fault.name]
            mark = "" if fault.first in (None, trial.first) else f"  WRONG, is {fault.first}"
            print(f"{fault.name:62}{_noticed(trial):28}{trial.first or '-'}{mark}")
        print(f"{len(FAULTS)} faults, {len(named)} with a tensor to name: {len(right)} named right")
    wrong = {fault.name: told for fault in FAULTS if (told := _complaint(fault, found[fault.name]))}
    assert not wrong
    assert len(right) >= 0.9 * len(named), {fault.name: found[fault.name].told for fault in named if fault not in right}


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_nothing_is_noticed_without_a_fault(trials: Trials) -> None:
    tried = {str(fault.run): fault.run for fault in FAULTS}
    noticed = {name: trial for name, run in tried.items() if (trial := trials.of(None, run, timeout=LIMIT_S)).caught}
    assert not noticed


def test_every_file_of_a_strategy_has_two_faults() -> None:
    count = Counter(fault.file for fault in FAULTS)
    strategies = (
        "parallel/tensor.py", "parallel/tensor_direct.py", "parallel/tensor_linear.py", "parallel/tensor_vocabulary.py",
        "parallel/direct.py", "parallel/split.py", "parallel/recompute.py", "parallel/offload.py", "parallel/store.py",
        "parallel/executor.py", "plan/strategies/tensor.py", "plan/strategies/calls.py", "plan/buckets.py",
        "plan/lowering/tail.py", "plan/lowering/borders.py", "plan/lowering/computes.py", "plan/lowering/gradients.py",
        "plan/lowering/parameters.py", "comm/operations.py", "comm/ring.py", "layout/rows.py",
        "parallel/experts.py", "parallel/balancing.py", "plan/strategies/context.py", "parallel/context_blocks.py",
        "parallel/context_heads.py", "parallel/context_kernels.py",
    )  # fmt: skip
    assert not [file for file in strategies if count[file] < 2]
