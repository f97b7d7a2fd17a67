"""Megatron's .bin and .idx."""

import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.errors import RequestError
from meshwright.data.tokens.megatron import open_megatron
from meshwright.data.tokens.stream import Shard, TokenStream

CODES = {"<u2": 8, "<i4": 4}


def write(folder: Path, sequences: list[list[int]], documents: list[int], dtype: str = "<u2") -> tuple[Path, Path]:
    """The two files as Megatron's builder lays them out."""
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    sizes = lengths.astype("<i8") * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(documents))
    index = header + lengths.tobytes() + (np.cumsum(sizes) - sizes).tobytes() + np.array(documents, "<i8").tobytes()
    (folder / "a.idx").write_bytes(index)
    (folder / "a.bin").write_bytes(np.array([t for sequence in sequences for t in sequence], dtype=dtype).tobytes())
    return folder / "a.bin", folder / "a.idx"


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_tokens_and_documents(tmp_path: Path, dtype: str) -> None:
    """A document may be several sequences, or hold no token at all."""
    files = write(tmp_path, [[1, 2], [3], [], [4, 5, 6], [7]], [0, 2, 3, 5], dtype)
    tokens, index = open_megatron(*files)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert index.num_documents == 3
    stream = TokenStream([Shard(tokens, index)])
    assert stream.document_ids(0, 7).tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert stream.document_ids(1, 4).tolist() == [0, 0, 1]
    assert stream.document_ids(3, 7).tolist() == [0, 0, 0, 0]


def damaged(index: bytes, at: int, value: bytes) -> bytes:
    return index[:at] + value + index[at + len(value) :]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda index: b"TNTIDX" + index[6:], "MMIDIDX"),
        (lambda index: index[:20], "MMIDIDX"),
        (lambda index: damaged(index, 9, struct.pack("<Q", 2)), "version 2"),
        (lambda index: damaged(index, 17, b"\x06"), "type 6"),
        (lambda index: index[:-1], "cut off"),
        (lambda index: damaged(index, 34, struct.pack("<i", 3)), "sequence 1 does not begin"),
        (lambda index: damaged(index, len(index) - 8, struct.pack("<q", 1)), "do not cover"),
        (lambda index: damaged(index, 38, struct.pack("<i", 9)), "bytes, its index tells"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, change: object, told: str) -> None:
    bin_file, idx_file = write(tmp_path, [[1, 2], [3]], [0, 1, 2])
    idx_file.write_bytes(change(idx_file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(RequestError, match=told):
        open_megatron(bin_file, idx_file)


@pytest.mark.parametrize("documents", [[0, 3, 2, 3], [0, -1, 3]])
def test_documents_that_do_not_ascend_are_refused(tmp_path: Path, documents: list[int]) -> None:
    with pytest.raises(RequestError, match="begins before the one before it"):
        open_megatron(*write(tmp_path, [[1, 2], [3], [4]], documents))
