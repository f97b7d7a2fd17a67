"""What ``bench`` can run, from the catalogue beside the benchmarks, and which of it a request names. No processes."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from meshwright.config.errors import RequestError

__all__ = ["ALL", "Benchmark", "Pair", "choose", "find_folder", "listing", "read", "words"]

ALL = "all"
_FILE = "catalogue.toml"


@dataclass(frozen=True)
class Pair:
    """Two sides that take steps in turn, or one table.

    ``ranks``      numbers of ranks that it runs on, the usual one first
    ``bars``       by number of ranks: what the ratio of CPU seconds, ours / theirs, may be at most
    ``needs``      a package that must be there besides the requirements; may be empty
    ``named_only`` it runs where it is named and not as part of its benchmark
    """

    benchmark: str
    name: str
    peer: str
    ranks: tuple[int, ...]
    bars: Mapping[int, float]
    needs: str = ""
    named_only: bool = False

    @property
    def word(self) -> str:
        """What is typed for it."""
        return f"{self.benchmark}.{self.name}"


@dataclass(frozen=True)
class Benchmark:
    """One script and its pairs. ``seconds``: of a pair of five rounds; ``tables``: it has tables instead of pairs."""

    name: str
    about: str
    seconds: float
    pairs: tuple[Pair, ...]
    default: tuple[str, ...] = ()
    tables: bool = False


def find_folder(package: Path) -> Path:
    """Return the folder of benchmarks of the source checkout that holds ``package``. Raises RequestError."""
    folder = package.parent.parent / "benchmarks"
    if not (folder / _FILE).is_file():
        raise RequestError(
            "bench", f"needs the benchmarks of a source checkout, and there is no {folder / _FILE}",
            ("pip install --editable . in a clone",),
        )  # fmt: skip
    return folder


def read(folder: Path) -> tuple[Benchmark, ...]:
    """Return the catalogue."""
    text = (folder / _FILE).read_text(encoding="utf-8")
    return tuple(_benchmark(name, table) for name, table in tomllib.loads(text).items())


def _benchmark(name: str, table: Mapping[str, object]) -> Benchmark:
    fields = dict(table)
    pairs, default = fields.pop("pairs"), fields.pop("default", [])
    assert isinstance(pairs, dict)
    assert isinstance(default, list)
    return Benchmark(name, pairs=tuple(_pair(name, *item) for item in pairs.items()), default=tuple(default), **fields)  # type: ignore[arg-type]


def _pair(benchmark: str, name: str, table: Mapping[str, object]) -> Pair:
    fields = dict(table)
    ranks, bars = fields.pop("ranks"), fields.pop("bars", {})
    assert isinstance(ranks, list)
    assert isinstance(bars, dict)
    by_ranks = {int(number): bar for number, bar in bars.items()}
    return Pair(benchmark, name, ranks=tuple(ranks), bars=by_ranks, **fields)  # type: ignore[arg-type]


def choose(catalogue: Sequence[Benchmark], names: Sequence[str], ranks: int | None) -> tuple[Benchmark, ...]:
    """Return the benchmarks asked for, each with no more than the pairs asked for, in the catalogue's order.

    A name is ``all``, a benchmark, or a pair as ``tensor.tp2``; without names the catalogue's short selection counts.
    Of a benchmark and of ``all``, ``ranks`` takes the pairs that run on so many; a pair that was named must. Raises
    RequestError, also where a package is missing.
    """
    chosen = {pair.word for name in names or [""] for pair in _named(catalogue, name, ranks)}
    out = []
    for benchmark in catalogue:
        if pairs := tuple(pair for pair in benchmark.pairs if pair.word in chosen):
            for pair in pairs:
                if pair.needs and find_spec(pair.needs) is None:
                    raise RequestError(
                        pair.word, f"needs {pair.needs}, which is not installed", (f"pip install {pair.needs}",)
                    )
            out.append(replace(benchmark, pairs=pairs))
    return tuple(out)


def _named(catalogue: Sequence[Benchmark], name: str, ranks: int | None) -> tuple[Pair, ...]:
    """The pairs of one word, of which there is at least one."""
    every = {pair.word: pair for benchmark in catalogue for pair in benchmark.pairs}
    groups = {each.name: [pair for pair in each.pairs if not pair.named_only] for each in catalogue}
    groups[ALL] = [pair for pairs in groups.values() for pair in pairs]
    groups[""] = [every[f"{each.name}.{pair}"] for each in catalogue for pair in each.default]
    if name not in groups and name not in every:
        near = [word for word in every if word.partition(".")[2] == name]
        near = near or difflib.get_close_matches(name, [*filter(None, groups), *every], n=3, cutoff=0.5)
        raise RequestError(name, "is no benchmark", near or [*filter(None, groups), "--list"])
    asked = groups.get(name) or [every[name]]
    fitting = tuple(pair for pair in asked if ranks is None or ranks in pair.ranks)
    if not fitting:
        works = sorted({number for pair in asked for number in pair.ranks})
        told = name or "what runs without a name"
        raise RequestError(
            f"--ranks {ranks}", f"{told} runs on {' or '.join(map(str, works))}", [f"--ranks {n}" for n in works]
        )
    return fitting


def words(benchmark: Benchmark, ranks: int | None, rounds: int, file: Path) -> list[str]:
    """What the script is started with, after the interpreter, in the checkout's root; it writes ``file``."""
    names = [pair.name for pair in benchmark.pairs]
    if benchmark.tables:
        return ["-m", f"benchmarks.{benchmark.name}", "--only", *names, "--json", str(file)]
    asked = ["--pairs", *names, "--rounds", str(rounds), "--json", str(file)]
    if any(len(pair.ranks) > 1 for pair in benchmark.pairs):
        asked += ["--ranks", str(ranks or benchmark.pairs[0].ranks[0])]
    return [f"benchmarks/{benchmark.name}.py", *asked]


def listing(catalogue: Sequence[Benchmark]) -> Iterator[str]:
    """A line a benchmark and a line a pair: how long, beside what, on how many ranks, and the bar."""
    for benchmark in catalogue:
        num_usual = sum(not pair.named_only for pair in benchmark.pairs)
        minutes = num_usual * benchmark.seconds / 60
        yield f"{benchmark.name}: {benchmark.about}, about {minutes:.1f} minutes"
        for pair in benchmark.pairs:
            bars = ", ".join(f"{bar:.2f} on {number}" for number, bar in pair.bars.items())
            notes = [
                f"ranks {' '.join(map(str, pair.ranks))}" if not benchmark.tables else "",
                f"bar {bars}" if bars else "",
                f"needs {pair.needs}" if pair.needs else "",
                "only where named" if pair.named_only else "",
                "default" if pair.name in benchmark.default else "",
            ]
            yield f"  {pair.word:<26}{pair.peer:<32}{'; '.join(filter(None, notes))}"
