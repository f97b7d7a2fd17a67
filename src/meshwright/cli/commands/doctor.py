"""``meshwright doctor``: what this machine or cluster offers, and, calibrated, the cluster file that prices use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.cli import request
from meshwright.cli.launcher import place_of_launcher, told_once
from meshwright.cli.output import print_json, print_styled
from meshwright.config.counted import counted
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.config.schema import RunConfig
    from meshwright.plan.plan import Plan
    from meshwright.price.calibration import Measured

_BLOCKS = 2
_MICROS = (1, 4)
_TIERS = ("inside", "across", "alone")

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "doctor"
HELP = "tell what this machine or cluster offers; measure its links and, with --calibrate, its rates"
EXAMPLES = """\
meshwright doctor                             devices, limits, versions, links of two ranks
meshwright doctor mesh.dp=2 mesh.tp=2         latency and bandwidth of every axis of this mesh
meshwright doctor --calibrate                 measures rates too; prices on "local" use them from now on
meshwright doctor --calibrate --out mine.toml then: meshwright estimate run.toml --cluster mine.toml
torchrun --nproc-per-node 8 -m meshwright doctor mesh.tp=8 mesh.dp=1 --calibrate --out node.toml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a mesh, and what to measure."""
    request.run_file_arguments(parser)
    parser.add_argument(
        "--calibrate", action="store_true", help="measure matrix rates as well and write a cluster file"
    )
    parser.add_argument(
        "--out", type=request.writable, metavar="FILE", help='the cluster file (without: the one "local" is read from)'
    )


def run(arguments: argparse.Namespace) -> int:
    """Tell and measure; 0, or 1 where ranks failed."""
    from meshwright.cli.machine import facts
    from meshwright.cli.measuring import measure
    from meshwright.launch.local import exit_code, run_here, run_ranks
    from meshwright.plan.resolve import resolve_degrees
    from meshwright.price.calibration import writable_place
    from meshwright.train.machine import check_machine
    from meshwright.train.room import check_machine_room

    if arguments.out and not arguments.calibrate:
        raise RequestError("--out", "is where --calibrate writes", ("--calibrate --out FILE",))
    place = place_of_launcher()
    with told_once(place):
        run_config = request.load(arguments)
        degrees = resolve_degrees(run_config, None if place is None else place.world)
        if arguments.calibrate:
            writable_place(arguments.out)
    at = {name: getattr(degrees, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    plans = _plans(run_config) if arguments.calibrate else ()
    given: tuple[Any, ...] = (at, degrees.order, run_config.train.device.value, arguments.calibrate, plans)
    found: list[Measured] = []
    if place is None:
        check_machine(run_config.train.device, degrees.ranks)
        for plan in plans:  # every rank times the units of its own
            check_machine_room(plan, run_config.train.device, degrees.ranks)
        code = exit_code(lambda: found.extend(run_ranks(measure, degrees.ranks, *given)))
    else:
        code = exit_code(lambda: found.append(run_here(measure, place, *given)))
        if place.rank > 0:
            return code
    if code or not found:
        return code
    _tell(arguments, dict(facts()), found[0])
    return 0


def _plans(run: RunConfig) -> tuple[Plan, ...]:
    """Two runs of one rank, on micro-batches of different size, whose units say what blocks of this model take."""
    from dataclasses import replace

    from meshwright.arch.resolve import arch_from_model
    from meshwright.config.load import change_run
    from meshwright.plan.resolve import resolve

    whole = [f"mesh.{axis}=1" for axis in ("dp", "tp", "pp", "cp", "ep")]
    plain = [*whole, "parallel.zero=0", "parallel.zero_shard_within=0", "parallel.sequence=false", "parallel.chunks=1",
             "parallel.schedule=1f1b", "parallel.stages=balanced", "parallel.recompute=none", "parallel.offload=none",
             "parallel.compile=false"]  # fmt: skip
    arch = arch_from_model(run.model)
    if arch.experts is not None or arch.latent is not None or arch.alibi:
        return ()  # priced, but not run yet
    few = replace(arch, layers=min(arch.layers, _BLOCKS))
    return tuple(
        resolve(change_run(run, [*plain, f"batch.micro={micro}", f"batch.global={2 * micro}"]), few)
        for micro in _MICROS
    )


def _tell(arguments: argparse.Namespace, known: dict[str, str], measured: Measured) -> None:
    from meshwright.price.calibration import calibrated, write_cluster

    file = None
    if arguments.calibrate:
        name = arguments.out.stem if arguments.out else "local"
        file = write_cluster(calibrated(measured, name), arguments.out)
    if arguments.json:
        print_json(_object(known, measured) | {"file": None if file is None else str(file)})
        return
    print_styled("\n".join(_lines(known, measured)), {r"(?m)^\w[^\n]*:$": "bold"}, sys.stdout)
    if file is not None:
        print(f"wrote {file}" + ("" if arguments.out else '; prices on "local" use it'))


def _object(known: dict[str, str], measured: Measured) -> dict[str, Any]:
    import dataclasses

    found = dataclasses.asdict(measured)
    return {"machine": known, "measured": found, "axes": _axes(measured), "tiers": _tiers(measured)}


def _axes(measured: Measured) -> dict[str, dict[str, float]]:
    """Of the mesh that was asked for."""
    return {name: each for name, each in _links(measured).items() if name not in _TIERS}


def _tiers(measured: Measured) -> dict[str, dict[str, float]]:
    """Inside a node, across nodes, and across them alone, where rates were calibrated."""
    return {name: each for name, each in _links(measured).items() if name in _TIERS}


def _links(measured: Measured) -> dict[str, dict[str, float]]:
    from meshwright.price.calibration import fit

    out = {}
    for axis in dict.fromkeys(each.axis for each in measured.links):
        latency, rate = fit([each for each in measured.links if each.axis == axis and each.operation != "all_reduce"])
        out[axis] = {"latency_s": latency, "bytes_per_s": rate}
    return out


def _lines(known: dict[str, str], measured: Measured) -> Iterator[str]:
    yield "machine:"
    yield from (f"  {name:<16} {value}" for name, value in known.items())
    yield ""
    yield f"device:\n  {measured.device}, {measured.memory_bytes / 1e9:.1f} GB a rank"
    rate = measured.memory_bytes_per_s / 1e9
    yield f"  copies           {rate:.1f} GB/s read and written, {counted(measured.ranks, 'rank')} at once"
    if measured.products:
        yield "\nproducts, all ranks at once:"
        for each in measured.products:
            yield f"  {each.dtype:<9} {each.m:>5} x {each.n:>5} x {each.k:>5}  {each.flops_per_s / 1e9:9.1f} GFLOP/s"
    yield "\nlinks:"
    for axis, found in _links(measured).items():
        ranks = next(each.ranks for each in measured.links if each.axis == axis)
        yield f"  {axis} {ranks:<4} {found['latency_s'] * 1e6:8.1f} us a hop  {found['bytes_per_s'] / 1e9:8.2f} GB/s"
    if not measured.links:
        yield "  one rank has none: mesh.dp=2"
