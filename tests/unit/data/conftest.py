"""Settings of [data] for tests."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from meshwright.config.choices import Documents, Order, TokenDtype


@dataclass(frozen=True)
class Settings:
    source: str = "python"
    text_field: str = "text"
    dtype: TokenDtype = TokenDtype.UINT16
    tokenizer: str = "bytes"
    sequence_length: int = 8
    order: Order = Order.SHUFFLED
    documents: Documents = Documents.PACKED
    eval_fraction: float = 0.0


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """The defaults, with what a test changes: `settings(source=..)`."""
    return lambda **changes: Settings(**{name: str(v) if name == "source" else v for name, v in changes.items()})
