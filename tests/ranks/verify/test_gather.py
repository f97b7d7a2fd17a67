"""Any logical tensor is gathered whole from any layout, by one list of moves and one executor."""

from dataclasses import dataclass, replace

import pytest
import torch

from meshwright.arch.parameters import tensors
from meshwright.checkpoint.held import gradients, optimizer_states, parameters
from meshwright.comm.exchange import exchange
from meshwright.comm.mesh import Mesh
from meshwright.comm.views import Held
from meshwright.layout.moves import Piece, moves
from meshwright.layout.rectangles import full
from meshwright.model import build_decoder, initialise
from meshwright.parallel.engine import Engine
from meshwright.plan.action import Action, Op
from meshwright.plan.pieces import PiecesOf, layout_of, parameter_pieces, state_pieces
from meshwright.plan.plan import Plan
from meshwright.testing.ranks import run_cases
from meshwright.verify.batches import global_batches, local_share
from meshwright.verify.settings import DOUBLE
from tests.unit.plan.plans import make_plan


@dataclass(frozen=True)
class Case:
    name: str
    plan: Plan


def _case(zero: int, **degrees: int) -> Case:
    plan = replace(make_plan(zero=zero, micro=1, accumulation=12 // degrees.get("dp", 1), **degrees), precision=DOUBLE)
    return Case(f"zero {zero} on {degrees}", plan)


CASES = [_case(0, dp=4), _case(1, dp=4), _case(3, dp=4), _case(2, dp=2, tp=2), _case(3, dp=2, pp=2)]
TARGET = 2  # any rank will do


def _gathered(plan: Plan, rank: int, of: PiecesOf, held: Held) -> dict[str, torch.Tensor]:
    """Every logical tensor whole on rank `TARGET`; nothing on the others."""
    wanted = {Piece(tensor.name, full(tensor.shape)) for tensor in tensors(plan.arch)} if rank == TARGET else set()
    whole = {piece: torch.full(piece.rectangle.extent, torch.nan, dtype=torch.float64) for piece in wanted}
    target = {TARGET: [Piece(tensor.name, full(tensor.shape)) for tensor in tensors(plan.arch)]}
    exchange(moves(layout_of(plan, of), target), rank, held, whole, round_elements=5000)
    return {piece.tensor: view for piece, view in whole.items()}


def _run(rank: int, case: Case) -> dict[str, dict[str, torch.Tensor]]:
    plan = case.plan
    engine = Engine(plan, Mesh.of(plan).start())
    found = {"start": _gathered(plan, rank, parameter_pieces, parameters(engine))}

    def look(action: Action) -> None:
        if action.op is Op.UPDATE and "gradient" not in found:
            found["gradient"] = _gathered(plan, rank, state_pieces, gradients(engine))

    engine.observe(look)
    engine.step(local_share(plan, global_batches(plan, 1)[0], rank), 1e-3)
    found["moment"] = _gathered(plan, rank, state_pieces, optimizer_states(engine)["exp_avg"])
    return found


@pytest.mark.timeout(90)
def test_weights_gradients_and_moments_come_whole_from_every_layout() -> None:
    results = run_cases(_run, 4, CASES, timeout=80)
    arch = CASES[0].plan.arch
    model = build_decoder(arch, dtype=torch.float64, device="cpu")
    initialise(model, arch, CASES[0].plan.seed)
    first = results[TARGET][0]
    for number, case in enumerate(CASES):
        found = results[TARGET][number]
        for name, parameter in model.named_parameters():
            assert torch.equal(found["start"][name], parameter), f"{case.name}: {name}"
            for kind in ("gradient", "moment"):
                difference = (found[kind][name] - first[kind][name]).abs().max()
                assert difference <= 1e-13 * first[kind][name].abs().max(), f"{case.name}: {kind} of {name}"
        assert not any(results[rank][number]["start"] for rank in range(4) if rank != TARGET)
