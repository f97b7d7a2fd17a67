"""Arguments of Megatron-LM as words of a shell: a plain list of them, or the launch script that holds it."""

from __future__ import annotations

import re
import shlex

from meshwright.price.foreign.dialect import Format, refuse, whole

__all__ = ["argument_number", "arguments"]

_SCRIPT = re.compile(r"\)|[A-Za-z_]\w*\+?=.*")
"""Words of a launch script between arguments."""

_DIGITS = 20  # of a whole number; what is longer is read as a float, and refused where one is no answer


def arguments(text: str) -> tuple[dict[str, str], int]:
    """Arguments by name, and the ranks that a comment names."""
    ranks, lines = 0, []
    for line in text.splitlines():
        mark = line.strip()
        if mark.startswith("#"):
            parts = mark.strip("# ").split()
            named = len(parts) == 2 and parts[0] == "ranks" and parts[1].isdecimal()
            ranks = whole(Format.MEGATRON, "# ranks", argument_number("ranks", parts[1])) if named else ranks
        else:
            lines.append(line.rstrip("\\"))
    try:
        words = shlex.split("\n".join(lines), comments=True)
    except ValueError as error:
        raise refuse(Format.MEGATRON, "the file", f"arguments are words of a shell: {error}") from None
    given: dict[str, str] = {}
    name = ""
    for word in words:
        more = word.startswith("$") and ("[@]" in word or not name or bool(given[name]))  # arguments in a variable
        if more or _SCRIPT.fullmatch(word):  # an array of arguments begins or ends, a variable is set
            name = ""
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = value if equals else ""
        elif name:
            given[name] = f"{given[name]} {word}".strip()
    return given, ranks


def argument_number(name: str, value: str) -> int | float:
    """A number of an argument. Raises RequestError, by its name."""
    try:
        whole_number = value.lstrip("-").isdecimal() and len(value) < _DIGITS
        return int(value) if whole_number else float(value)
    except ValueError:
        raise refuse(Format.MEGATRON, f"--{name} {value}", "wants a number there") from None
