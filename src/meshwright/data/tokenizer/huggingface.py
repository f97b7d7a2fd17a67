"""tokenizer.json, through the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config.errors import RequestError
from meshwright.data.digest import combined_digest
from meshwright.data.document import Piece
from meshwright.data.extra import import_extra
from meshwright.data.tokenizer.chat import ChatTemplate
from meshwright.data.tokenizer.tokenizer import Encoded, token_dtype
from meshwright.layout.rows import Flags

_FILE = "tokenizer.json"
_COMMON_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[EOS]")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_ID_CONFIGS = ("config.json", "generation_config.json")


class HuggingFaceTokenizer:
    """The tokenizer of a tokenizer.json. Text is encoded as it is: nothing is added, cut or padded.

    Special tokens written out in the text become those tokens, as everywhere in that library.
    """

    def __init__(self, file: Path, named: str) -> None:
        tokenizers = import_extra("tokenizers", named)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise RequestError(str(file), f"is no tokenizer the tokenizers library can read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        configs = [_json(file.parent / name) for name in _CONFIGS]
        self.name = named
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = _end_of_document(file, vocabulary, configs)
        self._dtype = token_dtype(self.vocab_size)
        self._special_tokens = _special_tokens(configs)
        self._chat_source = _chat_source(file.parent, configs[0])
        self._chat: ChatTemplate | None = None
        parts = (file.read_text("utf-8"), str(self.end_of_document), self._chat_source or "")
        self.digest = combined_digest((*parts, json.dumps(self._special_tokens, sort_keys=True)))

    @classmethod
    def open(cls, named: str) -> HuggingFaceTokenizer:
        """From a tokenizer.json or a folder that holds one. Raises RequestError."""
        path = Path(named).expanduser()
        file = path / _FILE if path.is_dir() else path
        if not file.is_file():
            rule = f"there is no such file, nor a folder that holds {_FILE}"
            raise RequestError(f'data.tokenizer = "{named}"', rule, ['"bytes"', f"a {_FILE}", f"a folder with {_FILE}"])
        return cls(file, named)

    def encode(self, pieces: Sequence[Piece]) -> list[Encoded]:
        masked = [any(not part.trained for part in piece.parts) for piece in pieces]
        if any(masked):
            encodings = self._tokenizer.encode_batch([piece.text for piece in pieces], add_special_tokens=False)
        else:
            encodings = self._tokenizer.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        return [
            Encoded(np.array(encoding.ids, dtype=self._dtype), _trained(piece, encoding.offsets) if mask else None)
            for piece, encoding, mask in zip(pieces, encodings, masked, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token != self.end_of_document]
        text: str = self._tokenizer.decode(shown, skip_special_tokens=False)
        return text

    def render_chat(self, messages: list[dict[str, Any]]) -> list[Piece]:
        if self._chat is None:
            if self._chat_source is None:
                rule = 'has no chat template, which "messages" data needs'
                works = ["a folder with chat_template.jinja, or with chat_template in tokenizer_config.json"]
                raise RequestError(f'data.tokenizer = "{self.name}"', rule, works)
            self._chat = ChatTemplate(self._chat_source, self._special_tokens, self.name)
        return self._chat.documents(messages)


def _trained(piece: Piece, offsets: Sequence[tuple[int, int]]) -> Flags:
    """(n,) whether each token holds a trained character; a token of no characters goes with the one it stands at.

    The text is encoded whole, so a token may straddle the border between a prompt and its completion.
    """
    flags = np.repeat([part.trained for part in piece.parts], [len(part.text) for part in piece.parts])
    before = np.concatenate(([0], np.cumsum(flags)))
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    ends = np.minimum(np.maximum(ends, begins + 1), len(flags))
    return before[ends] > before[np.minimum(begins, ends)]


def _end_of_document(file: Path, vocabulary: Mapping[str, int], configs: Sequence[dict[str, Any]]) -> int:
    """The eos token of the files beside the tokenizer, else the first of the common names it holds."""
    known = set(vocabulary.values())
    for config in configs:
        named = _content(config.get("eos_token"))
        if named is not None and named in vocabulary:
            return vocabulary[named]
    for name in _ID_CONFIGS:
        for token in _eos_ids(_json(file.parent / name)):
            if token in known:
                return token
    for name in _COMMON_ENDS:
        if name in vocabulary:
            return vocabulary[name]
    rule = "does not say which token ends a document"
    works = ["eos_token in a tokenizer_config.json beside it", f"one of the tokens {' '.join(_COMMON_ENDS)}"]
    raise RequestError(str(file), rule, works)


def _eos_ids(config: Mapping[str, Any]) -> Iterator[int]:
    value = config.get("eos_token_id")
    yield from (token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))


def _special_tokens(configs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What a chat template knows: bos_token, eos_token and so on, by name."""
    named: dict[str, str] = {}
    for config in reversed(configs):
        for key, value in config.items():
            content = _content(value)
            if key.endswith("_token") and content is not None:
                named[key] = content
    return named


def _chat_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template of the configuration (of several, the one named default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _content(value: object) -> str | None:
    """The text of a token, which some files wrap in an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _json(file: Path) -> dict[str, Any]:
    """The object of a file, empty where there is none. Raises RequestError where it is broken."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise RequestError(str(file), f"is no JSON: {error}") from None
    return value if isinstance(value, dict) else {}
