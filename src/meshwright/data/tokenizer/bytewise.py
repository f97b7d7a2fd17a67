"""The built-in tokenizer: a token a byte of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.config.errors import RequestError
from meshwright.data.document import Piece
from meshwright.data.tokenizer.tokenizer import Encoded


class ByteTokenizer:
    """257 tokens: byte values, and 256 at the end of a document."""

    name = "bytes"
    digest = "bytes-257"
    vocab_size = 257
    end_of_document = 256

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        return [_encoded(piece) for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def render_chat(self, messages: list[dict[str, Any]]) -> list[Piece]:
        raise RequestError(
            'data.tokenizer = "bytes"',
            'has no chat template, which "messages" data needs',
            ["a folder that holds tokenizer.json and a chat template", "records with prompt and completion"],
        )


def _encoded(piece: Piece) -> Encoded:
    raw = [part.text.encode("utf-8") for part in piece.parts]
    tokens = np.frombuffer(b"".join(raw), dtype=np.uint8).astype(np.uint16)
    if all(part.trained for part in piece.parts):
        return Encoded(tokens)
    return Encoded(tokens, np.repeat([part.trained for part in piece.parts], [len(text) for text in raw]))
