"""From `data.tokenizer` to a tokenizer."""

from __future__ import annotations

from meshwright.data.tokenizer.bytewise import ByteTokenizer
from meshwright.data.tokenizer.tokenizer import Tokenizer


def open_tokenizer(named: str) -> Tokenizer:
    """The built-in "bytes", or the tokenizer of a tokenizer.json or of a folder that holds one. Raises RequestError."""
    if named == "bytes":
        return ByteTokenizer()
    from meshwright.data.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer.open(named)
