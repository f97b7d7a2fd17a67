"""The walls of the project, read from the source without importing it. What is allowed is a table at the top."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit import walls

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "src" / "meshwright"
_FILES = sorted(_PACKAGE.rglob("*.py"))


def _names(files: list[Path]) -> list[str]:
    return [str(file.relative_to(_PACKAGE)) for file in files]


@pytest.mark.parametrize("file", _FILES, ids=_names(_FILES))
def test_a_file_keeps_the_walls(file: Path) -> None:
    found = walls.violations(file.relative_to(_PACKAGE), file.read_text())
    assert not found, "\n".join(f"{file.relative_to(_ROOT)}:{line}" for line in found)


def test_every_package_has_its_place() -> None:
    packages = {folder.name for folder in _PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert packages <= set(walls.MAY_IMPORT), "give the new package its place in MAY_IMPORT"


_IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch, itself or through another module"
"""


def test_what_stands_above_torch_leaves_it_alone() -> None:
    """Every module above the line and of the command, imported for real: catches torch behind any chain of imports."""
    above = [file for file in _FILES if len(file.relative_to(_PACKAGE).parts) == 1 or _package(file) in walls.NO_TORCH]
    modules = [
        ".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts) for file in above if file.stem != "__main__"
    ]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, "meshwright", *modules], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _package(file: Path) -> str:
    return file.relative_to(_PACKAGE).parts[0]


def test_help_answers_at_once_and_leaves_torch_alone() -> None:
    begin = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "meshwright", "--help"], capture_output=True, text=True, timeout=60
    )
    seconds = time.monotonic() - begin
    assert told.returncode == 0, told.stderr[-2000:]
    assert "train" in told.stdout
    imported = {line.rsplit("|", 1)[1].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}
    assert "meshwright" in imported
    assert "torch" not in imported
    assert seconds < 2


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [_ROOT / name for name in listed.stdout.split("\0") if name]


def test_tracked_files_hold_no_words_of_a_workplace() -> None:
    found = []
    for file in _tracked():
        try:
            text = file.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{file.relative_to(_ROOT)}:{line}" for line in walls.foreign_words(text)]
    assert not found, "\n".join(found)
