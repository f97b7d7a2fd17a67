"""Arguments of Megatron-LM as words of a shell: a plain list of them, or the launch script that holds it.

LAYERS=32                                a variable; $LAYERS, ${LAYERS} and ${LAYERS:-24} are its value then
MODEL_ARGS=( --num-layers $LAYERS )      arguments in an array
MODEL_ARGS=" --num-layers $LAYERS "      arguments in quotes
--num-layers: 32                         arguments in YAML, as recipes of tests have them
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.price.foreign.dialect import Format, refuse, whole

__all__ = ["Arguments", "argument_number", "arguments"]

_SET = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
_SUM = re.compile(r"\$\(\(([\d\s()*/+-]{1,200})\)\)")
_SPACED = re.compile(r"\$\(\([^\n`]*?\)\)")
"""Arithmetic of a shell; and where it stands in a text, one word whatever its spaces."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_BEGIN, _END = {"if", "case", "for", "while"}, {"fi", "esac", "done"}
_ALONE = re.compile(r"[\"']?\$\{?\w+(\[@\])?\}?[\"']?")
"""A word that is nothing but a variable."""

_NEWLINE = "\x1f"  # stands where a command of the script ends
_LONGEST = 4096  # characters of a variable: one that holds itself twice grows without end
_DEPTH = 4  # of quotes in quotes
_DIGITS = 20  # of a whole number; what is longer is read as a float, and refused where one is no answer


@dataclass(slots=True)
class Arguments:
    """Arguments by name, the ranks that a comment names, and remarks."""

    given: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Reader:
    """The state between words: variables of the script, and the argument that takes the next word."""

    found: Arguments
    variables: dict[str, str] = field(default_factory=dict)
    name: str = ""
    conditions: int = 0
    conditional: dict[str, None] = field(default_factory=dict)
    """Arguments inside a condition of the script."""

    mapped: set[str] = field(default_factory=set)
    """Arguments with a colon: those that are "true" are flags, those that are "false" are not given."""

    def read(self, text: str, depth: int = 0) -> None:
        begins = True
        for word in _words(text):
            if begins:
                self.conditions += (word in _BEGIN) - (word in _END)
            begins = word == _NEWLINE
            if begins:
                if self.found.given.get(self.name):
                    self.name = ""
            elif setting := _SET.fullmatch(word):
                self.name = ""
                self._set(setting[1], setting[2], setting[3], depth)
            else:
                self._word(word, depth)

    def _set(self, name: str, more: str, value: str, depth: int) -> None:
        value = value.replace(_NEWLINE, " ").strip()
        if value.startswith("("):  # an array begins
            if value[1:].strip():
                self._word(value[1:], depth)
        elif re.search(r"(^|\s)--\w", value) and not value.startswith("$("):
            if depth < _DEPTH:
                self.read(value, depth + 1)
            self.name = ""
        elif not more:
            known = self._expanded(value)
            if (
                "$" in known or "`" in known or len(known) > _LONGEST
            ):  # what a command or an argument of the script says
                self.variables.pop(name, None)
                return
            if self.variables.get(name, known) != known:
                self.found.notes.append(f"{name} is set more than once; from the second on its arguments have {known}")
            self.variables[name] = known

    def _word(self, word: str, depth: int) -> None:
        alone = _ALONE.fullmatch(word) is not None
        word = self._expanded(word.replace(_NEWLINE, " "))
        ends = word.endswith(")") and word.count("(") < word.count(")")
        word = word[:-1] if ends else word
        if alone and word.startswith("$") and ("[@]" in word or not self.name or self.found.given[self.name]):
            self.name = ""  # arguments in a variable, which were read where it is set
        elif word.startswith("--") and " " in word.strip() and "=" not in word.split()[0]:
            if depth < _DEPTH:
                self.read(word, depth + 1)
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            self._start(name.removesuffix(":"))
            if name.endswith(":"):
                self.mapped.add(self.name)
            if equals:
                self.found.given[self.name] = value
        elif self.name and word:
            self.found.given[self.name] = f"{self.found.given[self.name]} {word}".strip()
        if ends:
            self.name = ""

    def _start(self, name: str) -> None:
        if name in self.found.given:
            self.found.notes.append(f"--{name} is given more than once; the last counts")
        if self.conditions > 0:
            self.conditional[f"--{name}"] = None
        self.name = name
        self.found.given[name] = ""

    def _expanded(self, word: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            default = match[0] if match[3] is None else match[3].strip("\"'")
            return self.variables.get(name, default)

        return _SUM.sub(_reckoned, _USED.sub(value, word))


def _reckoned(match: re.Match[str]) -> str:
    """Whole numbers and + - * / of them, as a shell reckons; anything else as it was written."""
    try:
        return str(_value(ast.parse(match[1].strip().replace("/", "//"), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return match[0]


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no sum of whole numbers")


def arguments(text: str) -> Arguments:
    """Arguments of a list or a script. Raises RequestError for what is no text of a shell."""
    found, lines = Arguments(), []
    for line in text.splitlines():
        mark = line.strip()
        if mark.startswith("#"):
            parts = mark.strip("# ").split()
            if len(parts) == 2 and parts[0] == "ranks" and parts[1].isdecimal():
                found.ranks = whole(Format.MEGATRON, "# ranks", argument_number("ranks", parts[1]))
        else:
            lines.append(line)
    reader = _Reader(found)
    reader.read("\n".join(lines))
    if reader.conditional:
        named = ", ".join(reader.conditional)
        found.notes.append(f"under a condition of the script, which is not followed, and read: {named}")
    for name in reader.mapped & found.given.keys():
        if found.given[name].lower() == "false":
            del found.given[name]
        elif found.given[name].lower() == "true":
            found.given[name] = ""
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _words(text: str) -> Iterator[str]:
    """Words as a shell parts them, with a mark where a line ends that the next does not continue."""
    marked = "".join(line[:-1] + " " if line.endswith("\\") else f"{line}\n{_NEWLINE} "
                     for line in (each.rstrip() for each in text.splitlines()))  # fmt: skip
    marked = _SPACED.sub(lambda match: match[0].replace(" ", ""), marked)
    try:
        yield from shlex.split(marked, comments=True)
    except ValueError as error:
        raise refuse(Format.MEGATRON, "the file", f"arguments are words of a shell: {error}") from None


def argument_number(name: str, value: str) -> int | float:
    """A number of an argument. Raises RequestError, by its name."""
    try:
        digits = value.removeprefix("-").replace("_", "")
        whole_number = digits.isdecimal() and len(digits) < _DIGITS
        return int(value) if whole_number else float(value)
    except ValueError:
        raise refuse(Format.MEGATRON, f"--{name} {value}", "wants a number there") from None
