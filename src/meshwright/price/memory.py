"""Bytes a rank keeps, in closed form, over arrays of layouts: the fullest of the first, an inner and the last stage.

states       parameters, gradients, master copies, moments: ZeRO divides what its stage says
activations  what blocks keep for backward (arch/activations.py), by how the tensor axis cuts each of them, times
             the micro-batches in flight; full recomputation keeps block inputs and one block's working set
logits       of the head, on the last stage
buffers      gathered units (ZeRO-3), a unit's own gradients, messages, attention's working squares
device       what the allocator keeps beyond its tensors, contexts and communicators
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.arch.activations import Setting, saved
from meshwright.arch.arch import Arch
from meshwright.config.choices import Dtype, Recompute
from meshwright.price.context import context_bytes
from meshwright.price.layouts import RECOMPUTES, Array, Layouts
from meshwright.price.offload import guest_bytes, kept_home
from meshwright.price.program_memory import Held, program_activations
from meshwright.price.schedule import in_flight
from meshwright.price.target import Target
from meshwright.price.weights import Weights, owned, shard


@dataclass(frozen=True)
class Memory:
    """Bytes. Categories are those of the fullest stage (0 first, 1 inner, 2 last); they add up to `peak`."""

    parameters: Array
    gradients: Array
    optimizer: Array
    master: Array
    activations: Array
    logits: Array
    buffers: Array
    peak: Array
    reserved: Array
    device: Array
    stage: Array
    peaks_first: Array
    peaks_inner: Array
    peaks_last: Array


CATEGORIES = ("parameters", "gradients", "optimizer", "master", "activations", "logits", "buffers")


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes a token that a mean block keeps: on the stream, of gathered inputs, inside the cut, of the router."""

    stream: float
    gathered: float
    inner: float
    router: float


@lru_cache(maxsize=256)
def kept(
    arch: Arch, sequence: int, compute: Dtype, fused: bool = False, low: bool = False, cheap: bool = False
) -> Kept:
    """What the table of saved tensors says of a mean block on a device with fused norms.

    `fused`: one kernel makes the gated product and keeps its two inputs only. `low`: products keep the 8-bit inputs
    that they multiplied. `cheap`: what is cheap to repeat is not kept (selective recomputation beside fused attention).
    """
    setting = Setting(1, sequence, fused_norms=True)
    sums = {"stream": 0.0, "gathered": 0.0, "inner": 0.0, "router": 0.0}
    for unit in range(1, arch.layers + 1):
        for each in saved(arch, unit, setting):
            if each.name == "attention.mask" or (fused and arch.gated and each.name.endswith(".activation")):
                continue
            if cheap and (each.name.endswith(_REPEATED) or (arch.latent and each.name in _EXPANDED)):
                continue
            cast = low and each.name.endswith(_MULTIPLIED)
            sums[_cut(each.name)] += each.elements * (1 if cast else each.role.num_bytes(compute))
    return Kept(**{name: total / arch.layers / sequence for name, total in sums.items()})


@lru_cache(maxsize=64)
def routed_share(arch: Arch, sequence: int) -> float:
    """The part of the blocks' saved tensors that belongs to routed tokens: it goes with how many a rank receives."""
    setting = Setting(1, sequence, fused_norms=True)
    sizes = [
        (each.name.startswith("mlp.experts"), each.elements * each.role.num_bytes(Dtype.BFLOAT16))
        for unit in range(1, arch.layers + 1)
        for each in saved(arch, unit, setting)
    ]
    return sum(size for is_routed, size in sizes if is_routed) / sum(size for _, size in sizes)


_MULTIPLIED = ("_norm.output", "attention.output", ".product", "experts.input")
"""Tensors kept as inputs of products."""


_REPEATED = ("_norm.output", ".product", ".activation")
_EXPANDED = ("attention.query", "attention.key", "attention.value")


def _cut(name: str) -> str:
    """How the tensor axis cuts a saved tensor."""
    if name in ("attention_norm.output", "mlp_norm.output", "mlp.experts.input"):
        return "gathered"
    if name.startswith("mlp.router"):
        return "router"
    inside = name.startswith(("attention.", "mlp.")) and "latent" not in name and name != "mlp.experts.output"
    return "inner" if inside else "stream"


def memories(target: Target, layouts: Layouts, held: Weights) -> Memory:
    """The memory of every layout."""
    columns = by_stage(target, layouts, held)
    peaks = [_total(column) for column in columns]
    peaks[1] = np.where(layouts.pp > 2, peaks[1], 0.0)
    peaks[2] = np.where(layouts.pp > 1, peaks[2], 0.0)
    outer = np.maximum(peaks[0], peaks[1])
    later, inner = peaks[2] > outer, peaks[1] > peaks[0]
    fullest = np.where(later, 2.0, np.where(inner, 1.0, 0.0))
    chosen = {  # np.choose takes five times as long
        name: np.where(later, columns[2][name], np.where(inner, columns[1][name], columns[0][name]))
        for name in CATEGORIES
    }
    peak = np.maximum(outer, peaks[2])
    values = target.values
    reserved = reserved_bytes(target, peak)
    kinds = sum((degree > 1) * 1.0 for degree in (layouts.dp * layouts.ep, layouts.tp, layouts.pp, layouts.cp))
    outside = values["memory.context_bytes"] + values["memory.communicator_bytes"] * kinds
    device = reserved if target.cluster.device.is_cpu else reserved + outside
    return Memory(**chosen, peak=peak, reserved=reserved, device=device, stage=fullest,
                  peaks_first=peaks[0], peaks_inner=peaks[1], peaks_last=peaks[2])  # fmt: skip


def reserved_bytes(target: Target, peak: Array | float) -> Array:
    """What the allocator keeps of the device for `peak` bytes of tensors."""
    if target.cluster.device.is_cpu:
        return np.asarray(peak)
    return np.asarray(peak * target.values["memory.slack"] + target.values["memory.slack_bytes"])


def _total(column: dict[str, Array]) -> Array:
    total = np.zeros_like(column["parameters"])
    for size in column.values():
        total += size
    return total


def by_stage(target: Target, layouts: Layouts, held: Weights) -> list[dict[str, Array]]:
    """Bytes by category on the first, the fullest inner and the last stage."""
    tokens = layouts.micro * target.sequence / layouts.cp
    each = block_bytes(target, layouts, tokens)
    known = target.is_literal and not target.arch.latent
    program = program_activations(target, layouts) if known else (None, None, None)
    return [_stage(target, layouts, held, stage, tokens, each, program[stage]) for stage in range(3)]


def _stage(
    target: Target, layouts: Layouts, held: Weights, stage: int, tokens: Array, each: Array, program: Held | None
) -> dict[str, Array]:
    """Bytes by category on the first (0), the fullest inner (1) or the last stage (2); `program`: what the literal one
    keeps, where its units are known."""
    blocks = (layouts.first, layouts.most, layouts.last)[stage]
    outer_first = (stage == 0) * np.ones_like(blocks)
    outer_last = np.where(layouts.head_first, stage == 0, stage == 2) * 1.0
    out = _states(target, layouts, held, stage)
    largest = np.maximum(
        held.block_dense + held.block_routed, np.maximum(outer_first * held.embedding, outer_last * held.head)
    )
    place = (np.zeros_like(blocks), np.ones_like(blocks), layouts.pp - 1)[stage]
    flight = in_flight(layouts, place)
    out["activations"] = _activations(target, layouts, tokens, blocks, flight, each)
    out["logits"] = outer_last * _logits(target, layouts, tokens, flight)
    if program is not None:
        out["activations"], out["logits"] = program
    summed = out["gradients"]
    if target.is_literal:
        out["gradients"] = _appearing(target, layouts, out, flight, largest)
    three = largest + 2 * (held.block_dense + held.block_routed)
    share = np.minimum(three / np.maximum(held.dense[stage] + held.routed[stage], 1.0), 1.0)
    gathers, updates = guest_bytes(layouts, out, share)
    buffers = _buffers(target, layouts, held, tokens, largest) + gathers
    # Updates find all gradients, and no activations any more.
    updates = updates + summed - out["gradients"] - out["activations"] - out["logits"]
    out["buffers"] = np.maximum(buffers, updates)
    for name in ("parameters", "optimizer", "master"):
        out[name] = out[name] * kept_home(layouts, name)
    return out


def _states(target: Target, layouts: Layouts, held: Weights, stage: int) -> dict[str, Array]:
    """Parameters, gradients, moments and master copies."""
    precision, zero = target.precision, layouts.zero
    stored, reduced, wide = target.stored, precision.reduce.num_bytes, precision.master.num_bytes
    dense, routed = held.dense[stage], held.routed[stage]
    part, whole, updated = shard(layouts, dense, routed), dense + routed, owned(layouts, dense, routed)
    kept_whole = (zero == 3) & (layouts.reshard == 0)
    # Usual trainers cannot scatter gradients before the last micro-batch has added to them.
    accumulates = (layouts.accumulation > 1) & (not target.is_literal)
    scattered = (zero == 3) & ~kept_whole | (zero == 2) & ~accumulates
    gradients = np.where(scattered, part, whole) * reduced
    if target.legacy and reduced > stored:
        gradients = gradients + np.where(scattered, 0.0, whole) * stored  # a gradient of each type side by side
    if target.legacy:  # sums of sharded optimizers go through flat copies
        flat = np.where((zero == 1) | (zero == 2), whole, 0.0)
        gradients = gradients + flat * reduced * target.values["memory.flat"]
    parameters = np.where(zero == 3, np.where(kept_whole, whole, part), whole) * stored
    if not target.is_literal and precision.has_master:
        # Sharded parameters of usual trainers are the master copy itself, where that is at home: gathered ones are cast
        # on the way.
        parameters = np.where((zero == 3) & ~kept_whole & (kept_home(layouts, "master") > 0), 0.0, parameters)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": updated * wide * target.num_moments,
        "master": updated * wide * precision.has_master,
    }


def _activations(target: Target, layouts: Layouts, tokens: Array, blocks: Array, flight: Array, each: Array) -> Array:
    """Micro-batches in flight on `blocks` blocks, and one block's working set where blocks are recomputed."""
    stream = np.where(layouts.sequence > 0, layouts.tp, 1.0)
    entry = tokens * target.shapes.hidden * target.stored / stream
    full = (layouts.recompute == RECOMPUTES.index(Recompute.FULL)) * target.cluster.software.share
    held = full * entry + (1 - full) * each
    gathered = np.where(layouts.sequence > 0, 2 * tokens * target.shapes.hidden * target.stored, 0.0)
    working = np.where(full > 0, target.values["memory.working"] * each + gathered, 0.0)
    # Usual pipelines keep what they sent.
    outputs = np.where(layouts.pp > 1, flight * entry, 0.0) * (not target.is_literal)
    return np.asarray(blocks * flight * held + working + outputs)


def block_bytes(target: Target, layouts: Layouts, tokens: Array) -> Array:
    """What one block keeps of one micro-batch without full recomputation."""
    fused = not target.is_literal and not target.eager
    dtype = Dtype.BFLOAT16 if target.stored == 2 else target.precision.compute
    table = kept(target.arch, target.sequence, dtype, fused, fused and target.low_precision)
    inputs = np.where((layouts.sequence > 0) & fused, layouts.tp, 1.0)
    out = _bytes(table, tokens, layouts, inputs)
    selective = layouts.recompute == RECOMPUTES.index(Recompute.SELECTIVE)
    if target.unfused:
        squares = 5 * layouts.micro * target.shapes.heads / layouts.tp * float(target.sequence) ** 2 / layouts.cp
        out = out + np.where(selective, 0.0, squares)
    else:
        cheap = kept(target.arch, target.sequence, dtype, fused, fused and target.low_precision, True)
        out = np.where(selective, _bytes(cheap, tokens, layouts, inputs), out)
    return np.asarray(out + context_bytes(target, layouts, tokens))


def _bytes(table: Kept, tokens: Array, layouts: Layouts, inputs: Array) -> Array:
    stream = np.where(layouts.sequence > 0, layouts.tp, 1.0)
    each = table.stream / stream + table.gathered / inputs + table.inner / layouts.tp + table.router
    return np.asarray(tokens * each)


def _logits(target: Target, layouts: Layouts, tokens: Array, flight: Array) -> Array:
    """16-bit logits, their float32 copy, and its gradient; further micro-batches in flight keep log-probabilities."""
    loss = "memory.logits.fused" if target.fused_loss else "memory.logits.plain"
    each = target.values[loss] if target.stored < 4 else 3 * target.stored
    kept = each + 4 * np.maximum(flight - 1, 0.0)
    return np.asarray(tokens * target.shapes.vocab / layouts.tp * kept)


def _appearing(target: Target, layouts: Layouts, out: dict[str, Array], flight: Array, largest: Array) -> Array:
    """Gradients of the literal program when most is live: buckets appear in the first backward, which frees the
    activations of a micro-batch meanwhile; a unit's stands whole beside the shards of ZeRO-2 and 3."""
    gradients = out["gradients"] + np.where(layouts.zero >= 2, largest, 0.0) * target.precision.reduce.num_bytes
    refilled = layouts.accumulation > flight
    freed = out["activations"] / np.maximum(flight, 1.0)
    return np.asarray(np.where(refilled, gradients, np.maximum(gradients - freed, 0.0)))


def _buffers(target: Target, layouts: Layouts, held: Weights, tokens: Array, largest: Array) -> Array:
    """Gathered units, gradients of a unit on their way into the sum, and messages."""
    stored, zero = target.stored, layouts.zero
    block = held.block_dense + held.block_routed
    # Three units: of the literal program's never more than one is an outer one.
    whole, own = largest + 2 * block if target.is_literal else 2 * largest + block, largest
    if target.legacy:  # tensor by tensor, up to a number of elements
        whole = np.minimum(whole, target.values["memory.gathered"])
        own = np.where(zero == 3, np.minimum(own, target.values["memory.bucket"]), own)
    gathered = np.where((zero == 3) & (layouts.reshard > 0), whole * stored, 0.0)
    stream = np.where(layouts.sequence > 0, layouts.tp, 1.0)
    message = tokens * target.shapes.hidden * stored / stream
    return np.asarray(gathered + own * stored + np.where(layouts.pp > 1, 4.0, 2.0) * message)
