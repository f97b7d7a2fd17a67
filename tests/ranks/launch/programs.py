"""Programs of the launch tests, in processes of their own: `python -m tests.ranks.launch.programs FOLDER NAME WORLD`.

Several NAME WORLD are launched one after the other. Of each, FOLDER/NAME-WORLD has what it printed (`out`, `err`), what
`exit_code` made of it (`code`), and when it was over (the time of `ended`). Like the command, a program starts the fork
server before it imports torch itself.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.launch.environment import detect
from meshwright.launch.forkserver import start_server
from meshwright.launch.local import exit_code, run_here, run_ranks


def _named(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module("tests.ranks.launch.calls"), name)
    return function


@contextmanager
def _printing_into(folder: Path) -> Iterator[None]:
    """Standard output and error, of this process and of those it starts, in files."""
    kept = [os.dup(stream) for stream in (1, 2)]
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream, copy in enumerate(kept, start=1):
            os.dup2(copy, stream)
            os.close(copy)


def _launch(name: str, world: int, folder: Path) -> int:
    mistakes = (_named("MistakeError"),)
    folder.mkdir()
    with _printing_into(folder):
        code = exit_code(lambda: print(run_ranks(_named(name), world, str(folder), mistakes=mistakes)))
    (folder / "code").write_text(str(code))
    (folder / "ended").write_text("")  # what follows is this process's own end, torch and all
    return code


def main() -> int:
    place = detect()
    if place is not None:
        return exit_code(lambda: run_here(_named(sys.argv[1]), place))
    start_server()
    folder, names, worlds = Path(sys.argv[1]), sys.argv[2::2], sys.argv[3::2]
    codes = [_launch(name, int(world), folder / f"{name}-{world}") for name, world in zip(names, worlds, strict=True)]
    return codes[-1]


if __name__ == "__main__":
    sys.exit(main())
