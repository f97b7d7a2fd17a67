"""Documents of text files, whatever their formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.data.document import Piece, Skipped
from meshwright.data.sources.locate import format_of
from meshwright.data.sources.text import read_text
from meshwright.data.tokenizer.tokenizer import Tokenizer


def read_documents(files: Sequence[Path], text_field: str, tokenizer: Tokenizer) -> Iterator[Piece | Skipped]:
    """Documents of the files in order. The tokenizer only lends its chat template to "messages" records."""
    for file in files:
        ending = format_of(file)
        if ending == ".txt":
            yield from read_text(file)
        elif ending == ".parquet":
            from meshwright.data.sources.parquet import read_parquet

            yield from read_parquet(file, text_field, tokenizer)
        else:
            from meshwright.data.sources.jsonl import read_jsonl

            yield from read_jsonl(file, text_field, tokenizer)
