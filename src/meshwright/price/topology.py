"""Axis -> link: where each axis of a layout lies, what runs over it per layer and per step, what meets on one link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.config.choices import Context
from meshwright.layout.axes import Axis
from meshwright.plan.plan import Plan
from meshwright.price.price import Price

__all__ = ["Lane", "collisions", "topology"]


@dataclass(frozen=True, slots=True)
class Lane:
    """Where one axis lies: `near` neighbours share a node."""

    axis: Axis
    degree: int
    near: int
    link: str
    layer: str
    step: str

    def to_json(self) -> dict[str, Any]:
        return {"axis": self.axis.value, "degree": self.degree, "neighbours_in_node": self.near, "link": self.link,
                "per_layer": self.layer, "per_step": self.step}  # fmt: skip


def topology(price: Price) -> list[Lane]:
    """Of each axis that cuts something, outermost first."""
    degrees, node = price.plan.degrees, price.cluster.node
    lanes = []
    for axis in degrees.order:
        if (degree := degrees.on(axis)) > 1:
            near = node.neighbours(degrees.stride(axis), degree)
            link = "node" if near == degree else "network" if near == 1 else "node and network"
            lanes.append(Lane(axis, degree, near, link, *_runs(price.plan, axis)))
    return lanes


def collisions(price: Price) -> list[str]:
    """Axes that send at the same moment over the same link."""
    lanes = topology(price)
    if not lanes:
        return ["one rank sends nothing"]
    busy = [lane for lane in lanes if lane.link != "node"]
    names = [lane.axis.value for lane in busy]
    told = []
    if {"dp", "pp"} <= set(names):
        told.append("dp and pp meet on the network: gradient sums run while the last micro-batches still pass stages")
    inner = [name for name in ("tp", "cp", "ep") if name in names]
    if inner and price.plan.sharding.stage == 3 and ("dp" in names or "ep" in names or "cp" in names):
        told.append(f"{' and '.join(inner)} and the gathers of ZeRO-3 meet on the network in every block")
    if len(inner) > 1:
        told.append(f"{' and '.join(inner)} take turns on the network inside every block")
    return told or ["no two axes send over the same link at once"]


def _runs(plan: Plan, axis: Axis) -> tuple[str, str]:
    """What an axis does per layer and micro-batch, and per step."""
    m, zero = plan.accumulation, plan.sharding.stage
    repeated = "once" if m == 1 else f"for each of {m} micro-batches"
    match axis:
        case Axis.TP if plan.execution.asynchronous_tensor:
            told = "2 gathers and 2 scatters forward, the same backward and a gather more, in chunks under the products"
            return told, repeated
        case Axis.TP if plan.execution.sequence:
            return "2 gathers and 2 scatters forward, the same backward and a gather more", repeated
        case Axis.TP:
            return "2 all-reduces forward, 2 backward", repeated
        case Axis.PP:
            laps = f" and {plan.pipeline.chunks} chunks" if plan.pipeline.chunks > 1 else ""
            return "nothing", f"a message forward and one backward a border, {repeated}{laps}"
        case Axis.CP:
            kind = {Context.RING: "keys and values round a ring", Context.ALLGATHER: "keys and values gathered",
                    Context.ULYSSES: "4 all-to-alls a pass"}[plan.context.kind]  # fmt: skip
            return kind, "its part of gradient sums"
        case Axis.EP:
            return "2 all-to-alls a pass", "its part of gradient sums of what is no expert"
    if zero == 3:
        return "parameters gathered, gradients scattered", "the same, every micro-batch"
    return "nothing", {0: "one all-reduce of gradients"}.get(zero, "gradients scattered, parameters gathered")
