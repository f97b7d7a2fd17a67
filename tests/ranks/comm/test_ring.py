"""Gathers and scatters round a ring: the bits of the plain ones, one call in the ledger, each hop under a product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from meshwright.comm import operations, ring
from meshwright.comm.mesh import Mesh
from meshwright.comm.registry import registered
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.plan.folds.ledger import Row
from meshwright.plan.operation import Operation
from meshwright.testing.exact import check_equal, numbered, whole
from meshwright.testing.ranks import run_cases

INNER, OUTER = 5, 4


@dataclass(frozen=True)
class Case:
    """Chunks of `size` tokens: of one, and of numbers that nothing divides."""

    size: int
    round: bool = True

    @property
    def name(self) -> str:
        return f"chunks of {self.size}, {'round a ring' if self.round else 'at once'}"


CASES = [Case(1), Case(7), Case(7, round=False)]


def multiplied(rank: int, case: Case, world: int) -> None:
    """A gathered product and a scattered one, of small whole numbers: sums are exact in any order."""
    mesh = Mesh(tp=world).start()
    name, tokens = f"{case.name} of {world}", world * case.size
    with registered({name: replace(mesh.communicator(GroupName.TP), ring=case.round)}):
        x = numbered(tokens, INNER, dtype=torch.float64)
        weights = [whole(INNER, OUTER, seed=r, dtype=torch.float64) for r in range(world)]
        check_equal(gathered_product(x.chunk(world)[rank], weights[rank], name), x @ weights[rank], "gathered")
        mesh.ledger.phase = Phase.BACKWARD

        def product(low: int, high: int) -> Tensor:
            return x[low:high] @ weights[rank]

        own = ring.begin_leaving(product, tokens, name, True)()
        check_equal(own, sum(x @ weight for weight in weights).chunk(world)[rank].contiguous(), "scattered")  # type: ignore[union-attr]
    of_x, of_y = tokens * INNER * 8, tokens * OUTER * 8
    assert mesh.ledger.rows == (
        row(world, Operation.ALL_GATHER, Phase.FORWARD, of_x),
        row(world, Operation.REDUCE_SCATTER, Phase.BACKWARD, of_y),
    )
    mesh.close()


def row(world: int, operation: Operation, phase: Phase, payload: int) -> Row:
    sent = payload // world * (world - 1)
    return Row(GroupName.TP, world, operation, phase, 1, payload, sent, sent)


def gathered_product(x: Tensor, weight: Tensor, group: str) -> Tensor:
    whole, spans = ring.entering(x, group, True)
    parts = {low: whole[low:high] @ weight for low, high in spans}
    return torch.cat([parts[low] for low in sorted(parts)])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_products_of_gathered_and_scattered_tensors(world: int) -> None:
    run_cases(multiplied, world, CASES, world)


def order(rank: int, case: Case, world: int) -> list[str]:
    """What happens in which order on a rank: hops launched and ended, and which chunk is multiplied between."""
    mesh, told = Mesh(tp=world).start(), []
    launch, finish = operations.hop, ring.finish

    def hop(*arguments: Tensor) -> operations.Handle:
        told.append("send")
        return launch(*arguments)  # type: ignore[arg-type]

    def end(*arguments: object) -> None:
        told.append("wait")
        finish(*arguments)  # type: ignore[arg-type]

    operations.hop, ring.finish = hop, end  # type: ignore[assignment]
    with registered({"ring": replace(mesh.communicator(GroupName.TP), ring=True)}):
        _, spans = ring.entering(torch.zeros(1, 1), "ring", True)
        told.extend(f"x{low}" for low, _ in spans)

        def product(low: int, high: int) -> Tensor:
            told.append(f"y{low}")
            return torch.zeros(high - low, 1)

        wait = ring.begin_leaving(product, world, "ring", True)
        told.append("begun")
        wait()
    operations.hop, ring.finish = launch, finish
    mesh.close()
    return told


def test_every_hop_travels_under_a_product() -> None:
    gathers = ["send", "x0", "wait", "send", "x2", "wait", "x1"], ["send", "x1", "wait", "send", "x0", "wait", "x2"]
    leaves = ["y2", "send", "y1", "wait", "send", "y0", "begun", "wait"]
    (first,), (second,), _ = run_cases(order, 3, [Case(1)], 3)
    assert first == [*gathers[0], *leaves]
    assert second[:7] == gathers[1]
