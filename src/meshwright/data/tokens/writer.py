"""Writes tokens, documents and the trained mask to a folder in constant memory."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from meshwright.data.tokenizer.tokenizer import Tokens
from meshwright.layout.rows import Flags

TOKENS, STARTS, TRAINED = "tokens.bin", "starts.bin", "trained.bin"
_BUFFER_BYTES = 1 << 20
_FLUSH_TOKENS = 1 << 20


class TokenWriter:
    """tokens.bin (little-endian tokens), starts.bin (int64, first token of each document), trained.bin (bits).

    trained.bin has a bit a token, lowest first, and goes away where every token is trained.
    """

    def __init__(self, folder: Path, dtype: np.dtype[np.unsignedinteger[Any]]) -> None:
        self._folder = folder
        self._dtype = dtype.newbyteorder("<")
        self._tokens = (folder / TOKENS).open("wb", buffering=_BUFFER_BYTES)
        self._starts = (folder / STARTS).open("wb", buffering=_BUFFER_BYTES)
        self._trained = (folder / TRAINED).open("wb", buffering=_BUFFER_BYTES)
        self._flags: list[Flags] = []
        self._num_flags = 0
        self._start = 0
        self.num_tokens = 0
        self.num_trained = 0
        self.num_documents = 0

    def add(self, tokens: Tokens, trained: Flags | None) -> None:
        """Tokens (n,) of the document under way; trained (n,), None: all."""
        self._tokens.write(tokens.astype(self._dtype, copy=False).tobytes())
        flags = np.ones(len(tokens), dtype=np.bool_) if trained is None else trained
        self._flags.append(flags)
        self._num_flags += len(flags)
        self.num_tokens += len(tokens)
        self.num_trained += int(np.count_nonzero(flags))
        if self._num_flags >= _FLUSH_TOKENS:
            self._flush_flags(keep=self._num_flags % 8)

    def end_document(self) -> None:
        """The document under way is whole. One without tokens would be no document: the caller ends none."""
        self._starts.write(array("q", [self._start]).tobytes())
        self._start = self.num_tokens
        self.num_documents += 1

    def close(self) -> None:
        """Everything on disk, flushed."""
        self._flush_flags(keep=0)
        for stream in (self._tokens, self._starts, self._trained):
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        if self.num_trained == self.num_tokens:
            (self._folder / TRAINED).unlink()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in (self._tokens, self._starts, self._trained):
            stream.close()

    def _flush_flags(self, keep: int) -> None:
        """Pack all but the last `keep` flags: bytes are written whole."""
        flags = np.concatenate(self._flags) if self._flags else np.zeros(0, dtype=np.bool_)
        cut = len(flags) - keep
        self._trained.write(np.packbits(flags[:cut], bitorder="little").tobytes())
        self._flags, self._num_flags = [flags[cut:]], keep
