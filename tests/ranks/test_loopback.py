"""Predicted bytes on the wire are the bytes that TCP carried over loopback, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.plan.folds.ledger import ledger
from meshwright.plan.folds.traffic import Operation
from tests.ranks.loopback import CASES, PACKET, PREAMBLE, PREAMBLES, messages, plan_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counted() -> dict[str, list[dict[str, Any]]]:
    """By case and rank, from a process that has a network of its own."""
    program = "from tests.ranks.loopback import main; main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] | None = json.loads(done.stdout.splitlines()[-1])
    if found is None:
        pytest.skip("a network namespace needs root on Linux")
    return found


@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
@pytest.mark.parametrize("name", CASES)
def test_wire_bytes_are_what_loopback_carried(counted: dict[str, list[dict[str, Any]]], name: str) -> None:
    zero, shares_memory = CASES[name]
    for rank, seen in enumerate(counted[name]):
        rows = [
            row
            for row in ledger(plan_of(zero), rank)
            if not (shares_memory and row.operation is Operation.ALL_GATHER)  # what is read passes no network
        ]
        predicted = sum(row.wire_bytes for row in rows)
        preambles = PREAMBLES * sum(map(messages, rows))
        assert seen["received"] == predicted + PREAMBLE * preambles
        assert predicted > 0.98 * seen["received"], "hardly anything but payload"


@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
@pytest.mark.parametrize("name", CASES)
def test_the_interface_counted_nothing_else(counted: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Its bytes without headers lie between what arrived and what was sent, retransmissions and options included."""
    ranks = counted[name]
    packets = ranks[0]["packets"]
    payload = ranks[0]["interface"] - PACKET * packets
    received, sent = (sum(seen[key] for seen in ranks) for key in ("received", "sent"))
    assert received <= payload <= sent + 12 * packets
