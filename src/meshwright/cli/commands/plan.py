"""``meshwright plan``: every legal layout of a model on a cluster, ranked, explained, compared."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli import request
from meshwright.cli.output import print_json, print_styled
from meshwright.config.counted import counted
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.price.advice import Advice
    from meshwright.price.legal import Refusal
    from meshwright.price.ranking import Ranking

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "plan"
HELP = "rank all legal layouts of a model on N devices, and say why"
EXAMPLES = """\
meshwright plan model.preset=llama3-8b data.sequence_length=8192 batch.global=256 precision.compute=bfloat16 \\
    --cluster h100-sxm --gpus 64
meshwright plan run.toml --gpus 64 --cluster h100-sxm --by memory
meshwright plan run.toml --gpus 64 --cluster h100-sxm mesh.tp=8      keys given here stay as they are
meshwright plan run.toml --gpus 64 --cluster h100-sxm --html plan.html
meshwright plan run.toml --gpus 64 --cluster h100-sxm --what-if --tokens 1e12 --mtbf-hours 50000
meshwright plan run.toml --gpus 64 --cluster h100-sxm --lose-node 0
meshwright plan run.toml --gpus 64 --cluster h100-sxm --write best.toml"""

_STYLES = {r"(?m)^\w[^\n]*:$": "bold", r"(?m)^ +1  .*$": "green"}
_ON_PAGE = 60
_RESTART_S = 300.0
_KEPT = ("mesh.", "parallel.", "batch.micro")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, overrides (``cluster.*`` among them), the cluster, the devices, and what to tell."""
    request.run_file_arguments(parser)
    parser.add_argument("--cluster", default="local", metavar="NAME|FILE", help="a cluster of the catalogue, or a file")
    parser.add_argument("--gpus", type=request.positive, metavar="N", help="devices (without: those of the run's mesh)")
    parser.add_argument("--by", choices=("time", "cost", "memory"), default="time", help="what layouts are ranked by")
    parser.add_argument("--top", type=request.positive, default=10, metavar="K", help="layouts shown (10)")
    parser.add_argument("--html", type=request.writable, metavar="FILE", help="write all of it as one page")
    parser.add_argument("--write", type=request.writable, metavar="FILE", help="write the best layout as a run file")
    parser.add_argument(
        "--what-if", action="store_true", help="more devices, slower links, longer sequences, other devices"
    )
    parser.add_argument("--tokens", type=_amount, metavar="N", help="price of training on so many tokens")
    parser.add_argument("--mtbf-hours", type=_amount, metavar="H", help="mean hours between failures of one device")
    parser.add_argument(
        "--restart-seconds", type=_amount, metavar="S", help=f"how long a restart takes ({_RESTART_S:g})"
    )
    parser.add_argument(
        "--checkpoint-seconds", type=_amount, metavar="S", help="how long a checkpoint blocks (without: it is priced)"
    )
    parser.add_argument(
        "--lose-rank", type=request.natural, metavar="R", help="what is lost with a rank, and who still holds it"
    )
    parser.add_argument("--lose-node", type=request.natural, metavar="K", help="the same of the ranks of a node")


def run(arguments: argparse.Namespace) -> int:
    """Search, print; 0."""
    from meshwright.config.load import load_run
    from meshwright.config.overrides import parse_overrides
    from meshwright.price.advice import Advice
    from meshwright.price.catalogue import cluster_of
    from meshwright.price.request import of_cluster
    from meshwright.price.search import search

    for name in ("restart_seconds", "checkpoint_seconds"):
        if getattr(arguments, name) is not None and arguments.mtbf_hours is None:
            raise RequestError(f"--{name.replace('_', '-')}", "is a part of goodput", ("--mtbf-hours 50000",))
    path, words = request.split_request(arguments.request)
    own, others = of_cluster(words)
    cluster, run_config = cluster_of(arguments.cluster, own), load_run(path, others)
    kept = [each for each in parse_overrides(others) if each.name.startswith(_KEPT)]
    fixed = {each.name: each.value for each in kept if each.value not in ("fill", "balanced")}
    gpus = arguments.gpus or _ranks(run_config)
    lost = list(_lost(arguments, gpus, cluster.node.devices))
    shown = max(arguments.top, _ON_PAGE) if arguments.html else arguments.top
    ranking = search(run_config, gpus, cluster, arguments.by, top=shown, fixed=fixed)
    advice = Advice(ranking)
    if arguments.write:
        _write(ranking, arguments.write)
    if arguments.html:
        from meshwright.config.whole import write_whole
        from meshwright.report.plan_page import plan_page

        write_whole(arguments.html, plan_page(advice))
        print(f"wrote {arguments.html}", file=sys.stderr)
    further = dict(_further(arguments, ranking, lost))
    if arguments.json:
        print_json(_object(advice) | {name: data for name, (data, _) in further.items()})
        return 0
    lines = list(_lines(advice, arguments.top))
    for _, told in further.values():
        lines += ["", *told]
    print_styled("\n".join(lines), _STYLES, sys.stdout)
    return 0


def _further(
    arguments: argparse.Namespace, ranking: Ranking, lost: list[tuple[str, range]]
) -> Iterator[tuple[str, tuple[Any, list[str]]]]:
    """What was asked for besides: (name, (data, lines))."""
    from meshwright.price import failures, whatif

    if arguments.what_if:
        yield "what_if", whatif.told(ranking)
    if arguments.tokens:
        yield "budget", whatif.budget_told(ranking.best.price, arguments.tokens)
    if arguments.mtbf_hours:
        took = arguments.mtbf_hours, arguments.restart_seconds or _RESTART_S, arguments.checkpoint_seconds
        yield "goodput", failures.goodput_told(ranking.best.price, *took)
    for name, gone in lost:
        yield name, failures.lost_told(ranking.best.price.plan, gone)


def _lost(arguments: argparse.Namespace, gpus: int, devices: int) -> Iterator[tuple[str, range]]:
    """The ranks that are asked to go. Raises RequestError where they are not there."""
    for name, first, count in (("lose_rank", arguments.lose_rank, 1), ("lose_node", arguments.lose_node, devices)):
        if first is None:
            continue
        gone = range(first * count, min((first + 1) * count, gpus))
        if not gone:
            most = (gpus - 1) // count
            works = f"0 to {most}" if most else "0"
            raise RequestError(f"--{name.replace('_', '-')} {first}", "is not there", (works,))
        yield name, gone


def _object(advice: Advice) -> dict[str, Any]:
    from meshwright.price.topology import topology

    ranking = advice.ranking
    return {
        "layouts": [row.to_json(rank) for rank, row in enumerate(ranking.rows, 1)],
        "refused": [each.to_json() for each in ranking.refused],
        "counts": dict(ranking.counts),
        "advice": advice.lines(),
        "seconds": ranking.seconds,
        "pareto": [row.to_json(rank) for rank, row in enumerate(ranking.pareto, 1)],
        "topology": [lane.to_json() for lane in topology(ranking.best.price)],
    }


def _lines(advice: Advice, top: int) -> Iterator[str]:
    from meshwright.price.ranking import short
    from meshwright.price.text import bytes_text, seconds_text
    from meshwright.price.topology import collisions, topology

    ranking = advice.ranking
    counts = ranking.counts
    yield (
        f"{ranking.gpus} x {ranking.cluster.device.name}: {counts['legal']:,} of {counts['enumerated']:,} layouts are "
        f"legal, {counts['priced']:,} were priced, of which {counts['fitting']:,} fit; {ranking.seconds:.1f} s"
    )
    yield ""
    yield f"by {ranking.by.value}:"
    for title, rows in (("", ranking.rows[:top]), ("nothing is better in both time and memory:", ranking.pareto)):
        if title:
            yield from ("", title)
        for rank, row in enumerate(rows, 1):
            price = row.price
            mfu = f"{price.mfu:5.1%}" if price.mfu is not None else "    -"
            dollars = f"{price.dollars_per_step:9.4f} $" if price.dollars_per_step else ""
            yield (
                f"  {rank:>2}  {seconds_text(price.step_seconds):>9}  {bytes_text(price.memory['peak']):>9}  "
                f"{mfu}  {dollars}  {short(row.keys)}"
            )
    yield from ("", "why:", *(f"  {line}" for line in advice.winner()))
    yield from ("", "habit:", *(f"  {line}" for line in advice.habits()))
    yield from ("", "links:")
    for lane in topology(ranking.best.price):
        near = f", {lane.near} neighbours in a node" if 1 < lane.near < lane.degree else ""
        yield f"  {lane.axis.value} {lane.degree:<5} {lane.link}{near}; a layer: {lane.layer}; a step: {lane.step}"
    yield from (f"  {line}" for line in collisions(ranking.best.price))
    yield from ("", "refused:", *(list(_refusals(ranking)) or ["  nothing"]))


def _refusals(ranking: Ranking) -> Iterator[str]:
    """By rule, for people: the object of ``--json`` has a row a mesh."""
    from meshwright.price.ranking import degrees_words

    rules: dict[str, list[Refusal]] = {}
    for each in ranking.refused:
        rules.setdefault(each.rule.partition(";")[0], []).append(each)
    for rule, rows in sorted(rules.items(), key=lambda item: -sum(row.count for row in item[1]))[:8]:
        example = next((row for row in rows if row.nearest), None)
        near = f"; on {degrees_words(example.mesh)}: {example.nearest[0]}" if example else ""
        layouts, meshes = sum(row.count for row in rows), counted(len({row.mesh for row in rows}), "mesh")
        yield f"  {counted(layouts, 'layout'):>20} of {meshes}: {rule}{near}"


def _write(ranking: Ranking, file: Path) -> None:
    from meshwright.config.load import dump_run
    from meshwright.config.whole import write_whole
    from meshwright.price.ranking import with_keys

    run_config = with_keys(ranking.run, ranking.best.keys)
    write_whole(file, dump_run(run_config))
    print(f"wrote {file}", file=sys.stderr)


def _ranks(run_config: RunConfig) -> int:
    mesh = run_config.mesh
    if not isinstance(mesh.dp, int):
        raise RequestError('mesh.dp = "fill"', "needs the number of devices", ("--gpus N",))
    return mesh.dp * mesh.tp * mesh.pp * mesh.cp * mesh.ep


def _amount(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e18:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is no number above 0")
