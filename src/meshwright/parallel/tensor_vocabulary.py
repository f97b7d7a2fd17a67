"""A vocabulary cut by the tensor axis: look-up, and cross entropy without whole logits.

    N  tokens of the tensor group      D  hidden      V  tokens of the vocabulary held here, without padding

Loss of a token over a cut vocabulary, from three numbers of each rank r (largest logit m_r, s_r = Σ exp(l - m_r), and
the label's logit where the label is here), gathered in one collective of 3 N numbers a rank:

    m = max m_r      s = Σ s_r exp(m_r - m)      loss = log s + m - l_label      p = exp(l - m_r) · exp(m_r - m) / s

Logits are made, read and turned into exp(l - m_r) in chunks of tokens, in place: what is kept for backward is (N, V)
in the compute dtype; whatever is more precise lives for one chunk. Products read the rows that stand for tokens alone,
so what the padding of an uneven cut holds cannot matter.

The custom operation serves compiled graphs; `tensor_direct` is the eager form of the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.arch.passing import LOSS_CHUNK_ELEMENTS
from meshwright.comm.conjugate import scattered, scattered_beside, summed
from meshwright.comm.custom import gathered, size_of
from meshwright.comm.ring import begin_leaving, entering
from meshwright.model.loss import IGNORED, share
from meshwright.parallel.runs import token_runs

__all__ = ["begin_loss_input_gradient", "loss_forward", "loss_gradient_", "vocabulary_look_up", "vocabulary_loss"]


def vocabulary_look_up(
    tokens_BS: Tensor, positions_BS: Tensor, weight: Tensor, table: Tensor | None, held: tuple[int, int], group: str,
    sequence: bool,
) -> Tensor:  # fmt: skip
    """Rows of a table of which this rank holds tokens held[0] .. held[0] + held[1] - 1: (B, S) -> (N, D) or (N/T, D).

    f* or g*: tokens of other ranks give zeros, and all are summed (all-reduce, reduce-scatter); identity or all-gather
    backward. `table` (P, D), whole, are learned positions.
    """
    local_N = tokens_BS.flatten() - held[0]
    elsewhere_N = (local_N < 0) | (local_N >= held[1])
    part_ND = nn.functional.embedding(local_N.masked_fill(elsewhere_N, 0), weight)
    part_ND = part_ND.masked_fill(elsewhere_N[:, None], 0)
    if table is None:
        return scattered(part_ND, group) if sequence else summed(part_ND, group)
    beside_ND = nn.functional.embedding(positions_BS.flatten(), table)
    return scattered_beside(part_ND, beside_ND, group) if sequence else summed(part_ND, group) + beside_ND


def vocabulary_loss(
    x_ND: Tensor, weight: Tensor, labels_BS: Tensor, count: Tensor, held: tuple[int, int], group: str, sequence: bool
) -> Tensor:
    """The share of this micro-batch in the mean loss, as `model.loss`, from x (N, D) or (N/T, D): -> ().

    f, or g under `sequence`, and one all-gather of three numbers a token; all-reduce or reduce-scatter backward.
    """
    total, *_ = _loss(x_ND, weight, labels_BS.flatten(), held[0], held[1], group, sequence)
    return share(total, count)


def loss_forward(
    x: Tensor, weight: Tensor, labels: Tensor, held: tuple[int, int], group: str, sequence: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (N, D) or (N/T, D), weight (V with padding, D), labels (N,) -> (sum of losses (), x whole, raised, factor).

    raised is exp(l - m_r), (N, V with padding), zero where padding is; factor is exp(m_r - m) / s, (N,).
    """
    first, size = held
    precise, tokens = torch.promote_types(x.dtype, torch.float32), labels.shape[0]
    x_ND, spans = entering(x, group, sequence)
    raised = x.new_empty(tokens, weight.shape[0])
    raised[:, size:].zero_()
    raised_NV = raised[:, :size]
    statistics = torch.zeros(3, tokens, dtype=precise, device=x.device)
    statistics[0].fill_(-torch.inf)
    here = _labels_here(labels, first, size)
    runs = (run for low, high in spans for run in token_runs(high - low, size, LOSS_CHUNK_ELEMENTS, low))
    for low, high in runs:
        torch.mm(x_ND[low:high], weight[:size].t(), out=raised_NV[low:high])
        _exponentials_(raised_NV[low:high], statistics[:, low:high], here[low:high])
    most_TN, sums_TN, label_TN = gathered(statistics, group).view(-1, 3, tokens).unbind(1)
    most_N = most_TN.amax(0)
    sums_N = (sums_TN * (most_TN - most_N).exp_()).sum(0)
    losses_N = (sums_N.log() + most_N - label_TN.sum(0)).masked_fill_(labels == IGNORED, 0)
    factor_N = (statistics[0] - most_N).exp_().div_(sums_N)
    return losses_N.sum(), x_ND, raised, factor_N


def _exponentials_(logits: Tensor, statistics: Tensor, here: Tensor) -> None:
    """Logits (n, V) become exp(l - m), in place; their statistics (3, n) are filled; `here` (n,) as `_labels_here`."""
    most, sums, of_label = statistics
    precise = logits.to(statistics.dtype)
    torch.amax(precise, 1, out=most)
    picked = precise.gather(1, here.clamp(min=0)[:, None])[:, 0]
    of_label.copy_(picked.masked_fill_(here < 0, 0))
    torch.sum(precise.sub_(most[:, None]).exp_(), 1, out=sums)
    if precise.dtype != logits.dtype:
        logits.copy_(precise)


def begin_loss_input_gradient(
    raised: Tensor, weight: Tensor, size: int, group: str, sequence: bool
) -> Callable[[], Tensor]:
    """The gradient of the logits, (N, V with padding) -> the launched sum of the input's: (N, D) or (N/T, D)."""

    def product(low: int, high: int) -> Tensor:
        return torch.mm(raised[low:high, :size], weight[:size])

    return begin_leaving(product, raised.shape[0], group, sequence)


def loss_gradient_(g: Tensor, labels: Tensor, raised: Tensor, factor: Tensor, held: tuple[int, int]) -> Tensor:
    """What `loss_forward` left -> the gradient of the logits, in the memory of `raised`: g (p - onehot), (N, V)."""
    first, size = held
    here = _labels_here(labels, first, size)
    weight_N = torch.where(labels == IGNORED, 0, g)
    for low, high in token_runs(raised.shape[0], size, LOSS_CHUNK_ELEMENTS):
        chunk = raised[low:high]
        chunk.mul_((factor[low:high] * weight_N[low:high]).to(raised.dtype)[:, None])
        taken = torch.where(here[low:high] < 0, 0, -weight_N[low:high])
        chunk.scatter_add_(1, here[low:high].clamp(min=0)[:, None], taken.to(raised.dtype)[:, None])
    return raised


@torch.library.custom_op("meshwright::vocabulary_loss", mutates_args=())
def _loss(
    x: Tensor, weight: Tensor, labels: Tensor, first: int, size: int, group: str, sequence: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> (sum of token losses (), gathered x or empty, raised, factor)."""
    total, x_ND, raised, factor = loss_forward(x, weight, labels, (first, size), group, sequence)
    return total, x_ND if sequence else x.new_empty(0), raised, factor


@torch.library.custom_op("meshwright::vocabulary_loss_backward", mutates_args={"raised"})
def _loss_backward(
    g: Tensor, x: Tensor, weight: Tensor, labels: Tensor, raised: Tensor, factor: Tensor, first: int, size: int,
    group: str, sequence: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """g (), x (N, D), raised (N, V), which becomes the logits' gradient -> (dx (N, D) or (N/T, D), dW with padding)."""
    loss_gradient_(g, labels, raised, factor, (first, size))
    end = begin_loss_input_gradient(raised, weight, size, group, sequence)
    gradient = torch.mm(raised.t(), x)
    return end(), gradient


def _labels_here(labels_N: Tensor, first: int, size: int) -> Tensor:
    """(N,) index of each label among the tokens held here, -1 where it is not."""
    local_N = labels_N - first
    return local_N.masked_fill((local_N < 0) | (local_N >= size), -1)


@_loss.register_fake
def _(
    x: Tensor, weight: Tensor, labels: Tensor, first: int, size: int, group: str, sequence: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precise, tokens = torch.promote_types(x.dtype, torch.float32), labels.shape[0]
    kept = x.new_empty(tokens, x.shape[1]) if sequence else x.new_empty(0)
    raised = x.new_empty(tokens, weight.shape[0])
    return x.new_empty((), dtype=precise), kept, raised, x.new_empty(tokens, dtype=precise)


@_loss_backward.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, labels: Tensor, raised: Tensor, factor: Tensor, first: int, size: int,
    group: str, sequence: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens = x.shape[0] // (size_of(group) if sequence else 1)
    return x.new_empty(tokens, x.shape[1]), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, labels, *ctx.settings = inputs
    sequence = ctx.settings[-1]
    ctx.save_for_backward(output[1] if sequence else x, weight, labels, output[2], output[3])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, g: Tensor, *_kept: None) -> tuple[Any, ...]:
    x, weight, labels, raised, factor = ctx.saved_tensors
    dx, dw = _loss_backward(g, x, weight, labels, raised, factor, *ctx.settings)
    return dx, dw, None, None, None, None, None


_loss.register_autograd(_gradient, setup_context=_setup)
