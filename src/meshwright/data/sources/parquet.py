"""Rows of .parquet files, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.config.errors import RequestError
from meshwright.data.document import Piece, Skipped
from meshwright.data.extra import import_extra
from meshwright.data.sources.records import COMPLETION, MESSAGES, PROMPT, documents_of
from meshwright.data.tokenizer.tokenizer import Tokenizer

_BATCH_ROWS = 1024


def read_parquet(file: Path, text_field: str, tokenizer: Tokenizer) -> Iterator[Piece | Skipped]:
    """Documents of the rows, as of .jsonl records; only the columns that matter are read, a batch at a time."""
    parquet = import_extra("pyarrow.parquet", file)
    arrow = import_extra("pyarrow", file)
    try:
        with parquet.ParquetFile(file) as opened:
            present = opened.schema_arrow.names
            columns = [name for name in (text_field, MESSAGES, PROMPT, COMPLETION) if name in present]
            if not columns:
                rule = f'has no column "{text_field}", "{MESSAGES}", or "{PROMPT}" with "{COMPLETION}"'
                raise RequestError(str(file), rule, [f"data.text_field = {name}" for name in present])
            row = 0
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield from documents_of(record, str(file), row, text_field, tokenizer)
    except (arrow.ArrowException, OSError) as error:  # damaged pages are told as an error of reading
        raise RequestError(str(file), f"cannot be read as parquet: {error}") from None
