"""The width of tokens, told from the numbers: every public vocabulary, read right and wrong."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.tokens.width import apparent_bytes, sampled

_VOCABULARIES = (257, 32_000, 50_257, 65_536, 128_256, 151_936, 262_144, 1_000_000)


def tokens_of(vocab: int, count: int, uniform: bool, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng((seed, vocab, count))
    return random.integers(0, vocab, count) if uniform else random.zipf(1.3, count).clip(max=vocab) - 1


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("count", [256, 5_000, 200_000])
@pytest.mark.parametrize("vocab", _VOCABULARIES)
def test_every_width_is_told(vocab: int, count: int, uniform: bool) -> None:
    tokens = tokens_of(vocab, count, uniform)
    assert apparent_bytes(tokens.astype("<u4").tobytes()) == 4
    assert apparent_bytes(tokens.astype("<i8").tobytes()) == 8
    if vocab <= 65_536:
        assert apparent_bytes(tokens.astype("<u2").tobytes()) == 2


@pytest.mark.parametrize("seed", range(20))
def test_narrow_tokens_of_few_kinds_are_never_taken_for_wide_ones(seed: int) -> None:
    """A small vocabulary cannot tell, and then nothing is said; what does not fit the model is refused by its value."""
    for vocab in (2, 3, 10, 16, 100):
        assert apparent_bytes(tokens_of(vocab, 1000, True, seed).astype("<u2").tobytes()) in (None, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(1000, "<u2"),
        lambda: np.zeros(1000, "<u4"),
        lambda: np.array([1, 70_000], "<u4"),
        lambda: np.array([7, 0] * 20, "<u2"),
    ],
)
def test_too_little_to_tell(make: Callable[[], np.ndarray]) -> None:
    assert apparent_bytes(make().tobytes()) is None


def test_recommended_items_in_the_millions_are_wide_tokens() -> None:
    """Upper halves above any text vocabulary's, and still far below the lower ones."""
    assert apparent_bytes(tokens_of(10_000_000, 5_000, True).astype("<u4").tobytes()) in (None, 4)


@pytest.mark.parametrize("size", [8, 64, 1000, (1 << 18) + 4, 3 << 18, (3 << 18) + 2, 5_000_002])
def test_the_sample_is_of_whole_groups_from_all_over_the_file(tmp_path: Path, size: int) -> None:
    """Each window begins at a multiple of eight, so halves of tokens keep their places."""
    whole = np.arange((size + 7) // 8, dtype="<u8").tobytes()[:size]
    (tmp_path / "a").write_bytes(whole)
    groups = np.frombuffer(sampled(tmp_path / "a"), dtype="<u8")
    assert groups[0] == 0
    assert groups[-1] == size // 8 - 1
    assert len(groups) <= 3 << 15
    assert set(np.diff(groups).tolist()) <= set(range(1, size))
