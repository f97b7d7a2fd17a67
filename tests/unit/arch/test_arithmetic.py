"""The arithmetic, against the integers written down for it and against its own tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.arch.arch import Arch, Experts
from meshwright.arch.arithmetic import (
    Convention,
    OperationKind,
    active_matmul_parameters,
    active_parameters,
    flops_per_sequence,
    flops_per_token,
    matmul_parameters,
    operations,
    parameters,
)
from meshwright.arch.catalogue import catalogue, preset
from meshwright.layout.rows import whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch

DENSE = Arch("llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)
MIXTURE = replace(DENSE, family="mixtral", experts=Experts(count=8, active=2, ffn=128))
SEQUENCE = 32


def test_dense_counts_and_flops_to_the_unit() -> None:
    """B83: MFU above 100 % came from an unnamed convention for the causal half and from counting the look-up."""
    assert matmul_parameters(DENSE) == 90112
    assert flops_per_token(DENSE, SEQUENCE, Convention.CAUSAL) == 6 * 90112 + 24576 == 565248
    assert flops_per_token(DENSE, SEQUENCE, Convention.FULL) == 6 * 90112 + 49152 == 589824


def test_a_tied_head_multiplies_as_much_as_an_untied_one() -> None:
    tied = replace(DENSE, tie_embeddings=True)
    assert parameters(tied) == parameters(DENSE) - 256 * 64
    assert matmul_parameters(tied) == matmul_parameters(DENSE)
    assert flops_per_token(tied, SEQUENCE) == 565248


def test_routed_counts_to_the_unit() -> None:
    """B84: the dense formula, used for sparse models."""
    assert active_matmul_parameters(MIXTURE) == 140288
    assert matmul_parameters(MIXTURE) == 435200
    assert flops_per_token(MIXTURE, SEQUENCE) == 841728 + 24576


def test_more_experts_at_the_same_number_chosen_cost_only_the_router() -> None:
    more = replace(MIXTURE, experts=Experts(count=16, active=2, ffn=128))
    difference = flops_per_token(more, SEQUENCE) - flops_per_token(MIXTURE, SEQUENCE)
    assert difference == 6 * 2 * 8 * 64


def test_head_size_apart_from_hidden_over_heads_costs_what_it_is() -> None:
    wide = replace(DENSE, head_dim=32)
    attention = 2 * 3 * 4 * (4 * 32) * 16
    assert flops_per_token(wide, SEQUENCE) == 6 * active_matmul_parameters(wide) + attention


def test_a_window_sees_what_lies_in_it() -> None:
    full_attention = 24576 * SEQUENCE
    sliding = replace(DENSE, sliding_window=8)
    keys = 8 * SEQUENCE - 8 * 8 // 2
    assert flops_per_sequence(sliding, SEQUENCE) == 540672 * SEQUENCE + 2 * 3 * 4 * 64 * keys
    one_slides = replace(DENSE, sliding_window=8, windowed_layers=(1,))
    assert flops_per_sequence(one_slides, SEQUENCE) - 540672 * SEQUENCE == (full_attention + 2 * 3 * 4 * 64 * keys) // 2
    assert flops_per_token(replace(DENSE, sliding_window=64), SEQUENCE) == 565248


@pytest.mark.parametrize("name", catalogue())
def test_operations_multiply_exactly_the_matmul_parameters(name: str) -> None:
    arch, sequence = catalogue()[name].arch, 16
    done = [each for unit in range(arch.num_units) for each in operations(arch, unit, 2 * sequence, sequence)]
    products = sum(each.forward_flops() for each in done if each.kind is OperationKind.MATMUL)
    assert products == 2 * sequence * 2 * active_matmul_parameters(arch)
    factors = sum(each.groups * each.n * each.k for each in done if each.kind is OperationKind.MATMUL)
    assert factors == matmul_parameters(arch)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_products_are_those_that_a_training_step_is_counted_to_do(name: str) -> None:
    arch = DENSE if name == "llama" else replace(preset("gpt2"), layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16)
    decoder = build_decoder(arch, device="cpu")
    initialise(decoder, arch, seed=0)
    rows = rows_to_torch(whole_rows(0, np.arange(2), SEQUENCE), arch)
    tokens = torch.randint(0, arch.vocab, (2, SEQUENCE))
    with FlopCounterMode(display=False) as counter:
        decoder.loss(tokens, rows, tokens, torch.tensor(tokens.numel())).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for operation, flops in counted.items() if "attention" not in str(operation))
    assert products == 6 * active_matmul_parameters(arch) * tokens.numel()


def test_active_parameters_leave_out_only_unchosen_experts() -> None:
    assert active_parameters(DENSE) == parameters(DENSE)
    assert parameters(MIXTURE) - active_parameters(MIXTURE) == 2 * 6 * 3 * 64 * 128


def test_tokens_must_be_whole_sequences() -> None:
    with pytest.raises(ValueError, match="33 tokens are not whole sequences of 32"):
        operations(DENSE, 1, 33, 32)
