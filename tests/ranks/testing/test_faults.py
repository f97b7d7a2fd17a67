"""The fault tool on a few faults; the whole list is `tests/prove`."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.testing.faults import Fault, FaultError, apply, try_fault
from tests.prove.faults import FAULTS

FEW = ("a missing sum", "written while it travels", "shards in mirrored order")


@pytest.mark.timeout(170)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in FEW], ids=lambda fault: fault.name)
def test_a_fault_is_noticed_and_named(fault: Fault) -> None:
    trial = try_fault(fault, timeout=150)
    assert trial.caught
    assert fault.program in trial.program
    assert bool(trial.ledger) or not fault.ledger
    assert fault.first is None or trial.first == fault.first, trial.told
    assert fault.cause is None or trial.cause == fault.cause, trial.told


def test_every_text_is_in_its_file_once(tmp_path: Path) -> None:
    """A list that no longer fits the source proves nothing."""
    for number, fault in enumerate(FAULTS):
        apply(fault, tmp_path / str(number))
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="0 times, wanted once"):
        apply(Fault("nowhere", "parallel/executor.py", "no such text", ""), tmp_path)
