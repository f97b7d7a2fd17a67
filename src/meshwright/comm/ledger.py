"""What was really sent, counted where a collective is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.plan.folds.ledger import Row, tally
from meshwright.plan.folds.traffic import Transfer, Transport


@dataclass(slots=True)
class Ledger:
    """The transfers of one rank since the last `clear`, in the order of their first call.

    `phase` is what the executor is doing: collectives inside a unit are counted under it. `waited`: seconds that this
    rank has waited inside units for each group, since it began.
    """

    transport: Transport
    phase: Phase = Phase.FORWARD
    waited: dict[GroupName, float] = field(default_factory=dict)
    _calls: dict[Transfer, int] = field(default_factory=dict)

    def record(self, transfer: Transfer) -> None:
        """Count one call."""
        self._calls[transfer] = self._calls.get(transfer, 0) + 1

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row a (group, operation, phase): the same sum as the prediction's, over what was seen."""
        return tally(self._seen(), self.transport)

    def clear(self) -> None:
        self._calls.clear()

    def _seen(self) -> Iterator[Transfer]:
        for transfer, calls in self._calls.items():
            yield from (transfer for _ in range(calls))
