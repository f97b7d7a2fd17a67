"""Token files as shards of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.config.choices import TokenDtype
from meshwright.data.digest import Content, measure_files
from meshwright.data.tokens.megatron import MegatronIndex, open_megatron
from meshwright.data.tokens.raw import first_beyond, largest_token, open_bin, open_npy
from meshwright.data.tokens.stream import EndTokenIndex, Shard


@dataclass(frozen=True, slots=True, eq=False)
class TokenFile:
    """A mapped file of tokens and, in Megatron's format, the index beside it."""

    files: tuple[Path, ...]
    tokens: npt.NDArray[np.integer[Any]]
    index: MegatronIndex | None = None

    @property
    def num_documents(self) -> int | None:
        """None where only the tokens themselves could tell."""
        return None if self.index is None else self.index.num_documents

    def open(self, end_of_document: int | None) -> Shard:
        """A shard that knows its documents from the index, else from the token that ends them, if that is known."""
        if self.index is not None:
            return Shard(self.tokens, self.index)
        return Shard(self.tokens, None if end_of_document is None else EndTokenIndex(end_of_document))


def open_shards(files: Sequence[Path], dtype: TokenDtype) -> list[TokenFile]:
    """Map .npy, .bin, and .bin with .idx beside it. Raises RequestError for a file that is none of them."""
    return [_opened(file, dtype) for file in files]


def measure_tokens(shards: Sequence[TokenFile]) -> Content:
    """Digest, size and largest token, by a full read in constant memory."""
    content = measure_files([file for shard in shards for file in shard.files])
    largest = max(largest_token(shard.files[0], shard.tokens) for shard in shards)
    return Content(content.digest, content.size_bytes, largest)


def told_beyond(shards: Sequence[TokenFile], vocab: int) -> str:
    """The first token that is not below `vocab`, in words: file, position, value; there must be one."""
    for shard in shards:
        at = first_beyond(shard.tokens, vocab)
        if at is not None:
            return f"{shard.files[0]} holds {int(shard.tokens[at])} as token {at}"
    raise ValueError(f"all tokens are below {vocab}")


def _opened(file: Path, dtype: TokenDtype) -> TokenFile:
    if file.suffix.lower() == ".npy":
        return TokenFile((file,), open_npy(file))
    index_file = file.with_suffix(".idx")
    if index_file.exists():
        tokens, index = open_megatron(file, index_file)
        return TokenFile((file, index_file), tokens, index)
    return TokenFile((file,), open_bin(file, dtype))
