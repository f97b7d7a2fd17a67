"""``meshwright explain``: the resolved plan, for all ranks or for one, without starting anything."""

from __future__ import annotations

import argparse
import shutil
import sys

from meshwright.cli import request
from meshwright.cli.output import print_json, print_styled
from meshwright.config.errors import RequestError

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "explain"
HELP = "print the resolved plan: batch arithmetic, groups, buckets, what a rank holds and sends"
EXAMPLES = """\
meshwright explain run.toml mesh.dp=4
meshwright explain mesh.dp=2 --rank 1         one rank: coordinates, peers, pieces, sends
meshwright explain mesh.pp=2 --schedule       the pipeline, drawn
meshwright explain mesh.dp=2 --program        the step, an action a line
meshwright explain mesh.dp=fill --ranks 8 --json"""

_STYLES = {r"(?m)^\w[^\n:]*:$": "bold", r"(?m)^  -[- ]*$": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, overrides, and what to explain."""
    request.run_file_arguments(parser)
    parser.add_argument("--ranks", type=request.positive, metavar="N", help='number of ranks; for mesh.dp = "fill"')
    parser.add_argument("--rank", type=request.natural, metavar="R", help="explain one rank")
    parser.add_argument("--schedule", action="store_true", help="draw the pipeline, a line a stage")
    parser.add_argument("--program", action="store_true", help="print the step program too, an action a line")


def run(arguments: argparse.Namespace) -> int:
    """Print; 0."""
    _, plan = request.planned(arguments)
    from meshwright.cli import explanation
    from meshwright.data.dataset import check_text_vocabulary

    check_text_vocabulary(plan.data, plan.arch.vocab)
    rank: int | None = arguments.rank
    if rank is not None and rank >= plan.degrees.ranks:
        raise RequestError(
            f"--rank {rank}", f"the mesh has {plan.degrees.ranks} ranks", (f"0 to {plan.degrees.ranks - 1}",)
        )
    if arguments.json:
        print_json(explanation.plan_object(plan) if rank is None else explanation.rank_object(plan, rank))
        return 0
    lines = [*(explanation.explain_plan(plan) if rank is None else explanation.explain_rank(plan, rank))]
    if arguments.schedule:
        lines += explanation.schedule_lines(plan, shutil.get_terminal_size((120, 24)).columns)
    if arguments.program:
        lines += explanation.program_lines(plan, rank or 0)
    print_styled("\n".join(lines).rstrip(), _STYLES, sys.stdout)
    return 0
