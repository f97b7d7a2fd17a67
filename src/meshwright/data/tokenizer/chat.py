"""Conversations as text: a tokenizer's chat template, and which of its text the assistant wrote.

    <user>Hi</s><assistant>Hello!</s><user>Bye</s><assistant>Bye.</s>
                           ~~~~~~~~~~                         ~~~~~~~~  trained: each turn and the mark that ends it

Templates that mark their trained text by {% generation %} are taken at their word. Otherwise an assistant's turn is
what the template adds to the prompt that asks for it. Some templates render an earlier turn differently once later
ones follow (they drop its reasoning); such a conversation becomes one document for each assistant's turn, trained at
its last turn only: exactly what the model would have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from meshwright.config.errors import RequestError
from meshwright.data.document import Part, Piece
from meshwright.data.extra import import_extra
from meshwright.data.tokenizer.tokenizer import ChatError

_BEGIN, _END = "\uf8f0", "\uf8f1"
_Messages = list[dict[str, Any]]


class ChatTemplate:
    """A Jinja template, run in a sandbox. The date is not defined in it: the same data must give the same tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], named: str) -> None:
        """`special_tokens`: what the template knows as bos_token and so on. `named`: where it is from, for messages."""
        jinja2 = import_extra("jinja2", named)
        sandbox = import_extra("jinja2.sandbox", named)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _to_json
        self._marks_trained = "generation %}" in source or "generation -%}" in source
        self._special_tokens = dict(special_tokens)
        self._failure: type[Exception] = jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(named, f"its chat template is no valid Jinja template: {error}") from None

    def documents(self, messages: _Messages) -> list[Piece]:
        """Documents of a conversation, the assistant's turns trained. Raises ChatError."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ChatError("the conversation has no assistant's turn")
        if self._marks_trained:
            if any(mark in json.dumps(messages, ensure_ascii=False, default=str) for mark in (_BEGIN, _END)):
                raise ChatError("the conversation holds a character that is reserved for marking trained text")
            return [_marked(self._render(messages))]
        whole = self._render(messages)
        spans = [self._turn(messages, turn) for turn in turns]
        if all(whole.startswith(after) for _, after, _ in spans):
            return [_spanned(whole, [(begin, end) for begin, _, end in spans])]
        return [_spanned(after, [(begin, end)]) for begin, after, end in spans]

    def _turn(self, messages: _Messages, turn: int) -> tuple[int, str, int]:
        """(begin, text up to and with the turn, end): the turn is text[begin:end]."""
        before = self._render(messages[:turn], add_generation_prompt=True)
        after = self._render(messages[: turn + 1])
        if not after.startswith(before):
            raise ChatError(f"the chat template does not begin message {turn} as it prompts for one")
        return len(before), after, len(before) + _end_of_turn(after[len(before) :], messages[turn]["content"])

    def _render(self, messages: _Messages, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (self._failure, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(f"the chat template refuses the conversation: {error}") from None
        return text


def _end_of_turn(text: str, content: object) -> int:
    """Where a turn ends: with its mark, not with white space after the mark; all of it where no mark follows."""
    said = content.strip() if isinstance(content, str) else ""
    after = text[text.rfind(said) + len(said) :] if said and said in text else text
    return len(text.rstrip()) if after.strip() else len(text)


def _spanned(text: str, spans: list[tuple[int, int]]) -> Piece:
    """A document with spans of it trained; its end is trained where nothing but the last turn comes before it."""
    parts: list[Part] = []
    at = 0
    for begin, end in spans:
        parts += [Part(text[at:begin], trained=False), Part(text[begin:end])]
        at = end
    parts.append(Part(text[at:], trained=False))
    return Piece(tuple(part for part in parts if part.text), trains_end=at == len(text))


def _marked(text: str) -> Piece:
    """A document whose trained spans stand between marks."""
    parts: list[Part] = []
    for number, stretch in enumerate(text.split(_BEGIN)):
        trained, _, rest = stretch.partition(_END) if number else ("", "", stretch)
        parts += [Part(trained), Part(rest, trained=False)]
    if not any(part.trained and part.text for part in parts):
        raise ChatError("the chat template marks no text of the conversation as the assistant's")
    return Piece(tuple(part for part in parts if part.text), trains_end=False)


def _generation_tag() -> type:
    """The extension of Jinja that reads {% generation %} .. {% endgeneration %} and puts marks around the text."""
    nodes: Any = import_extra("jinja2.nodes", "messages")
    extension: Any = import_extra("jinja2.ext", "messages").Extension

    def parse(self: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def mark(self: Any, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"

    return type("GenerationTag", (extension,), {"tags": {"generation"}, "parse": parse, "_mark": mark})


def _raise(message: str) -> None:
    raise ValueError(message)


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
