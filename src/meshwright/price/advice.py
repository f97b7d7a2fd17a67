"""A ranking in words: why the winner wins, what habit would have chosen and what that costs.

winner     what it spends its time on, and what one change at a time would cost
tree       the usual decision tree: one device, one node, several, many
growth     the usual order of growth: recompute and sharded data, then tensor, pipeline, context, until it fits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import log2
from typing import Any

from meshwright.config.choices import Offload, Recompute, Schedule
from meshwright.config.errors import RequestError
from meshwright.layout.axes import DEFAULT_ORDER
from meshwright.plan.strategies.tensor import legal_degrees
from meshwright.price import legal
from meshwright.price.legal import Mesh
from meshwright.price.price import Price
from meshwright.price.ranking import Ranking, Row, mesh_of, short, with_keys
from meshwright.price.request import planned
from meshwright.price.search import search
from meshwright.price.text import PART_NAMES, bytes_text, seconds_text
from meshwright.price.topology import collisions

_HABIT_BUDGET = 100_000
_MANY = 64


@dataclass(frozen=True)
class Advice:
    """What a ranking says in words."""

    ranking: Ranking

    @property
    def price(self) -> Price:
        return self.ranking.best.price

    def lines(self) -> list[str]:
        return [*self.winner(), *self.habits(), *collisions(self.price)]

    def winner(self) -> Iterator[str]:
        """What the first layout spends and needs, and what one change at a time would cost."""
        price, row = self.price, self.ranking.best
        memory, room = price.memory["reserved"], price.cluster.device.memory_bytes
        top = sorted(price.parts.items(), key=lambda part: -part[1])[:3]
        spent = ", ".join(f"{PART_NAMES[name]} {seconds / price.step_seconds:.0%}" for name, seconds in top)
        yield (
            f"{short(row.keys)}: {seconds_text(price.step_seconds)} a step (within {price.spread:.0%}), "
            f"{bytes_text(memory)} of {bytes_text(room)}; {spent}"
        )
        if price.trained_peak is not None and not price.is_folded:
            yield f"  as `meshwright train` runs it: {bytes_text(price.trained_peak)} at most"
        if price.missing:
            yield f"  `meshwright train` does not run yet: {', '.join(price.missing)}"
        yield from (f"  {line}" for line in self.changes())

    def changes(self) -> Iterator[str]:
        """The winner with one option changed, and the best of the meshes next to it."""
        keys = self.ranking.best.keys
        for words, other in _others(keys):
            yield f"{words}: {self._cost({**keys, **other})}"
        mesh = mesh_of(keys)
        near = sorted(self.ranking.best_of.items(), key=lambda item: (_distance(item[0], mesh), item[1]))
        for other_mesh, (seconds, _) in near[:4]:
            if other_mesh != mesh:
                yield f"{legal.words(other_mesh, mesh)}, the best of that mesh: {self._versus(seconds)}"

    def habits(self) -> list[str]:
        """The decision tree and the order of growth, where they differ and what that costs."""
        out = []
        for name, (why, row) in (("decision tree", self.tree), ("order of growth", self.growth)):
            if row is None:
                out.append(f"the usual {name} ({why}) finds no layout that is legal and fits")
            elif mesh_of(row.keys) == mesh_of(self.ranking.best.keys):
                out.append(f"the usual {name} ({why}) comes to the same mesh: {self._versus(row.price.step_seconds)}")
            else:
                cost = self._versus(row.price.step_seconds)
                out.append(f"the usual {name} ({why}) takes {short(row.keys)}: {cost}")
        return out

    @cached_property
    def tree(self) -> tuple[str, Row | None]:
        """One device -> data; one node -> tensor; several -> tensor inside, data between; many -> pipeline, ZeRO."""
        gpus, devices = self.ranking.gpus, self.price.cluster.node.devices
        if self._fits_alone:
            return "it fits one device, so only data parallel", self._best({"pp": 1, "tp": 1, "cp": 1})
        tp = self._tensor(min(devices, gpus))
        if gpus <= devices:
            return "one node, so tensor parallel", self._best({"tp": tp, "pp": 1, "cp": 1})
        if gpus < _MANY:
            return "several nodes, so tensor inside and data between", self._best({"tp": tp, "pp": 1, "cp": 1})
        why = f"{gpus} devices, so tensor inside, stages until it fits, ZeRO-1 between"
        return why, self._grown({"tp": tp, "cp": 1}, "pp", {"parallel.zero": 1})

    @cached_property
    def growth(self) -> tuple[str, Row | None]:
        """Recompute and sharded data, then tensor, pipeline, context, expert: the first step that fits."""
        why = "recompute and sharded data, then tensor, pipeline, context, until it fits"
        mesh = {"tp": 1, "pp": 1, "cp": 1}
        sharded = {"parallel.zero": 3, "parallel.recompute": "full"}
        for axis, most in (("tp", self.price.cluster.node.devices), ("pp", 64), ("cp", 16)):
            row = self._grown({name: size for name, size in mesh.items() if name != axis}, axis, sharded, most)
            if row is not None:
                return why, row
            mesh[axis] = self._tensor(most) if axis == "tp" else mesh[axis]
        return why, None

    @cached_property
    def _fits_alone(self) -> bool:
        fixed = {"batch.micro": 1, "parallel.offload": "none"}
        try:
            search(self.ranking.run, 1, self.ranking.cluster, top=1, fixed=fixed, budget=_HABIT_BUDGET, suggest=False)
        except RequestError:
            return False
        return True

    def _tensor(self, most: int) -> int:
        """The largest legal tensor degree of at most `most` that divides the devices."""
        degrees = legal_degrees(self.price.plan.arch)
        return max(size for size in degrees if size <= most and self.ranking.gpus % size == 0)

    def _grown(self, mesh: Mapping[str, int], axis: str, options: Mapping[str, Any], most: int = 10**6) -> Row | None:
        """The first doubling of `axis` with which something fits."""
        for size in legal.divisors(self.ranking.gpus):
            if size <= most and (row := self._best({**mesh, axis: size}, options)) is not None:
                return row
        return None

    def _best(self, mesh: Mapping[str, int], options: Mapping[str, Any] | None = None) -> Row | None:
        """The best layout with these degrees and options, in the default order; None where none fits."""
        fixed: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.items()}
        fixed |= {"mesh.order": [axis.value for axis in DEFAULT_ORDER], "parallel.offload": "none", **(options or {})}
        return self._searched(fixed)

    def _searched(self, fixed: Mapping[str, Any]) -> Row | None:
        """The best layout with these keys and those that were asked for; None where none fits."""
        asked, kept = self.ranking, {**fixed, **self.ranking.fixed}
        try:
            found = search(asked.run, asked.gpus, asked.cluster, top=1, fixed=kept, budget=_HABIT_BUDGET, suggest=False)
        except RequestError:
            return None
        return found.best

    def _cost(self, keys: Mapping[str, Any]) -> str:
        """What a run with these keys costs beside the winner."""
        try:
            run = with_keys(self.ranking.run, keys)
            plan = planned(run, self.price.plan.arch, self.ranking.gpus, self.price.cluster)
        except RequestError as error:
            return f"refused: {error.rule}"
        price = Price(plan, self.price.cluster)
        if not price.fits:
            return f"does not fit ({bytes_text(price.memory['reserved'])})"
        if not price.fits_trained:
            return f"does not fit as `meshwright train` runs it ({bytes_text(price.trained_peak or 0)})"
        return f"{self._versus(price.step_seconds)}, {bytes_text(price.memory['reserved'])}"

    def _versus(self, seconds: float) -> str:
        more = round(seconds / self.price.step_seconds - 1, 3) + 0.0  # no minus before a zero
        return f"{seconds_text(seconds)} ({more:+.1%})"


def _others(keys: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One change at a time, in words and as keys."""
    if keys["parallel.recompute"] != Recompute.NONE:
        yield "without recomputation", {"parallel.recompute": "none"}
    if keys["parallel.recompute"] != Recompute.FULL:
        yield "recomputing all", {"parallel.recompute": "full"}
    for zero in (0, 1, 3):
        if keys["parallel.zero"] != zero and keys["mesh.dp"] * keys["mesh.cp"] * keys["mesh.ep"] > 1:
            plain = {"parallel.zero_shard_within": 0, "parallel.reshard_after_forward": True}
            yield f"ZeRO-{zero}", {"parallel.zero": zero, **(plain if zero != 3 else {})}
    if keys["parallel.zero_shard_within"]:
        yield "sharded over all replicas", {"parallel.zero_shard_within": 0}
    if keys["mesh.pp"] > 1 and keys["parallel.schedule"] != Schedule.ONE_F_ONE_B:
        yield "1f1b", {"parallel.schedule": "1f1b", "parallel.chunks": 1, "parallel.stages": "balanced"}
    if keys["mesh.tp"] > 1 and keys["parallel.sequence"]:
        yield "without sequence parallel", {"parallel.sequence": False, "parallel.asynchronous_tensor": False}
    if keys["batch.micro"] > 1:
        yield f"micro-batch {keys['batch.micro'] // 2}", {"batch.micro": keys["batch.micro"] // 2}
    yield f"micro-batch {keys['batch.micro'] * 2}", {"batch.micro": keys["batch.micro"] * 2}
    if keys["parallel.offload"] != Offload.NONE:
        yield "all states on the device", {"parallel.offload": "none"}
    if list(keys["mesh.order"]) != [axis.value for axis in DEFAULT_ORDER]:
        yield "in the default order of axes", {"mesh.order": [axis.value for axis in DEFAULT_ORDER]}


def _distance(one: Mesh, other: Mesh) -> float:
    """How many times degrees must be doubled or halved."""
    return sum(abs(log2(a / b)) for a, b in zip(one, other, strict=True))
