"""What every tokenizer offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.document import Part, Piece
from meshwright.layout.rows import Flags

Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Tokens (n,) of a piece without its end, and which of them are trained, (n,); None: all."""

    tokens: Tokens
    trained: Flags | None = None


class ChatError(Exception):
    """A conversation that the chat template does not take: why."""


class Tokenizer(Protocol):
    """Text to tokens and back. No token is added that the text does not hold; documents are ended by the cache."""

    @property
    def name(self) -> str:
        """As the user named it."""

    @property
    def digest(self) -> str:
        """Changes whenever the same text could become other tokens."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""

    @property
    def end_of_document(self) -> int:
        """The token that ends a document; it belongs to the document it ends."""

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        """Tokens of each piece."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without end-of-document tokens; broken characters become U+FFFD."""

    def render_chat(self, messages: list[dict[str, Any]]) -> list[Piece]:
        """Documents of a conversation, trained on the assistant's turns only.

        Raises ChatError for a conversation that the template refuses, RequestError where there is no template.
        """


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a prompt."""
    return [int(token) for token in tokenizer.encode([Piece((Part(text),))])[0].tokens]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest stored type that holds every token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
