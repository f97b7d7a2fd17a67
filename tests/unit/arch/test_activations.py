"""What units keep for backward, against what autograd really saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.arch.activations import Saved, Setting, saved, saved_bytes
from meshwright.arch.arch import Arch, Experts
from meshwright.arch.families import FAMILIES
from meshwright.config.choices import Dtype, Family
from meshwright.layout.rows import whole_rows
from meshwright.model import Rows, build_decoder, initialise, rows_to_torch
from meshwright.model.decoder import Decoder

SETTING = Setting(sequences=3, sequence=32)
DTYPES = {Dtype.FLOAT64: torch.float64, Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


def tiny(family: Family) -> Arch:
    template = FAMILIES[family]
    kv_heads = 2 if template.rope else 4
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": kv_heads, "head_dim": 32, "ffn": 96, "vocab": 101}
    return replace(template, **sizes, max_positions=64)


ARCHS = {str(family): tiny(family) for family in (Family.LLAMA, Family.QWEN2, Family.QWEN3, Family.GPT2)} | {
    "llama, dropout": replace(tiny(Family.LLAMA), dropout=0.1),
    "gpt2, dropout": replace(tiny(Family.GPT2), dropout=0.1),
    "mistral, narrow window": replace(tiny(Family.MISTRAL), sliding_window=8),
    "mistral, wide window": replace(tiny(Family.MISTRAL), sliding_window=32),
    "llama, all heads": replace(tiny(Family.LLAMA), kv_heads=4, tie_embeddings=True),
}


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_bytes_are_those_that_autograd_saves(arch: Arch, compute: Dtype) -> None:
    measured = list(saved_by_autograd(arch, compute, documents=None))
    assert measured == [saved_bytes(arch, unit, SETTING, compute) for unit in range(arch.num_units)]


def test_a_mask_of_documents_is_kept_for_every_sequence() -> None:
    documents = np.repeat(np.arange(4), SETTING.sequence // 4)[None].repeat(SETTING.sequences, axis=0)
    measured = list(saved_by_autograd(ARCHS["llama"], Dtype.FLOAT32, documents))
    masked = replace(SETTING, masked=True)
    assert measured == [saved_bytes(ARCHS["llama"], unit, masked, Dtype.FLOAT32) for unit in range(4)]


def saved_by_autograd(
    arch: Arch, compute: Dtype, documents: np.ndarray | None, change: Callable[[Decoder], None] = lambda decoder: None
) -> Iterator[int]:
    """For each unit the bytes of its input and of every storage autograd saved, without parameters and rows.

    `change` may replace forwards of the plain model first.
    """
    dtype = DTYPES[compute]
    decoder = build_decoder(arch, dtype=dtype, device="cpu")
    initialise(decoder, arch, seed=0)
    change(decoder)
    sample_ids = np.arange(SETTING.sequences)
    rows = rows_to_torch(whole_rows(0, sample_ids, SETTING.sequence, documents), arch, dtype=dtype)
    tokens = torch.randint(0, arch.vocab, (SETTING.sequences, SETTING.sequence))
    alive = {storage(each) for each in (tokens, *decoder.parameters(), *tensors_of(rows))}
    x = tokens
    for unit in decoder.units:
        kept: dict[int, Tensor] = {}
        if x is not tokens:
            x = x.detach().requires_grad_()
            kept[storage(x)] = x

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            if storage(tensor) not in alive:
                kept[storage(tensor)] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            last = unit is decoder.head
            x = decoder.head.loss(x, rows, tokens, torch.tensor(tokens.numel())) if last else unit(x, rows)
        yield sum(each.untyped_storage().nbytes() for each in kept.values())


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_of(rows: Rows) -> list[Tensor]:
    values = [getattr(rows, field.name) for field in fields(rows)]
    return [value for value in values if isinstance(value, Tensor)]


def test_the_table_names_what_it_counts() -> None:
    assert saved(ARCHS["gpt2"], 2, SETTING)[:4] == (
        Saved("input", 96 * 64),
        Saved("attention_norm.mean", 96),
        Saved("attention_norm.scale", 96),
        Saved("attention_norm.output", 96 * 64),
    )
    for arch in ARCHS.values():
        for unit in range(arch.num_units):
            names = [each.name for each in saved(arch, unit, SETTING)]
            assert len(set(names)) == len(names)


def test_fused_norms_keep_neither_a_copy_nor_the_normalised_input() -> None:
    arch = ARCHS["llama"]
    fused = replace(SETTING, fused_norms=True)
    difference = saved_bytes(arch, 1, SETTING, Dtype.BFLOAT16) - saved_bytes(arch, 1, fused, Dtype.BFLOAT16)
    assert difference == 96 * 64 * (4 + 4 + 4 - 2 + 4)


def test_routed_activations_grow_with_the_experts_chosen_not_with_their_number() -> None:
    def routed(count: int, active: int) -> int:
        arch = replace(ARCHS["llama"], experts=Experts(count, active, ffn=48))
        chosen = (each for each in saved(arch, 1, SETTING) if each.name.startswith("mlp.experts"))
        return sum(each.elements for each in chosen)

    assert routed(8, 2) == routed(64, 2) == 2 * routed(8, 1) == 96 * 2 * (2 * 64 + 4 * 48)
