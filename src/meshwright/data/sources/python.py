"""The built-in corpus: the standard library's sources of the interpreter that runs."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from meshwright.config.errors import RequestError

_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
)


def python_sources(folder: Path | None = None) -> tuple[Path, ...]:
    """The .py files of the standard library, sorted by path, without tests and installed packages.

    The corpus differs between Python versions, so runs print its digest. Raises RequestError where the interpreter
    carries no sources (a zipped or frozen installation).
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found: list[tuple[str, Path]] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        files = [Path(place, name) for name in names if name.endswith(".py")]
        found += [(file.relative_to(folder).as_posix(), file) for file in files]
    if not found:
        raise RequestError(
            'data.source = "python"',
            f"means the sources of the standard library, and {folder} holds none",
            ["text files of your own"],
        )
    return tuple(file for _, file in sorted(found))
