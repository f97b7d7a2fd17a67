"""A resolved plan in words and as JSON: what was decided, and what follows from it for all ranks or for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from meshwright.arch.arch import Experts
from meshwright.arch.arithmetic import flops_per_token, parameters
from meshwright.arch.parameters import tensors
from meshwright.config.counted import counted
from meshwright.layout.axes import Axis
from meshwright.observe.figures import bytes_text, table_lines
from meshwright.plan.action import Kind
from meshwright.plan.folds.draw import draw_text
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.memory import memory
from meshwright.plan.folds.narrate import describe_rank, narrate
from meshwright.plan.folds.timeline import flop_durations, planned_timeline
from meshwright.plan.folds.words import units_in_words
from meshwright.plan.hash import plain
from meshwright.plan.meeting import plan_groups
from meshwright.plan.pieces import parameter_pieces
from meshwright.plan.plan import Plan
from meshwright.plan.program import program
from meshwright.plan.stages import stage_units
from meshwright.plan.strategies.expert import everywhere, fullest_exchange

__all__ = ["explain_plan", "explain_rank", "plan_object", "program_lines", "rank_object", "schedule_lines"]


def explain_plan(plan: Plan) -> Iterator[str]:
    """The whole plan, section by section."""
    yield from _section("plan", [f"{plan.name}: math {plan.math}, layout {plan.layout}"])
    yield from _section("model", _model(plan))
    yield from _section("data", _data(plan))
    yield from _section("batch", _batch(plan))
    yield from _section("optimizer", [_fields(plan.optimizer)])
    yield from _section("mesh", _mesh(plan))
    yield from _section("buckets of rank 0", _buckets(plan, 0))
    yield from _section("sent by rank 0 in a step", _sent(ledger(plan, 0)))
    yield from _section("memory of rank 0 in a step", _memory(plan, 0))


def explain_rank(plan: Plan, rank: int) -> Iterator[str]:
    """One rank: where it stands, with whom it talks, what it holds and sends."""
    yield from describe_rank(plan, rank)
    yield ""
    yield from _section("pieces", _pieces(plan, rank))
    yield from _section("sends in a step", _sent(ledger(plan, rank)))
    yield from _section("memory in a step", _memory(plan, rank))


def program_lines(plan: Plan, rank: int) -> Iterator[str]:
    """The step program of a rank, an action a line."""
    yield from _section(f"program of rank {rank}, training", narrate(plan, rank))
    yield from _section(f"program of rank {rank}, evaluation", narrate(plan, rank, Kind.EVALUATE))


def schedule_lines(plan: Plan, width: int) -> Iterator[str]:
    """The pipeline drawn, computing at equal speed on every stage and sending in no time."""
    timeline = planned_timeline(plan, flop_durations(plan))
    title = (
        f"{plan.pipeline.schedule}, {counted(plan.accumulation, 'micro-batch')}, bubble {timeline.bubble:.1%} by FLOPs"
    )
    yield from _section(title, draw_text(timeline, width - 2))


def plan_object(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "math": plan.math,
        "layout": plan.layout,
        "ranks": plan.degrees.ranks,
        "accumulation": plan.accumulation,
        "parameters": parameters(plan.arch),
        "plan": plain(plan),
    }


def rank_object(plan: Plan, rank: int) -> dict[str, Any]:
    """One rank as JSON values."""
    at = plan.degrees.coordinates(rank)
    table, decaying = plan_groups(plan), _decaying(plan)
    return {
        "rank": rank,
        "coordinates": asdict(at),
        "groups": {name.value: list(group.members(plan.degrees, at)) for name, group in table.items()},
        "units": [plan.arch.unit_name(unit) for unit in stage_units(plan, at.pp)],
        "pieces": [
            {
                "tensor": each.piece.tensor,
                "start": list(each.piece.rectangle.start),
                "stop": list(each.piece.rectangle.stop),
                "bucket": each.bucket,
                "decays": each.piece.tensor in decaying,
            }
            for each in parameter_pieces(plan, rank)
        ],
        "traffic": [plain(row) for row in ledger(plan, rank)],
        "memory_peak": memory(plan, rank).peak_bytes,
        "program": list(narrate(plan, rank)),
    }


def _section(title: str, lines: Iterator[str] | list[str]) -> Iterator[str]:
    yield f"{title}:"
    yield from (f"  {line}" for line in lines)
    yield ""


def _model(plan: Plan) -> Iterator[str]:
    arch, length = plan.arch, plan.data.sequence_length
    layers = counted(arch.layers, "layer")
    yield f"{arch.family}, {layers} of {arch.hidden}, feed-forward {arch.ffn}, vocabulary {arch.vocab}"
    yield f"{counted(arch.heads, 'query head')} on {counted(arch.kv_heads, 'key/value head')} of {arch.head_dim}"
    if arch.experts is not None:
        yield _experts(plan, arch.experts)
    yield f"{parameters(arch):,} parameters, {flops_per_token(arch, length):,.0f} FLOPs a token (6N + causal attention)"
    precision = plan.precision
    yield f"computes in {precision.compute}, sums gradients in {precision.reduce}, updates in {precision.master}"


def _experts(plan: Plan, experts: Experts) -> str:
    shared = f" and {experts.shared} shared" if experts.shared else ""
    dense = f", the first {counted(experts.dense_layers, 'layer')} dense" if experts.dense_layers else ""
    terms = {"auxiliary loss": plan.moe.auxiliary_loss, "z loss": plan.moe.z_loss}
    told = "".join(f", {name} {value:g}" for name, value in terms.items() if value)
    return (
        f"{counted(experts.count, 'expert')} of {experts.ffn}, {experts.active} a token{shared}{dense}; "
        f"balance {plan.moe.balance}{told}"
    )


def _data(plan: Plan) -> Iterator[str]:
    data = plan.data
    yield f"{data.source}, tokens of {data.tokenizer}, samples of {data.sequence_length}"
    yield f"{data.order}, documents {data.documents}"
    yield f"{data.eval_fraction:.1%} at the end evaluates"


def _batch(plan: Plan) -> Iterator[str]:
    ways, batch = plan.degrees.dp * plan.degrees.ep, plan.batch
    tokens = f"{batch.sequences * plan.data.sequence_length:,} tokens"
    yield f"{counted(batch.sequences, 'sequence')} = {tokens} an optimizer step"
    yield (
        f"{batch.sequences} = {counted(batch.micro, 'sequence')} a micro-batch x "
        f"{counted(plan.accumulation, 'micro-batch')} x {counted(ways, 'batch rank')}"
    )


def _mesh(plan: Plan) -> Iterator[str]:
    degrees = plan.degrees
    yield f"{counted(degrees.ranks, 'rank')}, outermost first: " + ", ".join(
        f"{axis} {degrees.on(axis)}" for axis in degrees.order
    )
    yield f"ZeRO stage {plan.sharding.stage}"
    if degrees.pp > 1:
        yield f"{plan.pipeline.schedule}, blocks a virtual stage: {list(plan.pipeline.stages)}"
    if degrees.cp > 1:
        yield f"context {plan.context}"
    at = degrees.coordinates(0)
    for name, group in plan_groups(plan).items():
        if group.size > 1:
            axes = " x ".join(axis for axis in Axis if axis in group.factor.axes and degrees.on(axis) > 1)
            members = ", ".join(map(str, group.members(degrees, at)))
            yield f"group {name} over {axes}: {group.size} ranks; rank 0 meets {members}"


def _buckets(plan: Plan, rank: int) -> list[str]:
    rows = []
    for bucket in program(plan, rank).buckets:
        names = counted(len(bucket.segments), "tensor")
        size = bytes_text(bucket.numel * plan.precision.reduce.num_bytes)
        rows.append([str(bucket.index), units_in_words(plan.arch, bucket.units), names, f"{bucket.numel:,}", size])
    return table_lines(["bucket", "units", "holds", "elements", "gradient"], rows, left=2)


def _pieces(plan: Plan, rank: int) -> list[str]:
    rows, decaying = [], _decaying(plan)
    for placed in parameter_pieces(plan, rank):
        rectangle = placed.piece.rectangle
        spans = ", ".join(f"{low}:{high}" for low, high in zip(rectangle.start, rectangle.stop, strict=True))
        decays = "yes" if placed.piece.tensor in decaying else "no"
        rows.append([placed.piece.tensor, f"[{spans}]", str(placed.bucket), f"{rectangle.numel:,}", decays])
    return table_lines(["tensor", "elements", "bucket", "count", "decays"], rows, left=2)


def _decaying(plan: Plan) -> frozenset[str]:
    """The tensors that weight decay touches."""
    return frozenset(tensor.name for tensor in tensors(plan.arch) if tensor.trainable and tensor.decays)


def _sent(rows: tuple[Row, ...]) -> list[str]:
    if not rows:
        return ["nothing: the rank is alone"]
    cells = [
        [row.group, row.operation, row.phase.value, str(row.ranks), str(row.calls), f"{row.payload_bytes:,}",
         f"{row.sent_bytes:,}", f"{row.wire_bytes:,}"]
        for row in rows
    ]  # fmt: skip
    headers = ["group", "operation", "phase", "ranks", "calls", "payload bytes", "sent bytes", "wire bytes"]
    return table_lines(headers, cells, left=3)


def _memory(plan: Plan, rank: int) -> list[str]:
    timeline = memory(plan, rank)
    rows = [
        [category.value, bytes_text(timeline.states[category]), bytes_text(timeline.largest[category])]
        for category in timeline.largest
    ]
    together = ["together", bytes_text(sum(timeline.states.values())), bytes_text(timeline.peak_bytes)]
    lines = table_lines(["", "between steps", "at most"], [*rows, together])
    if plan.degrees.ep > 1:
        most = memory(plan, rank, routed=everywhere(fullest_exchange(plan, plan.degrees.coordinates(rank).ep)))
        told = f"loads of experts are taken to be even; with all tokens sent here at most {bytes_text(most.peak_bytes)}"
        lines = [*lines, told]
    return lines


def _fields(section: Any) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in asdict(section).items())


def _value(value: Any) -> str:
    return f"({', '.join(map(_value, value))})" if isinstance(value, tuple) else f"{value}"
