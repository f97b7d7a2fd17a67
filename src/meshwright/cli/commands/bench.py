"""``meshwright bench``: the benchmarks of the source checkout, ours beside plain PyTorch and peers, as ratios."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any, NoReturn

from meshwright.cli import request
from meshwright.cli.benchmarks import ALL, Benchmark, choose, find_folder, listing, read, words
from meshwright.cli.launcher import place_of_launcher, told_once
from meshwright.cli.output import print_error, print_json, print_styled
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.launch.environment import Place
    from meshwright.launch.status import RankStatus

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "bench"
HELP = "run this project's own benchmarks beside plain PyTorch and peers, as ratios of CPU seconds"
EXAMPLES = """\
meshwright bench                     a short selection, a minute and a half on two cores
meshwright bench --list              everything there is, how long it takes, and its bars
meshwright bench zero                every pair of one benchmark
meshwright bench tensor.tp2 zero.stage3 --rounds 9
meshwright bench zero --ranks 4 --json
torchrun --nproc-per-node 4 -m meshwright bench zero      on the ranks of a launcher: torchrun, srun
meshwright bench all                 six minutes on two cores"""

_ROUNDS = 5
_STOP_S = 5.0
_SIGTERM_CODE = 128 + signal.SIGTERM
_HEAD = ("pair", "ours CPU s", "theirs CPU s", "ratio", "lowest .. highest", "bar", "met", "beside")
_STYLES = {r"^pair .*": "bold", r"(?<=  )yes(?=  )": "green", r"(?<=  )no(?=  )|\bfailed\b": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the names of benchmarks and pairs."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help=f"a benchmark (zero), a pair of it (zero.stage0), or {ALL}; without one a short selection runs, "
        "one or two pairs each of zero, tensor and pipeline",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="tell what there is, and start nothing")
    parser.add_argument(
        "--rounds", type=request.positive, metavar="N", help=f"paired rounds, after warming up (default: {_ROUNDS})"
    )
    parser.add_argument(
        "--ranks", type=request.positive, metavar="N",
        help="ranks to start on this machine (default: the pair's own, 2 for most); of a benchmark, its pairs that run "
        "on N",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run them one after the other; 0, or 1 where one failed to run. A bar that is missed is told and is no failure."""
    import meshwright

    place = place_of_launcher()
    with told_once(place):
        folder = find_folder(Path(meshwright.__file__).parent)
        catalogue = read(folder)
        chosen = () if arguments.list else _chosen(catalogue, arguments, place)
        if arguments.list:
            return _list(catalogue, arguments) if place is None or place.rank == 0 else 0
    if place is None:
        return _show(_measure(chosen, arguments, folder.parent), arguments.json)
    from meshwright.launch.local import exit_code, run_here

    found: list[dict[str, Any]] = []
    code = exit_code(lambda: found.append(run_here(_take_place, place, chosen, arguments, folder.parent)))
    if code or place.rank:
        return code or (0 if found[0]["ok"] else 1)
    return _show(found[0], arguments.json)


def _chosen(
    catalogue: Sequence[Benchmark], arguments: argparse.Namespace, place: Place | None
) -> tuple[Benchmark, ...]:
    """What was asked for. On a launcher's ranks: what runs on so many."""
    ranks = arguments.ranks
    if place is not None:
        if ranks not in (None, place.world):
            raise RequestError(
                f"--ranks {ranks}", f"the launcher started {place.world}", (f"--ranks {place.world}", "no --ranks")
            )
        ranks = place.world
    chosen = choose(catalogue, arguments.names, ranks)
    if arguments.rounds is not None and all(each.tables for each in chosen):
        raise RequestError(f"--rounds {arguments.rounds}", f"{chosen[0].name} has no rounds", ("no --rounds",))
    return chosen


def _take_place(
    place: Place, status: RankStatus, chosen: Sequence[Benchmark], arguments: argparse.Namespace, root: Path
) -> dict[str, Any]:
    """Be one of a launcher's ranks. Its scripts meet those of the others in a store that outlives them: a script is a
    process of its own for each rank, as it is without a launcher."""
    from meshwright.launch.join import meet

    status.at(None, "start-up")
    store = meet(place)
    status.at(None, "benchmarks")
    found = _measure(chosen, arguments, root, place)
    store.set(f"done/{place.rank}", "")
    if place.rank == 0:  # it may serve the store
        with suppress(RuntimeError):  # a rank that is gone needs it no more
            store.wait([f"done/{rank}" for rank in range(place.world)], timedelta(seconds=_STOP_S))
    return found


def _measure(
    chosen: Sequence[Benchmark], arguments: argparse.Namespace, root: Path, place: Place | None = None
) -> dict[str, Any]:
    """What the scripts of the chosen benchmarks found."""
    rounds = arguments.rounds or _ROUNDS
    ranks = arguments.ranks if place is None else place.world
    found: dict[str, Any] = {"ok": True, "rounds": rounds, "hardware": {}, "pairs": {}, "tables": {}, "failed": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _sigterm_raises():
        for benchmark in chosen:
            file = Path(folder, f"{benchmark.name}.json")
            code = _start(words(benchmark, ranks, rounds, file), root, folder, place)
            if code and (place is None or place.rank == 0):
                print_error(f"{benchmark.name}: its script ended with exit code {code}")
            _collect(found, benchmark, json.loads(file.read_text()) if file.exists() else {})
    found["ok"] = not found["failed"]
    return found


def _show(found: dict[str, Any], as_json: bool) -> int:
    """Print the table or the object, and return the exit code."""
    if as_json:
        print_json(found)
    else:
        print_styled("\n".join(_told(found)), _STYLES, sys.stdout)
    return 0 if found["ok"] else 1


def _list(catalogue: Sequence[Benchmark], arguments: argparse.Namespace) -> int:
    if arguments.names or arguments.ranks or arguments.rounds:
        raise RequestError("--list", "tells everything there is and takes nothing else", ("meshwright bench --list",))
    if arguments.json:
        from dataclasses import asdict

        print_json({"benchmarks": [asdict(benchmark) for benchmark in catalogue]})
    else:
        print_styled("\n".join(listing(catalogue)), {r"(?m)^\w+(?=:)": "bold"}, sys.stdout)
    return 0


def _start(arguments: Sequence[str], root: Path, scratch: str, place: Place | None = None) -> int:
    """Run a script to its end; what it prints is progress, so goes to standard error. Its ranks end with this process.

    At a launcher's ``place`` it is one rank itself, and rank 0's tells the progress. Its temporary files lie in
    ``scratch``: they go too where it had to be killed.
    """
    from meshwright.launch.environment import snapshot, snapshot_of

    environment = (snapshot() if place is None else snapshot_of(place)) | {"TMPDIR": scratch}
    command, progress = [sys.executable, *arguments], sys.__stderr__ if place is None or not place.rank else DEVNULL
    with subprocess.Popen(command, cwd=root, stdout=progress, env=environment, start_new_session=True) as script:
        try:
            return script.wait()
        except BaseException:
            _end(script)
            raise


def _end(script: subprocess.Popen[bytes]) -> None:
    """End a script with its ranks, which are its process group."""
    with suppress(ProcessLookupError):
        os.killpg(script.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            script.wait(_STOP_S)
        os.killpg(script.pid, signal.SIGKILL)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM leave as SIGINT does, through every ``finally``, with its own exit code."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(_SIGTERM_CODE)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _collect(found: dict[str, Any], benchmark: Benchmark, written: dict[str, Any]) -> None:
    """Add what a script has written; a pair that it did not get to has failed."""
    found["hardware"] |= written.get("hardware", {})
    for pair in benchmark.pairs:
        if benchmark.tables and pair.name in written.get("tables", {}):
            figures = written["figures"].get(pair.name, {})
            found["tables"][pair.word] = {"text": written["tables"][pair.name], "figures": figures}
        elif pair.name in written.get("pairs", {}):
            row = written["pairs"][pair.name]
            found["pairs"][pair.word] = row | {"met": None if row["bar"] is None else row["cpu_ratio"] <= row["bar"]}
        else:
            found["failed"].append(pair.word)


def _told(found: dict[str, Any]) -> Iterator[str]:
    """The table of pairs, what they were measured on, and tables as their benchmark writes them."""
    rows = [_row(word, row) for word, row in found["pairs"].items()]
    if rows:
        widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
        for row in (_HEAD, *rows):
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        machine = found["hardware"]
        yield (
            f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, {machine['priority']} priority; "
            f"paired rounds: {found['rounds']}"
        )
        yield "CPU seconds a step (a save, a load): median over rounds of the mean over ranks; ratio: ours / theirs"
    for word, table in found["tables"].items():
        yield f"\n{word}\n{table['text']}"
    yield from (f"{word}  failed" for word in found["failed"])


def _row(word: str, row: dict[str, Any]) -> tuple[str, ...]:
    met = {None: "-", True: "yes", False: "no"}[row["met"]]
    return (
        word,
        f"{row['ours_cpu_seconds']:.3f}",
        f"{row['theirs_cpu_seconds']:.3f}",
        f"{row['cpu_ratio']:.3f}",
        f"{row['cpu_ratio_low']:.3f} .. {row['cpu_ratio_high']:.3f}",
        "-" if row["bar"] is None else f"{row['bar']:.2f}",
        met,
        row["peer"],
    )
