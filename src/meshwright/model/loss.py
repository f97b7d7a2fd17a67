"""The training loss, and the only division by the number of trained tokens.

B  sequences      S  tokens of each      N = B*S      V  vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IGNORED = -100
"""Label of a token that is not trained: padding, a prompt."""


def token_losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Logits (N, V) of any dtype, labels (N,) -> (N,) cross entropies, at least float32; 0 where ignored."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="none")


def loss(logits_NV: Tensor, labels_BS: Tensor, count: Tensor) -> Tensor:
    """The share of this micro-batch in the mean loss of the global batch: (), sum of token losses / `count`.

    `count` () is the number of trained tokens of the *global* batch, so shares add up over micro-batches and ranks.
    A batch without a trained token has count 0, loss 0 and gradient 0.
    """
    return share(token_losses(logits_NV, labels_BS.flatten()).sum(), count)


def share(total: Tensor, count: Tensor) -> Tensor:
    """() sum of token losses -> () its share in the mean over `count` tokens."""
    return total / count.to(total.dtype).clamp(min=1)


def projected_loss(x_ND: Tensor, weight_VD: Tensor, labels_BS: Tensor, count: Tensor) -> Tensor:
    """The loss of the logits that `weight_VD` projects x to: (); see `loss`."""
    return loss(nn.functional.linear(x_ND, weight_VD), labels_BS, count)
