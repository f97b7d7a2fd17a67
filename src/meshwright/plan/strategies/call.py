"""What a strategy declares of one unit's run: a collective inside it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.groups import GroupName
from meshwright.plan.operation import Operation


@dataclass(frozen=True, slots=True)
class Call:
    """One collective over `group`; `payload_bytes` as in the ledger.

    `leaving_bytes`: what of it goes to others, where runs for them are not alike.
    """

    group: GroupName
    operation: Operation
    payload_bytes: int
    leaving_bytes: int | None = None
