"""What README and docs show can be typed: run files and the commands beside them are accepted as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from meshwright.cli.commands import explain, train, verify
from meshwright.cli.parser import parse_arguments
from meshwright.cli.request import planned

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = {"train": train, "explain": explain, "verify": verify}
LINE = re.compile(
    r"^    (?:torchrun --nproc-per-node (\d+) -m )?meshwright (train|explain|verify) (.*?)(?:  .*|#.*)?$", re.M
)


def run_files(page: Path) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_is_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("")  # where a page speaks of a run file without showing it
    for text in run_files(page):
        name = re.search(r'^name = "(.*)"', text, re.M)
        assert name is not None, f"{page.name} shows a run file without a name"
        Path(f"{name[1]}.toml").write_text(text)
    for ranks, command, words in LINE.findall(page.read_text()):
        if "model.hf=" in words:  # a folder that only its reader has
            continue
        arguments = parse_arguments(COMMANDS[command], shlex.split(words))
        planned(arguments, int(ranks) if ranks else None, exactly=command != "verify")


def test_pages_show_run_files_and_commands() -> None:
    assert sum(len(run_files(page)) for page in PAGES) >= 1
    assert sum(len(LINE.findall(page.read_text())) for page in PAGES) >= 8
