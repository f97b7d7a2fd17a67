"""Dropout masks are functions of global coordinates: no cut, recomputation or resumption can change them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.model.counter import token_keys
from meshwright.model.dropout import Dropout, Site, dropout_mask, site_key
from tests.unit.model.tiny import GPT2, LLAMA, decoder_of, rows_of, tokens_of

GOLDEN_KEYS = [279112019018572248, -779410007491470347, -7066217663862115887, 6757101790416741472]
GOLDEN_BITS = 0xF68971927A1FF4CC


def keys_of(samples: int = 4, length: int = 8, seed: int = 0, step: int = 0, first: int = 0) -> Tensor:
    offsets = torch.arange(length).repeat(samples, 1)
    return token_keys(seed, torch.tensor(step), torch.arange(first, first + samples), offsets)


def mask_of(keys: Tensor, site: Site = Site.EMBEDDING, layer: int = 0, first: int = 0, features: int = 64) -> Tensor:
    return dropout_mask(keys, site_key(site, layer), first, features, 0.5)


def test_golden_bits() -> None:
    """A resumed run must go on with the masks of its past: these bits never change."""
    keys = keys_of(2, 2, seed=7, step=3)
    assert keys.tolist() == GOLDEN_KEYS
    row = mask_of(keys, Site.MLP_OUTPUT, layer=2)[1].long()
    assert sum(int(bit) << place for place, bit in enumerate(row.tolist())) == GOLDEN_BITS


def test_each_coordinate_changes_the_mask() -> None:
    """Two masks of 2048 elements that differ in one coordinate agree in half of them, within 5 deviations."""
    plain = mask_of(keys_of())
    others = {
        "seed": mask_of(keys_of(seed=1)),
        "step": mask_of(keys_of(step=1)),
        "sample": mask_of(keys_of(first=4)),
        "site": mask_of(keys_of(), Site.ATTENTION_OUTPUT),
        "layer": mask_of(keys_of(), layer=1),
        "features": mask_of(keys_of(), first=64),
        "token": mask_of(keys_of().roll(1)),
    }
    for name, other in others.items():
        agreement = (plain == other).double().mean()
        assert abs(agreement - 0.5) < 2.5 / math.sqrt(plain.numel()), name


def test_recomputed_masks_are_equal() -> None:
    assert torch.equal(mask_of(keys_of()), mask_of(keys_of()))


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_gathered_cuts_of_tokens_equal_the_whole(cut: int) -> None:
    keys = keys_of(3, 8)
    assert torch.equal(torch.cat([mask_of(part) for part in keys.split(cut)]), mask_of(keys))


@pytest.mark.parametrize("cut", [1, 5, 16, 63])
def test_gathered_cuts_of_features_equal_the_whole(cut: int) -> None:
    keys = keys_of()
    parts = [mask_of(keys, first=low, features=min(cut, 64 - low)) for low in range(0, 64, cut)]
    assert torch.equal(torch.cat(parts, dim=1), mask_of(keys))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1 - 2**-40])
def test_the_share_dropped_is_the_probability(probability: float) -> None:
    keep = dropout_mask(keys_of(64, 64), site_key(Site.MLP_OUTPUT, 3), 0, 64, probability).double()
    deviation = math.sqrt(probability * (1 - probability) / keep.numel())
    assert abs((1 - keep).mean() - probability) <= 5 * deviation + 1e-9
    per_feature, per_token = keep.mean(dim=0), keep.mean(dim=1)
    bound = 5.5 * math.sqrt(probability * (1 - probability))
    assert (per_feature - (1 - probability)).abs().max() <= bound / 64 + 1e-9
    assert (per_token - (1 - probability)).abs().max() <= bound / 8 + 1e-9


def test_survivors_are_scaled_and_evaluation_is_the_identity() -> None:
    dropout = Dropout(0.25, Site.EMBEDDING)
    rows = rows_of(LLAMA)
    x = torch.ones(32, 64, dtype=torch.float64, requires_grad=True)
    y = dropout(x, rows)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75}
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert dropout.eval()(x, rows) is x
    assert Dropout(0.0, Site.EMBEDDING)(x, rows) is x


def test_a_dropped_element_never_carries_what_it_held() -> None:
    x = torch.full((32, 64), torch.inf)
    y = Dropout(0.5, Site.EMBEDDING)(x, rows_of(LLAMA))
    assert set(y.unique().tolist()) == {0.0, math.inf}


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_impossible_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="no probability below 1"):
        Dropout(probability, Site.EMBEDDING)


@pytest.mark.parametrize("arch", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_model_drops_alike_in_any_micro_batch(arch: object) -> None:
    """Samples run together or one by one, and once more: equal logits; another step: other logits."""
    arch = replace(arch, dropout=0.1)  # type: ignore[type-var]
    decoder, tokens = decoder_of(arch), tokens_of(arch, 4)
    together = decoder(tokens, rows_of(arch, 4))
    one_by_one = [decoder(tokens[i : i + 1], rows_of(arch, 1, first_sample=5 + i)) for i in range(4)]
    assert torch.allclose(torch.cat(one_by_one), together, rtol=0, atol=1e-12)
    assert torch.equal(decoder(tokens, rows_of(arch, 4)), together)
    assert not torch.allclose(decoder(tokens, rows_of(arch, 4, step=1)), together)
    assert not torch.allclose(decoder.eval()(tokens, rows_of(arch, 4)), together)


def test_every_site_of_every_layer_has_its_own_mask() -> None:
    decoder = decoder_of(replace(LLAMA, layers=3, dropout=0.1))
    sites = [int(module.site) for module in decoder.modules() if isinstance(module, Dropout)]
    assert len(sites) == len(set(sites)) == 1 + 2 * 3
