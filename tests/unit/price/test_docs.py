"""The tables of docs/pricing.md are what the code gives now; the slow ones agree with the benchmark's own results."""

import json

import pytest
from benchmarks import price as benchmark


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["runs", "memory", "constants", "real"])
def test_tables_are_what_the_code_gives(name: str) -> None:
    part = {"runs": benchmark.runs, "memory": benchmark.memory, "constants": benchmark.constants,
            "real": benchmark.real}[name]  # fmt: skip
    assert "\n".join(part()) == benchmark.told(name), f"run python -m benchmarks.price --only {name} --write"


def test_measured_tables_are_those_of_the_results() -> None:
    kept = json.loads(benchmark.RESULTS.read_text())
    speed, agreement = kept["speed"], kept["agreement"]
    assert f"{speed['layouts_per_second']:,} a second" in benchmark.told("speed")
    for name, found in agreement.items():
        row = next(line for line in benchmark.told("agreement").splitlines() if name in line)
        assert f"| {found['layouts']} |" in row
        assert f"{100 * found['within_1_percent']:.1f} %" in row
    used = [found for name, found in agreement.items() if "used" in name]
    assert len(used) == 2
    assert all(found["within_1_percent"] == 1 for found in used)
    assert sum(found["layouts"] for name, found in agreement.items() if "all" in name) == 1000
