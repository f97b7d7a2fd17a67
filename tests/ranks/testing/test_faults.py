"""The fault tool on a few faults; the whole list is `tests/prove`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.testing.faults import Fault, FaultError, Trials, patched
from tests.prove.faults import FAULTS

FEW = ("a missing sum", "written while it travels", "shards in mirrored order")


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials() as opened:
        yield opened


@pytest.mark.timeout(170)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in FEW], ids=lambda fault: fault.name)
def test_a_fault_is_noticed_and_named(trials: Trials, fault: Fault) -> None:
    trial = trials.of(fault, timeout=150)
    assert trial.caught
    assert not trial.error
    assert fault.program in trial.program
    assert bool(trial.ledger) or not fault.ledger
    assert fault.first is None or trial.first == fault.first, trial.told
    assert fault.cause is None or trial.cause == fault.cause, trial.told


def test_a_trial_that_hangs_is_ended_and_says_so(trials: Trials) -> None:
    begins = "from __future__ import annotations\n"
    endless = Fault("endless", "plan/program.py", begins, f"{begins}while True:\n    pass\n", {"mesh": {"dp": 1}})
    assert trials.of(endless, timeout=5).error == "did not end within 5 s"
    broken = Fault("broken", "plan/program.py", begins, f"{begins}1 +\n", {"mesh": {"dp": 1}})
    assert "SyntaxError" in trials.of(broken, timeout=60).error


def test_a_text_that_is_not_there_is_refused() -> None:
    with pytest.raises(FaultError, match="0 times, wanted once"):
        patched(Fault("nowhere", "parallel/executor.py", "no such text", ""))
