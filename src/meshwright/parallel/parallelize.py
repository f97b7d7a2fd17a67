"""A plain decoder made parallel, from the outside and in place.

    mesh = mw.Mesh.of(plan).start()
    model = build_decoder(plan.arch, device="cpu")      # equal on every rank: trained, loaded, or of your own making
    model = mw.parallelize(model, plan, mesh)           # the same object, now this rank's part of it
    result = model.engine.step(batch, learning_rate)    # batch: this rank's share
    model.engine.evaluate(batch)

Nothing in the model knows of it: weights are cut by the plan's ownership into flat memory, and forwards are replaced by
module, as `parallel.tensor` says. The loop, its data and its learning rate stay the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.arch.tensors import Tensor as LogicalTensor
from meshwright.comm.gather import gather_integers
from meshwright.comm.mesh import Mesh
from meshwright.layout.rectangles import Rectangle
from meshwright.model.decoder import Decoder
from meshwright.parallel.engine import Engine
from meshwright.parallel.store import Values
from meshwright.plan.plan import Plan

__all__ = ["Parallel", "parallelize"]

_PRIME = (1 << 61) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parallel(Decoder):
    """A decoder that `parallelize` changed: `engine` trains and evaluates it."""

    engine: Engine


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> Parallel:
    """Turn `model` into this rank's part of `plan` on a started `mesh`, in place. Collective; returns `model`.

    Its weights become the start values, in the plan's precision; on the "meta" device it has none, and the plan's own
    are taken. Of units that other stages hold nothing is left.

    Args:
        model: a `Decoder` of `plan.arch`, equal on every rank.

    Raises:
        TypeError: another kind of module (`data_parallel` takes any).
        ValueError: another architecture, a mesh that is not the plan's, models that differ between ranks, a second
            application.
    """
    if isinstance(model, Parallel):
        raise ValueError("parallelize has been applied to this model already")
    if not isinstance(model, Decoder):
        raise TypeError(
            f"a {type(model).__name__} has no sharding table: build_decoder(plan.arch) has one; "
            "data_parallel takes any module"
        )
    if model.arch != plan.arch:
        raise ValueError("the model is not built from plan.arch: build_decoder(plan.arch)")
    weights = {name: each.detach() for name, each in model.named_parameters() if not each.is_meta}
    _check_equal(weights, mesh)
    device = next((each.device for each in weights.values()), torch.device("cpu"))
    engine = Engine(plan, mesh, device, model=model, start_values=not weights)
    for store in engine.stores if weights else ():
        store.fill(_copy_from(weights))
    _forget_other_stages(model, engine)
    model.register_forward_pre_hook(_refuse_forward)
    model.__class__ = Parallel  # what it can do now, without a second object that holds the first
    parallel = cast(Parallel, model)
    parallel.engine = engine
    return parallel


def _copy_from(weights: Mapping[str, Tensor]) -> Values:
    def copy(out: Tensor, tensor: LogicalTensor, box: Rectangle) -> None:
        here = tuple(slice(*edges) for edges in zip(box.start, box.stop, strict=True))
        out.view(box.extent).copy_(weights[tensor.name][here])

    return copy


def _check_equal(weights: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Replicas would train different models, and pieces of different models make none. Collective."""
    total = 0
    for number, values in enumerate(weights.values(), 1):
        bits = values.contiguous().view(_BITS[values.element_size()])
        total = (total + number * int(bits.sum(dtype=torch.int64))) % _PRIME
    totals = gather_integers(mesh, [total])
    for rank, its in enumerate(totals):
        if its != totals[0]:
            raise ValueError(f"the model of rank {rank} differs from that of rank 0: seed or load them alike")


def _forget_other_stages(model: Decoder, engine: Engine) -> None:
    held = {id(parameter) for store in engine.stores for parameter in store.parameters.values()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in held:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="meta")))


def _refuse_forward(model: nn.Module, _: object) -> None:
    raise RuntimeError(
        "this model is a part of a parallel one, and no rank can run it alone: "
        "model.engine.step(batch, learning_rate) trains it, model.engine.evaluate(batch) measures it"
    )
