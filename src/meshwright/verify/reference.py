"""The reference: one float64 process, the plain model, PyTorch's own optimizer and clipping.

No parallel code lies on this path: no mesh, no bucket, no program. The whole global batch is one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.config.choices import OptimizerKind
from meshwright.data.batch import Batch
from meshwright.model import Decoder, build_decoder, initialise, rows_to_torch
from meshwright.model.routers import move_biases, prepare_routers, routers_of
from meshwright.plan.plan import Optimizer, Plan
from meshwright.verify.settings import compared_after
from meshwright.verify.trace import Figures, Kind, Quantity, write_reference

__all__ = ["run_reference"]


def run_reference(plan: Plan, batches: Sequence[Batch], rate: float, folder: Path) -> Figures:
    """Train the plan's model on `batches` at a constant learning rate and write what happened into `folder`."""
    model = build_decoder(plan.arch, dtype=torch.float64, device="cpu")
    initialise(model, plan.arch, plan.seed)
    biases, routers = prepare_routers(plan, units := dict(enumerate(model.units))), routers_of(units)
    optimizer = _optimizer(model, plan.optimizer, rate)
    recorded: dict[Quantity, Tensor] = _weights(model, Kind.START)
    evaluation = _evaluation(model, plan, batches[0])
    losses, norms, counts, terms = [], [], [], []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        borders = _Borders(model) if step == 0 else None
        loss = _loss(model, plan, batch)
        torch.autograd.backward((loss,))
        if borders is not None:
            recorded |= borders.taken(plan, batch) | _gradients(model)
        limit = plan.optimizer.clip_norm or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        move_biases(routers)
        losses.append(float(loss.detach()))
        told = [router.terms for router in routers.values() if router.terms is not None]
        terms.append(tuple(torch.stack(told).sum(0).tolist()) if told else ())
        counts.append(batch.trained_tokens)
        kind = compared_after(len(batches)).get(step + 1)
        if kind is not None:
            recorded |= _weights(model, kind) | {Quantity(kind, name): bias.clone() for name, bias in biases.items()}
    largest = {quantity.key: float(tensor.abs().max()) for quantity, tensor in recorded.items()}
    shapes = {quantity.key: tuple(tensor.shape) for quantity, tensor in recorded.items()}
    figures = Figures(evaluation, tuple(losses), tuple(norms), tuple(counts), largest, shapes, tuple(terms))
    write_reference(folder, recorded, figures)
    return figures


def _loss(model: Decoder, plan: Plan, batch: Batch) -> Tensor:
    rows = rows_to_torch(batch.rows, plan.arch, seed=plan.seed, dtype=torch.float64)
    count = torch.tensor(batch.trained_tokens)
    return model.loss(torch.from_numpy(batch.inputs), rows, torch.from_numpy(batch.labels), count)


@torch.no_grad()
def _evaluation(model: Decoder, plan: Plan, batch: Batch) -> float:
    model.eval()
    loss = float(_loss(model, plan, batch))
    model.train()
    return loss


def _optimizer(model: nn.Module, settings: Optimizer, rate: float) -> torch.optim.Optimizer:
    """PyTorch's own; decay goes to tensors of two or more dimensions."""
    if settings.kind is OptimizerKind.SGD:
        return torch.optim.SGD(model.parameters(), lr=rate)
    decays = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps)


def _gradients(model: nn.Module) -> dict[Quantity, Tensor]:
    return {
        Quantity(Kind.GRADIENT, name): torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _weights(model: nn.Module, kind: Kind) -> dict[Quantity, Tensor]:
    return {Quantity(kind, name): parameter.detach().clone() for name, parameter in model.named_parameters()}


class _Borders:
    """What leaves each unit but the head during one forward pass."""

    def __init__(self, model: Decoder) -> None:
        self._outputs: dict[int, Tensor] = {}
        self._hooks = [unit.register_forward_hook(self._hook(number)) for number, unit in enumerate(model.units[:-1])]

    def _hook(self, number: int) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
        def take(_module: nn.Module, _inputs: tuple[object, ...], output: Tensor) -> None:
            self._outputs[number] = output.detach().clone()

        return take

    def taken(self, plan: Plan, batch: Batch) -> dict[Quantity, Tensor]:
        for hook in self._hooks:
            hook.remove()
        shape = (batch.num_sequences, -1, plan.arch.hidden)
        return {
            Quantity(Kind.ACTIVATION, plan.arch.unit_name(number)): output.view(shape)
            for number, output in self._outputs.items()
        }
