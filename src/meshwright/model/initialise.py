"""Start values of the whole model on one process; ranks that own pieces call `counter.fill` on their rectangles."""

from __future__ import annotations

from torch import nn

from meshwright.arch.arch import Arch
from meshwright.arch.parameters import tensors
from meshwright.model.counter import fill


def initialise(decoder: nn.Module, arch: Arch, seed: int) -> None:
    """Fills every parameter from its logical tensor.

    Raises ValueError where the module's parameters are not exactly the logical tensors of `arch`.
    """
    parameters = dict(decoder.named_parameters())
    logical = {tensor.name: tensor for tensor in tensors(arch)}
    if different := parameters.keys() ^ logical.keys():
        raise ValueError(f"parameters and logical tensors differ: {', '.join(sorted(different))}")
    for name, tensor in logical.items():
        start = (0,) * len(tensor.shape)
        fill(parameters[name].data, name, seed, tensor.shape, start, tensor.shape, tensor.init)
