"""``meshwright verify``: the parity ladder of a run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from meshwright.cli import request
from meshwright.cli.launcher import REFUSALS, place_of_launcher, told_once
from meshwright.cli.output import print_json, print_styled
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.launch.environment import Place
    from meshwright.verify.verify import Report

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "verify"
HELP = "prove a layout equal to one float64 process, one axis and feature after the other"
EXAMPLES = """\
meshwright verify mesh.dp=2
meshwright verify run.toml parallel.zero=3 --json
torchrun --nproc-per-node 4 -m meshwright verify run.toml      on the ranks of a launcher: torchrun, srun
meshwright verify run.toml --dry-run --rank 7           any rank of any world on this machine: ledger and memory
meshwright verify mesh.dp=2 --labels masks.npy          loss normalisation on your own masks, (G, S), -100 untrained"""

_HEAD = ("rung", "loss", "gradient", "norm", "update", "worst")
_STYLES = {r"\bequal$": "green", r"(?m)^.*DIFFERS.*$": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a run, its overrides, and the number of ranks."""
    request.run_file_arguments(parser)
    parser.add_argument("--ranks", type=request.positive, metavar="N", help='ranks of the run; for mesh.dp = "fill"')
    parser.add_argument("--dry-run", action="store_true", help="one rank's real program with fake tensors, no ranks")
    parser.add_argument("--rank", type=request.natural, metavar="R", help="of --dry-run (default 0)")
    parser.add_argument("--labels", metavar="FILE.npy", help="check the loss on these labels of a global batch")


def run(arguments: argparse.Namespace) -> int:
    """Climb the ladder; print a table, or the object of ``--json``. 0 where every rung is equal, else 1."""
    place = place_of_launcher()
    with told_once(place):
        _check_together(arguments)
        if place is not None:
            return _take_place(arguments, place)
    run_config, plan = request.planned(arguments)
    if arguments.dry_run or arguments.labels:
        from meshwright.cli import proofs

        device = run_config.train.device
        proof = (
            proofs.dry(plan, arguments.rank or 0, device)
            if arguments.dry_run
            else proofs.labels(plan, arguments.labels)
        )
        print_json(proof.json) if arguments.json else print_styled("\n".join(proof.lines), _STYLES, sys.stdout)
        return 0 if proof.ok else 1
    from meshwright.launch.local import exit_code
    from meshwright.verify.verify import verify

    reports: list[Report] = []
    code = exit_code(lambda: reports.append(verify(plan, device=run_config.train.device.value, say=_say)))
    return code or _show(reports[0], arguments.json)


def _check_together(arguments: argparse.Namespace) -> None:
    """Raise RequestError for options of which one would be passed over."""
    if arguments.dry_run and arguments.labels:
        raise RequestError("--dry-run with --labels", "are two proofs, each by itself", ("--dry-run", "--labels"))
    if arguments.rank is not None and not arguments.dry_run:
        raise RequestError(
            f"--rank {arguments.rank}", "is of a dry run; the ladder climbs with all ranks", ("--dry-run",)
        )


def _take_place(arguments: argparse.Namespace, place: Place) -> int:
    """Be one of a launcher's ranks: rank 0 shows the report, all leave with its exit code."""
    if arguments.dry_run or arguments.labels:
        asked = "--dry-run" if arguments.dry_run else f"--labels {arguments.labels}"
        raise RequestError(asked, "is no work for a launcher's ranks", ("meshwright verify, without a launcher",))
    run_config, plan = request.planned(arguments, place.world, exactly=False)
    from meshwright.launch.local import exit_code, run_here
    from meshwright.verify.launched import twin_for, verify_launched

    small, told = twin_for(plan, place.world)
    found: list[tuple[bool, Report | None]] = []
    given = (small, told, run_config.train.device, _say)
    code = exit_code(lambda: found.append(run_here(verify_launched, place, *given, refusals=REFUSALS)))
    if code:
        return code
    ok, report = found[0]
    return _show(report, arguments.json) if report is not None else 0 if ok else 1


def _show(report: Report, as_json: bool) -> int:
    """Print the table or the object, and return the exit code."""
    if as_json:
        print_json(report.to_json())
    else:
        print_styled(_table(report), _STYLES, sys.stdout)
    return 0 if report.ok else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(report: Report) -> str:
    """One row a rung, its figures of difference, and what differs first."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for outcome in report.outcomes:
        figures = (f"{value:.1e}" for value in (outcome.loss, outcome.gradient, outcome.norm, outcome.update))
        rows.append((outcome.rung.name, *figures, outcome.worst))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    verdicts = ["", *("equal" if outcome.ok else "DIFFERS" for outcome in report.outcomes)]
    lines = [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), verdict)).rstrip()
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    for outcome in report.outcomes:
        if outcome.first is not None:
            lines.append(f"{outcome.rung.name}: first {outcome.first}")
    tolerance = max(outcome.band.gradient for outcome in report.outcomes)
    lines.append("each figure: max|a-b| / max(max|b|, 1e-3 M), the largest over all tensors; at most 1e-12 in float64")
    if tolerance > 1e-12:
        lines.append(f"the precision rung stays within the band of its rounding: {tolerance:.1e} for gradients")
    return "\n".join(lines)
