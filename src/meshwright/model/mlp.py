"""The feed-forward, plain or gated (Shazeer 2020, arXiv:2002.05202).

N  tokens      D  hidden      F  width of the feed-forward
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.arch.arch import Activation, Arch
from meshwright.model.products import Products, separate_products
from meshwright.model.rows import Rows


def build_mlp(arch: Arch) -> nn.Module:
    return GatedMLP(arch) if arch.gated else MLP(arch)


def build_activation(activation: Activation) -> nn.Module:
    match activation:
        case Activation.SILU:
            return nn.SiLU()
        case Activation.GELU:
            return nn.GELU()
        case Activation.GELU_TANH:
            return nn.GELU(approximate="tanh")


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.products: Products = separate_products
        self.up = nn.Linear(arch.hidden, arch.ffn, bias=arch.mlp_bias)
        self.activation = build_activation(arch.activation)
        self.down = nn.Linear(arch.ffn, arch.hidden, bias=arch.mlp_bias)

    def forward(self, x_ND: Tensor, rows: Rows | None = None) -> Tensor:
        """(N, D) -> (N, D), whatever the rows."""
        y_ND: Tensor = self.down(self.widened(*self.products(x_ND, self.inward)))
        return y_ND

    @property
    def inward(self) -> tuple[nn.Linear, ...]:
        """The linears that read the stream."""
        return (self.up,)

    def widened(self, up_NF: Tensor) -> Tensor:
        """What lies between the products: (N, F) -> (N, F)."""
        wide_NF: Tensor = self.activation(up_NF)
        return wide_NF


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.products: Products = separate_products
        self.gate = nn.Linear(arch.hidden, arch.ffn, bias=arch.mlp_bias)
        self.up = nn.Linear(arch.hidden, arch.ffn, bias=arch.mlp_bias)
        self.activation = build_activation(arch.activation)
        self.down = nn.Linear(arch.ffn, arch.hidden, bias=arch.mlp_bias)

    def forward(self, x_ND: Tensor, rows: Rows | None = None) -> Tensor:
        """(N, D) -> (N, D), whatever the rows."""
        y_ND: Tensor = self.down(self.widened(*self.products(x_ND, self.inward)))
        return y_ND

    @property
    def inward(self) -> tuple[nn.Linear, ...]:
        """The linears that read the stream."""
        return self.gate, self.up

    def widened(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """What lies between the products: (N, F), (N, F) -> (N, F)."""
        wide_NF: Tensor = self.activation(gate_NF) * up_NF
        return wide_NF
