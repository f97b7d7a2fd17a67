"""A text read piece by piece has the logits of the text read at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.arch.arch import Arch
from meshwright.model.cache import cached
from tests.unit.model.tiny import GPT2, LLAMA, decoder_of, logits_of, rows_of, tokens_of

ARCHS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "a window in one block": replace(LLAMA, family="qwen2", qkv_bias=True, sliding_window=5, windowed_layers=(1,)),
    "a window in all": replace(LLAMA, family="mistral", sliding_window=5),
    "norms on heads": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=24),
}


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 1, 7], [16]])
def test_pieces_equal_the_whole(arch: Arch, pieces: list[int]) -> None:
    decoder = decoder_of(arch).eval()
    tokens = tokens_of(arch, 1, 16)
    whole = logits_of(decoder, tokens, rows_of(arch, 1, 16))[0]
    with cached(decoder, 20) as cache:
        read = 0
        for size in pieces:
            logits = cache.extend(tokens[0, read : read + size].tolist())
            read += size
            torch.testing.assert_close(logits, whole[read - 1], rtol=1e-12, atol=1e-12)
        cache.forget()
        torch.testing.assert_close(cache.extend(tokens[0, :3].tolist()), whole[2], rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match="do not fit"):
            cache.extend([1] * 18)
    assert torch.equal(logits_of(decoder, tokens, rows_of(arch, 1, 16))[0], whole)
