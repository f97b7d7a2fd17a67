"""What if: more devices, slower links, longer sequences, other devices; what a budget of tokens costs.

    strong    the same global batch on more devices
    weak      as many more sequences a step as devices

Every row is the best layout of a search of its own; `kept` is what the present winner would take there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config.counted import counted
from meshwright.config.errors import RequestError
from meshwright.config.schema import RunConfig
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.price import Price
from meshwright.price.ranking import Ranking, short, with_keys
from meshwright.price.request import planned
from meshwright.price.search import search
from meshwright.price.text import seconds_text

__all__ = ["Case", "budget", "budget_told", "cases", "slower", "tokens_of", "told"]

_BUDGET = 200_000
_OTHERS = ("a100-80gb-sxm", "h100-sxm", "h200-sxm", "b200-sxm", "mi300x")


@dataclass(frozen=True, slots=True)
class Case:
    """One answer. `seconds` and `tokens_per_s` are 0 where no layout is legal and fits, for the reason in `refused`;
    `kept_seconds` likewise."""

    question: str
    name: str
    gpus: int
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    efficiency: float = 0.0  # tokens a second and device over those of the present ranking
    dollars_per_billion: float = 0.0
    kept_seconds: float = 0.0
    layout: str = ""
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def cases(ranking: Ranking) -> Iterator[Case]:
    """All questions, in turn."""
    run, cluster, gpus = ranking.run, ranking.cluster, ranking.gpus
    ask = _asker(ranking)
    for factor in (0.5, 1, 2, 4):
        if (count := int(gpus * factor)) >= 1:
            yield ask("strong scaling", counted(count, "device"), run, count, cluster)
    for factor in (0.5, 1, 2, 4):
        count = int(gpus * factor)
        if batch := run.batch.global_ * count // gpus:
            more = with_keys(run, {"batch.global": batch})
            yield ask("weak scaling", f"{counted(count, 'device')}, {counted(batch, 'sequence')}", more, count, cluster)
    for factor in (0.5, 0.25):
        yield ask("slower links", f"network x {factor}", run, gpus, slower(cluster, network=factor))
        yield ask("slower links", f"node link x {factor}", run, gpus, slower(cluster, node=factor))
    for factor in (2, 4):
        length, batch = run.data.sequence_length * factor, run.batch.global_ // factor
        if batch >= 1:
            longer = with_keys(run, {"data.sequence_length": length, "batch.global": batch})
            yield ask("longer sequences", f"{length} tokens, {counted(batch, 'sequence')}", longer, gpus, cluster)
    if not cluster.device.is_cpu:
        for name in _OTHERS:
            if name != cluster.name:
                yield ask("other devices", name, run, gpus, cluster_of(name))


def slower(cluster: Cluster, network: float = 1.0, node: float = 1.0) -> Cluster:
    """The cluster with a share of its bandwidths, measured ones too."""
    net, link = cluster.network, cluster.node
    return dataclasses.replace(
        cluster,
        network=dataclasses.replace(
            net, bytes_per_s=net.bytes_per_s * network, measured_bytes_per_s=net.measured_bytes_per_s * network
        ),
        node=dataclasses.replace(
            link, link_bytes_per_s=link.link_bytes_per_s * node, measured_bytes_per_s=link.measured_bytes_per_s * node,
            reduce_bytes_per_s=link.reduce_bytes_per_s * node,
        ),
    )  # fmt: skip


def tokens_of(price: Price) -> int:
    """Tokens of a step."""
    return price.plan.batch.sequences * price.plan.data.sequence_length


def _asker(ranking: Ranking) -> Callable[[str, str, RunConfig, int, Cluster], Case]:
    now = ranking.best.price
    base = tokens_of(now) / now.step_seconds / ranking.gpus
    fixed = {key: value for key, value in ranking.fixed.items() if key != "mesh.dp"}

    def ask(question: str, name: str, run: RunConfig, gpus: int, cluster: Cluster) -> Case:
        kept = _kept(ranking, run, gpus, cluster)
        try:
            best = search(run, gpus, cluster, top=1, budget=_BUDGET, fixed=fixed, suggest=False).best
        except RequestError as error:
            return Case(question, name, gpus, kept_seconds=kept, refused=_reason(error))
        rate = tokens_of(best.price) / best.price.step_seconds
        dollars = best.price.dollars_per_step / tokens_of(best.price) * 1e9
        efficiency = rate / gpus / base
        return Case(question, name, gpus, best.price.step_seconds, rate, efficiency, dollars, kept, short(best.keys))

    return ask


def _reason(error: RequestError) -> str:
    """In one line."""
    first = error.problems[0] if error.problems else error
    return f"{first.value}: {first.rule}"


def _kept(ranking: Ranking, run: RunConfig, gpus: int, cluster: Cluster) -> float:
    """Seconds of the present layout there, dp taking what devices there are; 0 where it is illegal or does not fit."""
    old = ranking.best.keys
    fixed = int(old["mesh.tp"] * old["mesh.pp"] * old["mesh.cp"] * old["mesh.ep"])
    if gpus % fixed:
        return 0.0
    keys = {name: value for name, value in old.items() if name != "batch.global"} | {"mesh.dp": gpus // fixed}
    try:
        price = Price(planned(with_keys(run, keys), ranking.best.price.plan.arch, gpus, cluster), cluster)
        return price.step_seconds if price.fits and price.fits_trained else 0.0
    except RequestError:
        return 0.0


def told(ranking: Ranking) -> tuple[list[dict[str, Any]], list[str]]:
    """Every case as data and as lines."""
    every = list(cases(ranking))
    lines = ["what if:"]
    question = ""
    for case in every:
        if case.question != question:
            question = case.question
            lines.append(f"  {question}")
        if not case.seconds:
            lines.append(f"    {case.name:<34} nothing: {case.refused}")
            continue
        kept = f"this layout {seconds_text(case.kept_seconds)}" if case.kept_seconds else "this layout cannot"
        dollars = f", {case.dollars_per_billion:,.0f} $ a 10^9 tokens" if case.dollars_per_billion else ""
        lines.append(
            f"    {case.name:<34} {seconds_text(case.seconds):>9}  {case.tokens_per_s:>12,.0f} tokens/s  "
            f"{case.efficiency:6.1%} a device{dollars}; {kept}; best: {case.layout}"
        )
    return [case.to_json() for case in every], lines


def budget(price: Price, tokens: float) -> Mapping[str, float]:
    """Steps, hours, device-hours and dollars of training on `tokens` tokens without failures."""
    steps = -(-tokens // tokens_of(price))
    hours = steps * price.step_seconds / 3600
    ranks = price.plan.degrees.ranks
    dollars = hours * ranks * price.cluster.price.dollars_per_device_hour
    return {"tokens": tokens, "steps": steps, "hours": hours, "device_hours": hours * ranks, "dollars": dollars}


def budget_told(price: Price, tokens: float) -> tuple[Mapping[str, float], list[str]]:
    """The same as data and as lines."""
    found = budget(price, tokens)
    dollars = f"{found['dollars']:,.0f} dollars" if found["dollars"] else "the price of a device hour is unknown"
    line = (
        f"  {tokens:.3g} tokens: {counted(int(found['steps']), 'step')}, {seconds_text(found['hours'] * 3600)}, "
        f"{found['device_hours']:,.1f} device hours, {dollars} (without failures)"
    )
    return found, ["budget:", line]
