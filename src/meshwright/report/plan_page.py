"""A ranking as one page: data and pictures in, a single file out that needs nothing else and no network.

page/page.html   the frame
page/style       its looks, light, dark, printed
page/script      table, filters, plots, and the what-if arithmetic, from the data embedded in the page
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from meshwright.arch.arithmetic import parameters
from meshwright.config.choices import Schedule
from meshwright.config.counted import counted
from meshwright.layout.axes import Axis, Degrees
from meshwright.plan.canonical import canonical
from meshwright.plan.folds.timeline import planned_timeline
from meshwright.plan.plan import Plan
from meshwright.plan.schedules import Work
from meshwright.price.advice import Advice
from meshwright.price.failures import written_bytes
from meshwright.price.layouts import of_plan
from meshwright.price.memory import by_stage
from meshwright.price.price import Price
from meshwright.price.ranking import Row, short
from meshwright.price.simulate import Clock
from meshwright.price.text import PART_NAMES
from meshwright.price.topology import collisions, topology
from meshwright.price.weights import weights
from meshwright.report.schedule import colours_told, draw_svg
from meshwright.report.style import style

__all__ = ["page_data", "plan_page", "timeline"]

_DRAWN = 30_000  # actions of units that a timeline is worth
_NODES = 8  # nodes that the map shows
_SCRIPTS = ("words", "state", "whatif", "table", "chosen", "pareto", "mesh", "lists", "main")
"""In this order, as one script: each uses what those before it define."""


def plan_page(advice: Advice) -> str:
    """The page of a ranking, as HTML."""
    data = json.dumps(page_data(advice), allow_nan=False).replace("<", "\\u003c")
    title = f"{advice.ranking.run.model.preset or advice.ranking.run.name} on {counted(advice.ranking.gpus, 'device')}"
    plan = advice.price.plan
    works = [work for work in Work if work is not Work.WEIGHT or plan.pipeline.schedule.is_split]
    key = colours_told(works) if plan.degrees.pp > 1 else ""
    parts = {"TITLE": escape(title), "CSS": style(), "TIMELINE": timeline(plan, advice.price), "KEY": key,
             "JS": _script(), "DATA": data}  # fmt: skip
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], _part("page.html"))


def page_data(advice: Advice) -> dict[str, Any]:
    """What the page computes with. Plain numbers, seconds and bytes."""
    ranking, price = advice.ranking, advice.price
    cluster, plan = ranking.cluster, price.plan
    rows = {tuple(row.words): row for row in (*ranking.rows, *ranking.pareto)}
    front = {tuple(row.words) for row in ranking.pareto}
    ordered = sorted(rows.items(), key=lambda item: item[1].price.step_seconds)
    return {
        "model": {"name": ranking.run.model.preset or plan.arch.family, "parameters": parameters(plan.arch),
                  "tokens": plan.batch.sequences * plan.data.sequence_length},
        "cluster": {"name": cluster.name, "device": cluster.device.name, "room": cluster.device.memory_bytes,
                    "devices": cluster.node.devices, "dollars": cluster.price.dollars_per_device_hour,
                    "host": cluster.node.host_bytes_per_s},
        "gpus": ranking.gpus, "counts": dict(ranking.counts), "seconds": ranking.seconds, "by": ranking.by.value,
        "spread": price.spread, "parts": PART_NAMES,
        "rows": [_row(row, words in front) for words, row in ordered],
        "meshes": [{"mesh": list(mesh), "seconds": seconds, "bytes": size}
                   for mesh, (seconds, size) in ranking.best_of.items()],
        "refused": [each.to_json() for each in ranking.refused[:2000]],
        "advice": advice.lines(),
        "collisions": collisions(price),
        "map": _map(price),
    }  # fmt: skip


def _row(row: Row, front: bool) -> dict[str, Any]:
    price = row.price
    return {
        "short": short(row.keys), "words": row.words,
        "mesh": {axis.value: price.plan.degrees.on(axis) for axis in Axis},
        "zero": price.plan.sharding.stage, "micro": price.plan.batch.micro, "schedule": _schedule(price.plan),
        "recompute": price.plan.execution.recompute.value, "seconds": price.step_seconds, "mfu": price.mfu,
        "peak": price.memory["peak"], "reserved": price.memory["reserved"], "dollars": price.dollars_per_step,
        "written": written_bytes(price),
        "trained": None if price.is_folded else price.trained_peak,
        "parts": dict(price.parts), "front": front, "stages": _stages(price),
        "lanes": [lane.to_json() for lane in topology(price)],
    }  # fmt: skip


def _schedule(plan: Plan) -> str:
    return plan.pipeline.schedule.value if plan.degrees.pp > 1 else "-"


def _stages(price: Price) -> list[dict[str, Any]]:
    """Bytes by category of the first, the fullest inner and the last pipeline stage."""
    one, pp = of_plan(price.plan), price.plan.degrees.pp
    found = by_stage(price.target, one, weights(price.target, one))
    names = ["every stage"] if pp == 1 else ["first", "inner", "last"]
    kept = [0] if pp == 1 else [0, 2] if pp == 2 else [0, 1, 2]
    return [
        {"name": f"{names[place]} stage" if pp > 1 else "a rank",
         "bytes": {name: float(value[0]) for name, value in found[place].items()}}
        for place in kept
    ]  # fmt: skip


def _map(price: Price) -> dict[str, Any]:
    """Coordinates of the ranks of the first nodes, and what each group sends in a step."""
    degrees, devices = price.plan.degrees, price.cluster.node.devices
    shown = range(min(degrees.ranks, devices * _NODES, 256))
    sent: dict[str, int] = {}
    for row in price.traffic:
        sent[row.group.value] = sent.get(row.group.value, 0) + row.sent_bytes
    return {
        "axes": [axis.value for axis in degrees.order if degrees.on(axis) > 1],
        "ranks": [{axis.value: degrees.coordinates(rank).on(axis) for axis in degrees.order} for rank in shown],
        "devices": devices,
        "sent": sent,
    }


def timeline(plan: Plan, price: Price) -> str:
    """The pipeline of the winner as SVG: enough micro-batches to see it fill, work and drain."""
    pp = plan.degrees.pp
    if pp == 1:
        return "<p>No pipeline: every rank works through its micro-batches alone.</p>"
    micros = min(plan.accumulation, 2 * pp + (1 if plan.pipeline.schedule is Schedule.ZB_V else 0))
    if plan.pipeline.schedule is Schedule.INTERLEAVED:
        micros = min(plan.accumulation, 2 * pp)
    if plan.arch.num_units * micros > _DRAWN:
        return f"<p>{pp} stages are too many to draw.</p>"
    lone = replace(
        plan,
        degrees=Degrees(pp=pp),
        batch=replace(plan.batch, sequences=plan.batch.micro * micros),
        sharding=replace(plan.sharding, stage=0, within=0, reshard_after_forward=True),
        execution=replace(
            plan.execution, sequence=False, asynchronous_tensor=False, offload=type(plan.execution.offload).NONE
        ),
    )
    drawn = planned_timeline(canonical(lone), Clock(plan, price.target))
    told = f"{micros} of {plan.accumulation} micro-batches" if micros < plan.accumulation else f"{micros} micro-batches"
    svg = re.sub(r"<style>.*?</style>", "", draw_svg({told: drawn}), count=1)
    return svg.replace("<svg ", '<svg class="timeline" role="img" aria-label="pipeline timeline" ', 1)


def _script() -> str:
    body = "\n".join(_part(f"script/{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{body}}})();\n'


def _part(name: str) -> str:
    return (files("meshwright.report") / "page" / name).read_text(encoding="utf-8")
