"""``[RUN.toml] [section.key=value ...]``: the words every command that takes a run has in common."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.launcher import is_first_of_host
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.plan.plan import Plan

__all__ = ["load", "natural", "planned", "positive", "run_file_arguments", "split_request", "writable"]


def run_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file and its overrides, one list of words called ``request``."""
    parser.add_argument(
        "request",
        nargs="*",
        metavar="RUN.toml | section.key=value",
        help="a run file (without one: the built-in demonstration run), then keys that differ from it",
    )


def load(arguments: argparse.Namespace) -> RunConfig:
    """Return the run asked for. Raises ``RequestError``."""
    from meshwright.config.load import load_run

    path, overrides = split_request(arguments.request)
    return load_run(path, overrides)


def planned(
    arguments: argparse.Namespace, launched: int | None = None, *, exactly: bool = True
) -> tuple[RunConfig, Plan]:
    """Return the run asked for and its plan, for commands that run something; torch is not needed.

    ``launched``: ranks that a launcher started; without one ``--ranks`` counts. Not ``exactly``: a run that states its
    mesh may have another number of ranks. Raises ``RequestError``.
    """
    from meshwright.arch.families import check_runs
    from meshwright.arch.resolve import arch_from_model
    from meshwright.config.built import check_built
    from meshwright.config.choices import Fill
    from meshwright.plan.resolve import resolve
    from meshwright.plan.strategies.expert import check_runs as check_experts

    run = load(arguments)
    check_built(run)
    asked: int | None = arguments.ranks
    if launched is not None and asked is not None and asked != launched:
        raise RequestError(
            f"--ranks {asked}", f"the launcher started {launched}", (f"--ranks {launched}", "no --ranks")
        )
    arch = arch_from_model(run.model)
    check_runs(arch)
    if not exactly and not isinstance(run.mesh.dp, Fill):
        launched = None
    plan = resolve(run, arch, asked if launched is None else launched)
    check_experts(plan)
    return run, plan


def positive(text: str) -> int:
    """Read an argument that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return int(text)


def writable(text: str) -> Path:
    """Read an argument that names a file to be written, which can be."""
    from meshwright.config.whole import check_writable

    if not text:
        raise argparse.ArgumentTypeError("'' is no file; a file is wanted")
    try:
        check_writable(Path(text))
    except RequestError as error:
        raise argparse.ArgumentTypeError(f"{error.value}: {error.rule}") from None
    return Path(text)


def natural(text: str) -> int:
    """Read an argument that is a number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return int(text)


def split_request(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Tell the run file from the overrides: a word without ``=`` is the file. Raises ``RequestError``.

    Of a key given twice the last value counts, with a warning.
    """
    from meshwright.config.overrides import superseded

    overrides = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word]
    for position, word in enumerate(words):
        if "=" in word.strip("=") or Path(word).exists():
            continue
        if _is_key(word.strip("=")) or word.startswith("="):
            raise _torn(words, position)
    if len(files) > 1:
        raise RequestError(" ".join(files), "are several run files; one is wanted", (files[0], "section.key=value"))
    if is_first_of_host():
        for line in superseded(overrides):
            warnings.warn(line, stacklevel=2)
    return (Path(files[0]) if files else None), overrides


def _torn(words: Sequence[str], position: int) -> RequestError:
    """Put together an override that spaces have torn apart: ``mesh.dp 2``, ``mesh.dp = 2``, ``mesh.dp= 2``."""
    start = position - 1 if words[position].startswith("=") else position
    if start < 0 or not _is_key(words[start].strip("=")):
        return RequestError(words[position], "has no key before =", ("section.key=value",))
    key = words[start].strip("=")
    given, value = [words[start]], "VALUE"
    for word in words[start + 1 : start + 3]:
        if "=" in word.strip("=") or _is_key(word):
            break
        given.append(word)
        if word.strip("="):
            value = word.strip("=")
            break
    return RequestError(" ".join(given), "an override is one word, without spaces around =", (f"{key}={value}",))


def _is_key(word: str) -> bool:
    from meshwright.config.keys import key_names

    return word in key_names()
