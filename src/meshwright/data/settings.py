"""What the data part is told: the [data] section of a run."""

from __future__ import annotations

from typing import Protocol

from meshwright.config.choices import Documents, Order, TokenDtype


class DataSettings(Protocol):
    """The fields of [data]; any frozen dataclass with these names will do."""

    @property
    def source(self) -> str:
        """The name "python", or a path or glob of text or token files."""

    @property
    def text_field(self) -> str:
        """The field of .jsonl and .parquet records that holds the text."""

    @property
    def dtype(self) -> TokenDtype:
        """Type of the tokens of a raw .bin file."""

    @property
    def tokenizer(self) -> str:
        """The name "bytes", or a tokenizer.json or a folder that holds one."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample's inputs, S."""

    @property
    def order(self) -> Order:
        """Shuffled or sequential."""

    @property
    def documents(self) -> Documents:
        """Packed: attention across documents; masked: each token sees its own document only."""

    @property
    def eval_fraction(self) -> float:
        """The last share of the samples, kept for evaluation."""
