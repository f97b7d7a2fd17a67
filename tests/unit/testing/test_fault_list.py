"""The list of faults stands on the source as it is: a text that has moved on is told at once, not by a proof."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
from meshwright.testing.faults import Fault
from tests.prove.faults import FAULTS

SOURCE = Path(meshwright.__file__).parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_changes_stands_once_in_its_file(fault: Fault) -> None:
    assert (SOURCE / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old


def test_names_of_faults_are_different() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
