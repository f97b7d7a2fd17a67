"""Attention block by block is attention: outputs merged, gradients added up, whatever the blocks see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.parallel import context_kernels
from meshwright.parallel.context_kernels import attend_block, block_gradients, merge_

QUERIES, HEADS, WIDTH = 6, 4, 8


def inputs(keys: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(keys)
    shapes = (2, QUERIES, HEADS, WIDTH), (2, keys, kv_heads, WIDTH), (2, keys, kv_heads, WIDTH)
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)


def mask_of(keys: int) -> Tensor:
    """(2, 1, Q, Z): own tokens are the first Q keys, of which each query sees itself; some see nothing of the rest."""
    seen = torch.rand(2, 1, QUERIES, keys, generator=torch.Generator().manual_seed(1)) < 0.4
    seen[..., 1:3, QUERIES:] = False
    seen[:, :, range(QUERIES), range(QUERIES)] = True
    return seen


@pytest.fixture(params=["fused", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of CPUs, and of products in runs of two queries: their scores are too many for one."""
    if request.param == "plain":

        def forward(q: Tensor, k: Tensor, v: Tensor, _: float, causal: bool, *, attn_mask: Tensor | None) -> Any:
            return context_kernels._plain(q, k, v, None if attn_mask is None else attn_mask == 0, causal)

        def backward(*given: Any, attn_mask: Tensor | None) -> Any:
            *tensors, _, causal = given
            return context_kernels._plain_gradients(*tensors, None if attn_mask is None else attn_mask == 0, causal)

        monkeypatch.setattr(context_kernels, "_cpu", forward)
        monkeypatch.setattr(context_kernels, "_cpu_backward", backward)
        monkeypatch.setattr(context_kernels, "_CHUNK_ELEMENTS", 2 * 2 * HEADS * QUERIES)
    return str(request.param)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_add_up_to_the_whole(kernels: str, kv_heads: int, masked: bool) -> None:
    """Queries see some of their own keys and of three more blocks; a query may see nothing of one of these."""
    keys = 4 * QUERIES
    q, k, v = (each.requires_grad_() for each in inputs(keys, kv_heads))
    mask = mask_of(keys) if masked else None
    whole = expected(q, k, v, mask)
    g = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2), dtype=whole.dtype)
    wanted = torch.autograd.grad(whole, (q, k, v), g)

    q, k, v = (each.detach() for each in (q, k, v))
    spans = [slice(low, low + QUERIES) for low in range(0, keys, QUERIES)]
    parts = [(k[:, span], v[:, span], None if mask is None else mask[..., span], False) for span in spans]
    (out, log_sum), *others = (attend_block(q, *part) for part in parts)
    out = out.contiguous()
    for each in others:
        merge_(out, log_sum, *each)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    found = [block_gradients(g, q, one, two, out, log_sum, *rest) for one, two, *rest in parts]
    torch.testing.assert_close(sum(each[0] for each in found), wanted[0], rtol=0, atol=1e-13)
    for place in (1, 2):
        torch.testing.assert_close(torch.cat([each[place] for each in found], 1), wanted[place], rtol=0, atol=1e-13)


def test_a_query_that_sees_nothing_weighs_nothing(kernels: str) -> None:
    q, k, v = inputs(QUERIES, 2)
    mask = torch.ones(2, 1, QUERIES, QUERIES, dtype=torch.bool)
    mask[:, :, 2] = False
    out, log_sum = attend_block(q, k, v, mask, False)
    assert bool((log_sum[:, :, 2] == -math.inf).all())
    assert bool(out.isfinite().all())
    of_all = attend_block(q, k, v, None, True)
    merged, sums = of_all[0].contiguous(), of_all[1].clone()
    merge_(merged, sums, out, log_sum)
    assert torch.equal(merged[:, 2], of_all[0][:, 2])
    gradients = block_gradients(torch.ones_like(q), q, k, v, merged, sums, mask, False)
    assert all(bool(each.isfinite().all()) for each in gradients)
    assert not gradients[0][:, 2].any()


def test_own_blocks_are_causal(kernels: str) -> None:
    q, k, v = inputs(QUERIES, 2)
    triangle = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()[None, None]
    causal, masked = attend_block(q, k, v, None, True), attend_block(q, k, v, triangle, False)
    for one, other in zip(causal, masked, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    one, other = block_gradients(q, q, k, v, *causal, None, True), block_gradients(q, q, k, v, *causal, triangle, False)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_stay_near(kernels: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(QUERIES, 2, dtype)
    near = {"rtol": 0, "atol": 30 * torch.finfo(dtype).eps}
    whole = expected(*(each.double() for each in (q, k, v)), None)
    out, log_sum = attend_block(q, k, v, None, False)
    assert (out.dtype, log_sum.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), whole, **near)
    assert {each.dtype for each in block_gradients(q, q, k, v, out, log_sum, None, False)} == {dtype}
