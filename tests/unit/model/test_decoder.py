"""What the plain decoder promises: names, ties, masks, dtypes, the normalisation, compilation, arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.arch.arch import Arch
from meshwright.arch.arithmetic import Convention, operations
from meshwright.arch.parameters import tensors
from meshwright.layout.rows import whole_rows
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.model.loss import IGNORED
from meshwright.model.norms import build_norm
from tests.unit.model.tiny import GPT2, LLAMA, decoder_of, documents, logits_of, rows_of, tokens_of

ARCHS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_embeddings=True),
    "sliding": replace(LLAMA, sliding_window=5, windowed_layers=(1,)),
    "qwen": replace(LLAMA, qkv_bias=True, qk_norm=True, head_dim=24),
    "gpt2": GPT2,
    "normed embedding": replace(GPT2, embedding_norm=True, tie_embeddings=False),
}
every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)


@every_arch
def test_parameters_are_the_logical_tensors(arch: Arch) -> None:
    parameters = {name: tuple(value.shape) for name, value in build_decoder(arch).named_parameters()}
    assert parameters == {tensor.name: tensor.shape for tensor in tensors(arch)}
    assert not list(build_decoder(arch).buffers())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tied_head_holds_the_embeddings_parameter(device: str) -> None:
    decoder = build_decoder(ARCHS["tied"], device=device)
    assert decoder.head.weight is decoder.embedding.weight
    assert decoder.embedding.weight.device.type == device


@every_arch
def test_start_values_come_from_the_logical_tensors(arch: Arch) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    decoder = build_decoder(arch, device="cpu")
    initialise(decoder, arch, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the global generator"
    for tensor in tensors(arch):
        value = decoder.get_parameter(tensor.name)
        if tensor.init.std:
            assert 0.9 < value.std() / tensor.init.std < 1.1, tensor.name
        else:
            assert value.eq(tensor.init.constant).all(), tensor.name


def test_initialise_refuses_another_architecture() -> None:
    with pytest.raises(ValueError, match=r"differ: head\.weight"):
        initialise(build_decoder(LLAMA, device="cpu"), ARCHS["tied"], 0)


@every_arch
def test_unit_by_unit_is_the_whole(arch: Arch) -> None:
    decoder, tokens, rows = decoder_of(arch), tokens_of(arch), rows_of(arch)
    assert len(decoder.units) == arch.num_units
    x = tokens
    for unit in decoder.units:
        x = unit(x, rows)
    assert torch.equal(x, decoder(tokens, rows))
    assert x.shape == (tokens.numel(), arch.vocab)


@every_arch
def test_a_later_token_changes_nothing_before_it(arch: Arch) -> None:
    decoder, tokens, rows = decoder_of(arch), tokens_of(arch), rows_of(arch)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % arch.vocab
    difference = (logits_of(decoder, changed, rows) - logits_of(decoder, tokens, rows)).abs().amax(dim=(0, 2))
    assert difference[:9].max() == 0
    assert difference[9] > 1e-3


def test_a_sliding_window_ends_where_it_says() -> None:
    """One layer, window 5: token t sees t-4 .. t."""
    arch = replace(LLAMA, layers=1, sliding_window=5)
    decoder, tokens, rows = decoder_of(arch), tokens_of(arch), rows_of(arch)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % arch.vocab
    difference = (logits_of(decoder, changed, rows) - logits_of(decoder, tokens, rows)).abs().amax(dim=(0, 2))
    assert [bool(each) for each in difference > 0] == [3 <= t <= 7 for t in range(16)]


@every_arch
@pytest.mark.parametrize("lengths", [(8, 8), (5, 11), (1, 3, 12)])
def test_masked_documents_equal_separate_runs(arch: Arch, lengths: tuple[int, ...]) -> None:
    decoder, tokens = decoder_of(arch), tokens_of(arch, 1)
    together = logits_of(decoder, tokens, rows_of(arch, 1, documents=documents(*lengths)))
    apart = [logits_of(decoder, part, rows_of(arch, 1, part.shape[1])) for part in tokens.split(lengths, dim=1)]
    assert torch.allclose(together, torch.cat(apart, dim=1), rtol=0, atol=1e-12)


@every_arch
@pytest.mark.parametrize("first", [8, 5])
def test_a_token_of_one_document_moves_the_next_by_exactly_nothing(arch: Arch, first: int) -> None:
    decoder, tokens = decoder_of(arch), tokens_of(arch, 1)
    rows = rows_of(arch, 1, documents=documents(first, 16 - first))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % arch.vocab
    difference = (logits_of(decoder, changed, rows) - logits_of(decoder, tokens, rows)).abs().amax(dim=(0, 2))
    assert difference[first:].max() == 0
    assert difference[: min(first, 5)].min() > 0


def test_padding_is_finite_and_changes_no_real_sequence() -> None:
    """A batch filled up with a padding sequence, under a mask: finite everywhere, real rows as alone."""
    decoder, tokens = decoder_of(LLAMA), tokens_of(LLAMA)
    rows = rows_to_torch(whole_rows(0, np.array([5, -1]), 16), LLAMA, dtype=torch.float64)
    assert rows.mask is not None
    labels = tokens.clone()
    labels[1] = IGNORED
    loss = decoder.loss(tokens, rows, labels, torch.tensor(16))
    loss.backward()
    alone = decoder.loss(tokens[:1], rows_of(LLAMA, 1), labels[:1], torch.tensor(16))
    assert torch.allclose(loss, alone, rtol=1e-14, atol=0)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in decoder.parameters())


def test_without_ragged_masks_there_is_no_mask() -> None:
    assert rows_of(LLAMA).mask is None
    assert rows_of(replace(LLAMA, sliding_window=16)).window_mask is None, "a window that reaches back to the start"
    sliding = rows_of(ARCHS["sliding"])
    assert sliding.mask is None
    assert sliding.window_mask is not None
    assert sliding.window_mask.shape == (1, 1, 16, 16)


def test_losses_of_micro_batches_add_up_to_the_mean() -> None:
    decoder, tokens = decoder_of(LLAMA), tokens_of(LLAMA, 4)
    labels = tokens_of(LLAMA, 4, seed=1)
    labels[0, :11] = IGNORED
    labels[3] = IGNORED
    count = (labels != IGNORED).sum()
    shares = [
        decoder.loss(tokens[i : i + 1], rows_of(LLAMA, 1, first_sample=5 + i), labels[i : i + 1], count)
        for i in range(4)
    ]
    logits = decoder(tokens, rows_of(LLAMA, 4))
    expected = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    assert torch.allclose(torch.stack(shares).sum(), expected, rtol=1e-14, atol=0)
    assert shares[3] == 0


def test_without_a_trained_token_loss_and_gradient_are_zero() -> None:
    decoder, tokens = decoder_of(LLAMA), tokens_of(LLAMA)
    loss = decoder.loss(tokens, rows_of(LLAMA), torch.full_like(tokens, IGNORED), torch.tensor(0))
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in decoder.parameters())


@every_arch
def test_tables_and_losses_are_at_least_float32(arch: Arch) -> None:
    tokens = tokens_of(arch)
    for dtype, inner in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        decoder, rows = decoder_of(arch, dtype), rows_of(arch, dtype=dtype)
        assert {table.dtype for table in (rows.cos, rows.sin) if table is not None} <= {inner}
        assert decoder(tokens, rows).dtype == dtype
        loss = decoder.loss(tokens, rows, tokens, torch.tensor(tokens.numel()))
        assert loss.dtype == inner
        loss.backward()
        assert decoder.embedding.weight.grad is not None
        assert decoder.embedding.weight.grad.dtype == dtype


@pytest.mark.parametrize("arch", [LLAMA, GPT2], ids=["rms", "layer"])
def test_norms_of_bfloat16_keep_float32_statistics(arch: Arch) -> None:
    """4096 features: a sum of squares in bfloat16 would stop growing after some 256 terms."""
    norm = build_norm(arch, 4096)
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = norm.double()(x.double())
    assert (norm.to(torch.bfloat16)(x) - exact).abs().max() <= exact.abs().max() / 256


def test_float64_tables_are_float64() -> None:
    """A position where float32 arithmetic would be off by 1e-3 radians: the angle is theta^0 = 1 a token."""
    offsets = np.array([[100_003]])
    numbers = replace(whole_rows(0, np.array([0]), 1), positions=offsets, offsets=offsets)
    rows = rows_to_torch(numbers, LLAMA, dtype=torch.float64)
    assert rows.cos is not None
    assert abs(rows.cos[0, 0, 0, 0].item() - np.cos(100_003.0)) < 1e-12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_equal_repeated_ones(kv_heads: int) -> None:
    arch = replace(LLAMA, kv_heads=kv_heads)
    decoder, tokens, rows = decoder_of(arch), tokens_of(arch), rows_of(arch)
    full = build_decoder(replace(arch, kv_heads=4), dtype=torch.float64, device="cpu")
    weights = {
        name: value.unflatten(0, (kv_heads, 16)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
        if ".key." in name or ".value." in name
        else value
        for name, value in decoder.state_dict().items()
    }
    full.load_state_dict(weights)
    assert torch.allclose(logits_of(decoder, tokens, rows), logits_of(full, tokens, rows), rtol=0, atol=1e-13)


@every_arch
def test_units_compile_whole_and_blocks_share_a_graph(arch: Arch) -> None:
    """No graph break; embedding, block and head make one graph each (a sliding block one more); steps add none."""
    arch = replace(arch, layers=4, dropout=0.1)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    decoder, tokens = decoder_of(arch), tokens_of(arch)
    units = [torch.compile(unit, fullgraph=True, backend=backend, dynamic=False) for unit in decoder.units]
    for step in range(3):
        rows = rows_of(arch, step=step, first_sample=7 * step)
        x = tokens
        for unit in units:
            x = unit(x, rows).detach().requires_grad_()  # units meet at detached borders
        assert torch.allclose(x, decoder(tokens, rows), rtol=0, atol=1e-12)
    assert len(graphs) == (4 if arch.windowed_layers else 3)
    torch.compiler.reset()


@every_arch
def test_a_decoder_runs_on_the_meta_device_alike(arch: Arch) -> None:
    assert build_decoder(arch).embedding.weight.is_meta
    rows = rows_of(arch, device="meta", dtype=torch.float32)
    assert build_decoder(arch)(tokens_of(arch).to("meta"), rows).shape == (32, arch.vocab)


@every_arch
def test_counted_flops_are_the_planned_arithmetic(arch: Arch) -> None:
    """Unit by unit, forward and backward, with a dense kernel for attention (FULL: nothing skipped)."""
    decoder, rows = decoder_of(arch), rows_of(arch)
    x, tokens = tokens_of(arch), tokens_of(arch)
    for number, unit in enumerate(decoder.units):
        planned = operations(arch, number, tokens.numel(), tokens.shape[1])
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
            y = unit(x, rows)
        assert forward.get_total_flops() == sum(each.forward_flops(Convention.FULL) for each in planned)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        assert backward.get_total_flops() == sum(each.backward_flops(Convention.FULL) for each in planned)
        x = y.detach().requires_grad_()


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_a_known_model(tied: bool) -> None:
    """torchtitan#341: 90112 matmul parameters, 6 x that a token, and 49152 for attention uncut by causality."""
    arch = replace(LLAMA, vocab=256, tie_embeddings=tied)
    tokens = tokens_of(arch, 1, 32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder_of(arch).loss(tokens, rows_of(arch, 1, 32), tokens, torch.tensor(32)).backward()
    assert counter.get_total_flops() == 32 * (6 * 90_112 + 49_152)


def test_what_is_only_priced_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="ALiBi"):
        build_decoder(replace(LLAMA, rope=None, alibi=True))
