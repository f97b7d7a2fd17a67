"""``meshwright estimate``: what a layout costs, without starting anything."""

from __future__ import annotations

import argparse
import sys

from meshwright.cli import request
from meshwright.cli.output import print_json, print_styled
from meshwright.config.errors import RequestError

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "estimate"
HELP = "price one layout: memory, traffic and time of a step on one kind of cluster"
EXAMPLES = """\
meshwright estimate run.toml
meshwright estimate model.preset=llama3-70b mesh.tp=8 batch.global=512 batch.micro=1 data.sequence_length=8192 \\
    precision.compute=bfloat16 parallel.zero=3 --cluster h100-sxm --gpus 512
meshwright estimate run.toml --cluster mine.toml cluster.network.measured_bytes_per_s=2e10
meshwright estimate run.toml --why memory.activations
meshwright estimate run.toml --cluster b200-sxm --gpus 64 --json"""

_STYLES = {r"(?m)^(time of a step|memory of a rank|traffic of rank)": "bold", r"DOES NOT FIT": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, overrides (``cluster.*`` among them), the cluster, and what to explain."""
    request.run_file_arguments(parser)
    parser.add_argument("--cluster", default="local", metavar="NAME|FILE", help="a cluster of the catalogue, or a file")
    parser.add_argument(
        "--gpus", type=request.positive, metavar="N", help="devices; dp is what the other degrees leave"
    )
    parser.add_argument("--rank", type=request.natural, default=0, metavar="R", help="the rank whose traffic is shown")
    parser.add_argument("--why", metavar="FIGURE", help="formula, numbers and source of one figure: memory.activations")
    parser.add_argument("--simulate", action="store_true", help="run the step's program through the model as well")


def run(arguments: argparse.Namespace) -> int:
    """Print; 0."""
    from meshwright.price.explain import explain
    from meshwright.price.price import Price
    from meshwright.price.request import requested
    from meshwright.price.simulate import simulated_seconds

    path, words = request.split_request(arguments.request)
    _, plan, cluster = requested(path, words, arguments.cluster, arguments.gpus)
    ranks = plan.degrees.ranks
    if arguments.rank >= ranks:
        raise RequestError(f"--rank {arguments.rank}", f"the mesh has {ranks} ranks", (f"0 to {ranks - 1}",))
    price = Price(plan, cluster, arguments.rank)
    seconds = simulated_seconds(plan, cluster) if arguments.simulate else None
    if arguments.json:
        print_json(price.to_json() | ({} if seconds is None else {"simulated_seconds": seconds}))
    elif arguments.why is not None:
        print_styled("\n".join(explain(price, arguments.why)), {}, sys.stdout)
    else:
        lines = str(price) + (f"\n\nthe simulated program takes {seconds:.4g} s" if seconds is not None else "")
        print_styled(lines, _STYLES, sys.stdout)
    return 0
