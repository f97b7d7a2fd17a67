"""One stream over shards, with indices above 2^31."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.split import Split
from meshwright.data.tokens.stream import EndTokenIndex, Shard, StartsIndex, TokenStream


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_shards_read_as_one(sizes: list[int], data: st.DataObject) -> None:
    tokens = np.arange(sum(sizes))
    edges = np.cumsum(sizes)[:-1]
    flags = np.random.default_rng(0).integers(0, 2, sum(sizes)).astype(bool)
    shards = [
        Shard(t, StartsIndex(np.array([0])), np.packbits(f, bitorder="little"))
        for t, f in zip(np.split(tokens, edges), np.split(flags, edges), strict=True)
    ]
    stream = TokenStream(shards)
    first = data.draw(st.integers(0, sum(sizes) - 1))
    last = data.draw(st.integers(first + 1, sum(sizes)))
    assert stream.read(first, last).tolist() == tokens[first:last].tolist()
    assert stream.trained(first, last).tolist() == flags[first:last].tolist()
    shard_of = np.repeat(np.arange(len(sizes)), sizes)[first:last]
    assert stream.document_ids(first, last).tolist() == (shard_of - shard_of[0]).tolist()


def test_documents_of_no_tokens_do_not_count() -> None:
    stream = TokenStream([Shard(np.arange(6), StartsIndex(np.array([0, 2, 2, 2, 5])))])
    assert stream.document_ids(0, 6).tolist() == [0, 0, 1, 1, 1, 2]


def test_what_lies_outside_is_refused() -> None:
    stream = TokenStream([Shard(np.arange(6))])
    for first, last in [(-1, 2), (3, 3), (2, 7)]:
        with pytest.raises(IndexError):
            stream.read(first, last)


def test_indices_above_2_to_31(tmp_path: Path) -> None:
    """B76 (gpt-neox#493): two sparse files of 2^31 + 5 tokens; the values sit where 32-bit arithmetic would miss."""
    size, length = 2**31 + 5, 64
    shards = []
    for number in range(2):
        file = tmp_path / f"{number}.bin"
        with file.open("wb") as stream:
            stream.truncate(size * 2)
            stream.seek((size - 3) * 2)
            stream.write(np.array([7, 9, 8 + number], dtype="<u2").tobytes())
        shards.append(Shard(np.memmap(file, dtype="<u2", mode="r").view(np.ndarray), EndTokenIndex(9)))
    both = TokenStream(shards)
    assert both.num_tokens == 2 * size
    assert both.read(2 * size - 3, 2 * size).tolist() == [7, 9, 9]
    assert both.read(size - 2, size + 1).tolist() == [9, 8, 0]
    num_samples = (2 * size - 1) // length
    sample = (size - 1) // length
    batch = Split(both, length, 0, num_samples, masks_documents=True).read(np.array([sample, num_samples - 1]))
    at = size - 3 - sample * length
    assert batch.inputs[0, at : at + 3].tolist() == [7, 9, 8]
    assert batch.rows.document_ids is not None
    assert batch.rows.document_ids[0, at : at + 4].tolist() == [0, 0, 1, 2]
    assert batch.rows.sample_ids.tolist() == [sample, num_samples - 1]
