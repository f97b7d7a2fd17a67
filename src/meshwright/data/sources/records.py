"""One record of a .jsonl or .parquet file, as documents.

{"text": ..}                          a document, all trained
{"prompt": .., "completion": ..}      one document; the completion and its end are trained
{"messages": [{"role", "content"}]}   the tokenizer's chat template; the assistant's turns are trained
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.data.document import Part, Piece, Skipped, empty, plain
from meshwright.data.tokenizer.tokenizer import ChatError, Tokenizer

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"


def documents_of(
    record: Mapping[str, Any], file: str, line: int, text_field: str, tokenizer: Tokenizer
) -> Iterator[Piece | Skipped]:
    """Documents of a record, by the first of its fields that is there: `text_field`, messages, prompt + completion."""
    try:
        if text_field in record and text_field != MESSAGES:
            text = _text(record, text_field)
            yield plain(text) if text else empty(file, line)
        elif MESSAGES in record:
            yield from _conversation(record, tokenizer)
        elif PROMPT in record and COMPLETION in record:
            prompt, completion = _text(record, PROMPT), _text(record, COMPLETION)
            parts = (Part(prompt, trained=False), Part(completion)) if prompt else (Part(completion),)
            yield Piece(parts) if completion else empty(file, line)
        else:
            raise _BadRecordError(f'has no field "{text_field}", "{MESSAGES}", or "{PROMPT}" with "{COMPLETION}"')
    except _BadRecordError as error:
        yield Skipped(file, line, str(error))


class _BadRecordError(Exception):
    """Why a record is no document."""


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record[field]
    if value is None:
        raise _BadRecordError(f'field "{field}" is null')
    if not isinstance(value, str):
        raise _BadRecordError(f'field "{field}" is {type(value).__name__}, not text')
    _check_characters(value, field)
    return value


def _messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = record[MESSAGES]
    if not isinstance(value, list) or not value:
        raise _BadRecordError(f'field "{MESSAGES}" is no list of messages')
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise _BadRecordError(f"message {number} has no role and content")
        if message["content"] is None and not message.get("tool_calls"):  # templates would write the word None
            raise _BadRecordError(f"the content of message {number} is null")
    return value


def _conversation(record: Mapping[str, Any], tokenizer: Tokenizer) -> list[Piece]:
    try:
        pieces = tokenizer.render_chat(_messages(record))
    except ChatError as error:
        raise _BadRecordError(str(error)) from None
    for piece in pieces:
        _check_characters(piece.text, MESSAGES)
    return pieces


def _check_characters(text: str, field: str) -> None:
    """JSON may hold half of a surrogate pair, which no tokenizer can take."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRecordError(f'field "{field}" holds half of a surrogate pair') from None
