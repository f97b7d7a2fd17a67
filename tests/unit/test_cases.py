"""docs/cases.md: every test that is named there exists, and every number that tests speak of is there."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "cases.md").read_text()
_ROWS = [line for line in _PAGE.splitlines() if re.match(r"\| B\d\d ", line)]


def test_every_case_has_tests_that_exist() -> None:
    numbers = [row.split()[1] for row in _ROWS]
    assert len(numbers) == len(set(numbers)) > 60
    for row in _ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"^def {test}\(", (_ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


def test_every_case_has_a_source() -> None:
    for row in _ROWS:
        found = re.search(r"\[[^\]]*#(\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/issues/(\d+)\)", row)
        assert found, row
        assert found.group(1) == found.group(2), row


def test_tests_speak_of_cases_that_are_listed() -> None:
    listed = {row.split()[1] for row in _ROWS}
    for file in (_ROOT / "tests").rglob("*.py"):
        spoken = set(re.findall(r"\bB\d\d\b", file.read_text())) if file != Path(__file__) else set()
        assert spoken <= listed, f"{file}: {spoken - listed}"
