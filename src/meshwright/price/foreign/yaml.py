"""The YAML that configuration files of Accelerate are written in: nested mappings of plain scalars, lists of them."""

from __future__ import annotations

from typing import Any

from meshwright.price.foreign.dialect import Format, refuse

__all__ = ["FLAGS", "mapping"]

FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = "null", "~"
_DIGITS = 20  # of a size; what is longer is told as a word


def mapping(text: str, notes: list[str]) -> dict[str, Any]:
    """Nested mappings of plain scalars and of lists of them: what such files hold. Of a name given twice the last
    counts, as there."""
    root: dict[str, Any] = {}
    stack: list[tuple[int, dict[str, Any]]] = [(-1, root)]
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip()
        if "\t" in bare:
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files are indented with spaces")
        if not bare.strip() or bare.lstrip().startswith(("#", "---")):
            continue
        depth = len(bare) - len(bare.lstrip())
        if bare.strip().startswith("- ") and len(stack) > 1:  # an item of the list that stands above, indented or not
            continue
        name, colon, value = bare.strip().partition(":")
        if not colon:
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files hold `name: value` lines")
        while stack[-1][0] >= depth:
            stack.pop()
        if name in stack[-1][1]:
            notes.append(f"line {number}: {name} is given twice; the last counts")
        word = value.strip()
        if word in ("", "{}"):
            child: dict[str, Any] = {}
            stack[-1][1][name] = child
            stack.append((depth, child))
        elif word.lower() in _NULL:
            stack[-1][1].pop(name, None)
        elif word[0] == "[" and word[-1] == "]":
            stack[-1][1][name] = [_scalar(each.strip()) for each in word[1:-1].split(",") if each.strip()]
        elif word[0] in "[{&*|>":
            raise refuse(Format.ACCELERATE, f"line {number}: {bare.strip()}", "files hold `name: value` lines")
        else:
            stack[-1][1][name] = _scalar(word)
    return _filled(root)


def _filled(tables: dict[str, Any]) -> dict[str, Any]:
    """Without names that have nothing under them, which is null too, in the file and in its tables."""
    inner = {
        name: {key: each for key, each in value.items() if each != {}} if isinstance(value, dict) else value
        for name, value in tables.items()
    }
    return {name: value for name, value in inner.items() if value != {}}


def _scalar(word: str) -> Any:
    """A number, quoted or not; a boolean, unquoted alone; or the word."""
    bare = word.strip("'\"")
    if bare == word and word.lower() in FLAGS:
        return FLAGS[word.lower()]
    return int(bare) if bare.lstrip("-").isdecimal() and len(bare) < _DIGITS else bare
