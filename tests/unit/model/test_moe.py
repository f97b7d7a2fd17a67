"""Routed feed-forwards beside the plainest reading of the papers: token by token, choice by choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.arch.arch import Arch, Experts
from meshwright.config import choices
from meshwright.model.balance import BIAS_RATE, Balancing, move_bias
from meshwright.model.cache import cached
from meshwright.model.moe import RoutedMLP
from meshwright.model.routers import move_biases, prepare_routers, routers_of
from meshwright.model.rows import Rows
from meshwright.plan.plan import Moe
from tests.unit.model.tiny import LLAMA, decoder_of, logits_of, rows_of, tokens_of
from tests.unit.plan.plans import make_plan

EXPERTS = Experts(6, 2, 24)
ARCHS = {
    "mixtral": replace(LLAMA, family="mixtral", experts=EXPERTS),
    "not normalised": replace(LLAMA, family="qwen3_moe", experts=replace(EXPERTS, active=3, normalise=False)),
    "one choice": replace(LLAMA, family="mixtral", experts=replace(EXPERTS, active=1, normalise=False)),
    "shared experts": replace(LLAMA, family="qwen3_moe", experts=replace(EXPERTS, shared=2)),
    "not gated": replace(LLAMA, family="mixtral", gated=False, experts=EXPERTS),
}
MIXTRAL = ARCHS["mixtral"]


def routed(arch: Arch, dtype: torch.dtype = torch.float64) -> RoutedMLP:
    mlp = decoder_of(arch, dtype).layers[1].mlp  # type: ignore[union-attr]
    assert isinstance(mlp, RoutedMLP)
    with torch.no_grad():
        mlp.router.weight.mul_(3)  # loads that differ, and scores that are no near ties
    return mlp


def stream(batch: int = 3, length: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch * length, LLAMA.hidden, generator=torch.Generator().manual_seed(1), dtype=dtype)


def padded(rows: Rows) -> Rows:
    """The second sequence ends after five tokens."""
    valid = torch.ones(rows.offsets.shape, dtype=torch.bool)
    valid[1, 5:] = False
    return replace(rows, valid=valid)


def plain_output(mlp: RoutedMLP, x_ND: Tensor, rows: Rows) -> tuple[Tensor, list[tuple[int, int]]]:
    """-> output (N, D), and (token, expert) of every choice."""
    out, choices_made = [], []
    for token, x in enumerate(x_ND):
        y = torch.zeros_like(x)
        if rows.valid is None or bool(rows.valid.flatten()[token]):
            scores = torch.softmax(mlp.router.weight @ x, 0)
            biased = scores.detach() if mlp.router.bias is None else scores.detach() + mlp.router.bias
            ranked = biased.argsort(descending=True)[: mlp.router.active].tolist()
            total = sum(scores[e] for e in ranked) if mlp.router.normalise else 1.0
            for e in ranked:
                y = y + scores[e] / total * plain_expert(mlp, x, e)
                choices_made.append((token, e))
        out.append(y if mlp.shared is None else y + mlp.shared(x[None])[0])
    return torch.stack(out), choices_made


def plain_expert(mlp: RoutedMLP, x: Tensor, e: int) -> Tensor:
    up = mlp.experts.up[e] @ x
    wide = mlp.experts.activation(up if mlp.experts.gate is None else mlp.experts.gate[e] @ x)
    return mlp.experts.down[e] @ (wide if mlp.experts.gate is None else wide * up)


def gradients(mlp: RoutedMLP, x: Tensor, loss: Tensor) -> list[Tensor]:
    parameters = [x, *mlp.parameters()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("pad", [False, True])
def test_output_and_gradients_are_those_of_token_by_token(name: str, pad: bool) -> None:
    mlp, x = routed(ARCHS[name]), stream().requires_grad_()
    rows = padded(rows_of(LLAMA, 3, 8)) if pad else rows_of(LLAMA, 3, 8)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    ours = mlp(x, rows)
    theirs, chosen = plain_output(mlp, x, rows)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    counts = torch.tensor([sum(e == expert for _, e in chosen) for expert in range(EXPERTS.count)])
    assert torch.equal(mlp.router.counts, counts)
    assert counts.sum() == (21 if pad else 24) * mlp.router.active
    both = [gradients(mlp, x, (out * cotangent).sum()) for out in (ours, theirs)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_an_expert_without_tokens_has_a_gradient_of_exactly_zero() -> None:
    mlp, x = routed(MIXTRAL), stream()
    mlp.router.bias = torch.tensor([0.0, 0.0, -9.0, 0.0, 0.0, 0.0])  # B50
    mlp(x, rows_of(LLAMA, 3, 8)).square().sum().backward()
    assert mlp.router.counts is not None
    assert mlp.router.counts[2] == 0
    for weight in (mlp.experts.gate, mlp.experts.up, mlp.experts.down):
        assert weight is not None
        assert weight.grad is not None
        assert not weight.grad[2].any()
        assert weight.grad[1].any()


def plain_terms(mlp: RoutedMLP, x_ND: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Sums over sequences, by the formulas in words."""
    _, chosen = plain_output(mlp, x_ND, rows)
    logits_NE = x_ND @ mlp.router.weight.t()
    scores_NE = logits_NE.softmax(-1)
    sequences, length = rows.offsets.shape
    auxiliary, z = torch.zeros((), dtype=x_ND.dtype), torch.zeros((), dtype=x_ND.dtype)
    for sequence in range(sequences):
        tokens = [t for t in range(sequence * length, (sequence + 1) * length) if any(t == c for c, _ in chosen)]
        for expert in range(mlp.router.count):
            share = sum(t in tokens and e == expert for t, e in chosen) / (mlp.router.active * len(tokens))
            auxiliary = auxiliary + mlp.router.count * share * scores_NE[tokens, expert].mean()
        z = z + logits_NE[tokens].exp().sum(-1).log().square().mean()
    return auxiliary, z


@pytest.mark.parametrize("pad", [False, True])
def test_terms_reach_gradients_as_if_they_were_added_to_the_loss(pad: bool) -> None:
    mlp, x = routed(MIXTRAL), stream().requires_grad_()
    rows = padded(rows_of(LLAMA, 3, 8)) if pad else rows_of(LLAMA, 3, 8)
    auxiliary, z = plain_terms(mlp, x, rows)
    theirs = gradients(mlp, x, mlp(x, rows).square().sum() + (0.3 * auxiliary + 0.02 * z) / 12)
    mlp.router.balance = Balancing(auxiliary=0.3, z=0.02, sequences=12)
    ours = gradients(mlp, x, mlp(x, rows).square().sum())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_terms_do_not_depend_on_the_cut_into_micro_batches() -> None:
    """B44: what the terms alone give the router, of three sequences at once or one by one."""
    mlp, x = routed(MIXTRAL), stream()
    mlp.router.balance = Balancing(auxiliary=0.3, z=0.02, sequences=3)

    def of_terms(first: int, last: int) -> Tensor:
        part = x[8 * first : 8 * last]
        (gradient,) = torch.autograd.grad(0 * mlp(part, rows_of(LLAMA, last - first, 8)).sum(), mlp.router.weight)
        return gradient

    whole = of_terms(0, 3)
    assert whole.abs().max() > 1e-5
    torch.testing.assert_close(sum(of_terms(n, n + 1) for n in range(3)), whole, rtol=1e-12, atol=1e-16)


def test_the_auxiliary_term_is_one_at_even_load() -> None:
    mlp = routed(MIXTRAL)
    with torch.no_grad():
        mlp.router.weight.zero_()
    auxiliary, z = plain_terms(mlp, stream(), rows_of(LLAMA, 3, 8))
    torch.testing.assert_close(auxiliary, torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(z / 3, torch.tensor(6.0, dtype=torch.float64).log().square())


def test_a_bias_moves_choices_and_never_weights() -> None:
    mlp, x, rows = routed(MIXTRAL), stream(), rows_of(LLAMA, 3, 8)
    mlp.router.bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    chosen, weights, _ = mlp.router(x, rows)
    assert bool((chosen == 1).any(1).all())
    scores = (x @ mlp.router.weight.t()).softmax(-1).gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))
    assert not mlp.router.bias.requires_grad
    assert "router.bias" not in dict(mlp.named_parameters())


def test_a_step_moves_biases_by_the_sign_of_what_is_missing() -> None:
    bias = torch.tensor([0.0, 0.5, 0.0, 0.0])
    move_bias(bias, torch.tensor([4, 0, 2, 2]))
    assert torch.equal(bias, torch.tensor([-BIAS_RATE, 0.5 + BIAS_RATE, 0.0, 0.0]))


def test_biases_even_the_loads_out() -> None:
    """Loads of a fixed stream come nearer to their mean, whatever the router says."""
    plan = replace(make_plan(), arch=MIXTRAL, moe=Moe(choices.Balance.BIAS))
    decoder = decoder_of(MIXTRAL)
    units = dict(enumerate(decoder.units))
    biases, routers = prepare_routers(plan, units), routers_of(units)
    assert list(biases) == [f"layers.{layer}.mlp.router.bias" for layer in (0, 1)]
    spread = []
    for _ in range(150):
        logits_of(decoder, tokens_of(MIXTRAL, 4, 32), rows_of(MIXTRAL, 4, 32))
        counts = routers[1].counts
        assert counts is not None
        assert counts.sum() == 4 * 32 * 2
        spread.append(float(counts.double().std()))
        move_biases(routers)
    assert spread[-1] < 0.5 * spread[0]


def test_routers_compute_in_float32_at_least() -> None:
    mlp = routed(MIXTRAL, torch.bfloat16)
    x = stream(dtype=torch.bfloat16)
    _, weights, of = mlp.router(x, rows_of(LLAMA, 3, 8, dtype=torch.bfloat16))
    assert of.logits.dtype == weights.dtype == torch.float32
    assert mlp(x, rows_of(LLAMA, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    exact = x.double() @ mlp.router.weight.double().t()
    assert (of.logits - exact).abs().max() < 1e-5


@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 8]])
def test_a_text_read_piece_by_piece_has_the_logits_of_the_whole(pieces: list[int]) -> None:
    arch = replace(ARCHS["shared experts"], experts=replace(EXPERTS, shared=1, dense_layers=1))
    decoder, tokens = decoder_of(arch).eval(), tokens_of(arch, 1, 16)
    whole = logits_of(decoder, tokens, rows_of(arch, 1, 16))[0]
    with cached(decoder, 20) as cache:
        for size in pieces:
            logits = cache.extend(tokens[0, cache.length : cache.length + size].tolist())
            torch.testing.assert_close(logits, whole[cache.length - 1], rtol=1e-12, atol=1e-12)
