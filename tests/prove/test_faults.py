"""Every fault of the list is noticed, and the ladder names the right tensor."""

from __future__ import annotations

import pytest

from meshwright.testing.faults import Fault, Trial, try_fault
from tests.prove.faults import FAULTS


@pytest.fixture(scope="module")
def trials() -> dict[str, Trial]:
    return {}


@pytest.mark.prove
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(trials: dict[str, Trial], fault: Fault) -> None:
    trial = trials[fault.name] = try_fault(fault, timeout=360)
    assert trial.caught
    assert fault.program in trial.program
    assert bool(trial.ledger) or not fault.ledger
    assert fault.cause is None or trial.cause == fault.cause, trial.told


@pytest.mark.prove
def test_nine_of_ten_are_named_right(trials: dict[str, Trial]) -> None:
    wanted = [fault for fault in FAULTS if fault.first is not None and fault.name in trials]
    wrong = {fault.name: trials[fault.name].told for fault in wanted if trials[fault.name].first != fault.first}
    assert wanted, "run with the faults, not alone"
    assert len(wrong) <= len(wanted) / 10, wrong


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_nothing_is_noticed_without_a_fault() -> None:
    tried = {str(fault.run): fault.run for fault in FAULTS}
    noticed = {name: trial for name, run in tried.items() if (trial := try_fault(None, run)).caught}
    assert not noticed
