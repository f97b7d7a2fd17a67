"""What a unit holds only while it runs, beside what its forward keeps for its backward: moments, in bytes.

    forward     the last branch and its sum with the stream (block); logits beside log-probabilities (head)
    backward    a graph gives back what it kept while gradients of it come to be: one of these moments is the fullest

                early     the gradients of a feed-forward's two factors exist, and nothing of attention is given back;
                          of a head, the gradients of log-probabilities and of logits, where these are two
                choices   of experts: the gradients of their outputs, weighed, not weighed, and of the weights
                scores    the gradients of queries, keys and values and that of the heads' outputs; all that a
                          feed-forward kept is given back. The fullest where heads are wide beside the feed-forward
                norm      the gradients of the norm between the halves, where the stream is wide beside all else
                middle    the gradients of the first half's weights are there; its activations are gone
                late      every weight's gradient is there, all activations are gone

A weight gradient that is written in place (`parallel/direct.py`) is nobody's memory, where the flat gradient has the
compute dtype; where it is wider, one product exists at a time. So written, a head of at least float32 turns its logits
into their gradient in one memory. Where recomputation is selective, what is made again is there as well. A split
backward keeps the factors of products instead.
Measured against the allocator's own events on one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.arch.activations import Role, Setting, saved
from meshwright.arch.arch import Arch, Norm
from meshwright.arch.arithmetic import Operation, OperationKind, operations
from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Dtype

LOSS_CHUNK_ELEMENTS = 1 << 20
"""Logits of which a vocabulary-parallel loss makes exponentials at a time: what a core's caches hold a good part of."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes beyond graph and cotangent, at their most: before the flat gradient is written first, and after."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Gradients:
    """How weight gradients come to be. `own`: bytes of those that autograd makes, all parameters of a unit together;
    `width` is that of an element of the flat gradient, in bytes."""

    in_place: bool
    width: int
    own: int


def forward_passing(arch: Arch, unit: int, setting: Setting, compute: Dtype, in_place: bool) -> int:
    """Bytes that a forward holds beyond what it keeps and what leaves it."""
    width = compute.num_bytes
    hidden, wide = setting.tokens * arch.hidden * width, setting.tokens * arch.ffn * width
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING:
            return hidden + _arriving(hidden, setting) if setting.ways > 1 else 0
        case UnitKind.BLOCK:
            last = max(_leaving(hidden, setting), _at_dropout(arch, setting, compute))
            return max(wide * (2 if arch.gated else 1), wide + last) if setting.selective else last
        case UnitKind.HEAD if setting.ways > 1:
            tokens = setting.tokens // setting.ways if setting.rings else setting.tokens
            of_chunk = min(LOSS_CHUNK_ELEMENTS, tokens * arch.vocab) * Role.UPCAST.num_bytes(compute)
            return of_chunk + (hidden // setting.ways if setting.gathers else 0)
        case UnitKind.HEAD if in_place and width >= 4:
            return 0
        case UnitKind.HEAD:
            return setting.tokens * arch.vocab * (width + Role.UPCAST.num_bytes(compute))


def backward_passing(arch: Arch, unit: int, setting: Setting, compute: Dtype, gradients: Gradients) -> Moments:
    """The fullest moments of a backward that ends in the flat gradient."""
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING if setting.ways > 1:
            return Moments(weight_passing(arch, unit, setting, compute, gradients), gradients.own)
        case UnitKind.EMBEDDING if gradients.in_place:
            widened = gradients.width != compute.num_bytes
            return Moments(0, setting.tokens * arch.hidden * gradients.width if widened else 0)
        case UnitKind.EMBEDDING:
            return Moments(gradients.own, gradients.own)
        case UnitKind.BLOCK:
            return _block(arch, unit, setting, compute, gradients)
        case UnitKind.HEAD:
            return _head(arch, unit, setting, compute, gradients)


def split_passing(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """The fullest moment of a backward that keeps the factors of its products: none is given back."""
    if arch.unit_kind(unit) is UnitKind.HEAD:
        if setting.ways > 1:
            return _leaving(setting.tokens * arch.hidden * compute.num_bytes, setting)
        if compute.num_bytes >= 4:
            return setting.tokens * arch.hidden * compute.num_bytes
        return 2 * setting.tokens * arch.vocab * Role.PRECISE.num_bytes(compute)
    if arch.unit_kind(unit) is UnitKind.EMBEDDING:
        return 0
    factors = 3 if arch.gated else 2
    wide = setting.tokens * arch.ffn * compute.num_bytes
    at_once = (factors + ((2 if arch.gated else 1) if setting.selective else 0)) * wide
    if arch.is_routed(unit - 1):
        return at_once
    hidden = setting.tokens * arch.hidden * compute.num_bytes
    stashed = factors * wide + hidden * (2 if arch.dropout else 1)
    return max(at_once, stashed + _at_scores(arch, unit, setting, compute))


def weight_passing(arch: Arch, unit: int, setting: Setting, compute: Dtype, gradients: Gradients) -> int:
    """The fullest moment of weight work, beyond the factors of its products: the largest product, where it is added to
    gradients of another dtype.

    On a tensor axis autograd makes the gradient of the table from a cotangent that is zero where others hold the row.
    """
    if arch.unit_kind(unit) is UnitKind.EMBEDDING and setting.ways > 1:
        return gradients.own + setting.tokens * arch.hidden * compute.num_bytes
    if not gradients.in_place:
        return gradients.own
    if gradients.width == compute.num_bytes:
        return 0
    return max((each.n * each.k for each in _products(arch, unit, setting)), default=0) * compute.num_bytes


def stash_bytes(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """Factors of the weight products that a split backward leaves: each input once, each output's gradient."""
    if arch.unit_kind(unit) is UnitKind.EMBEDDING:
        return setting.tokens * arch.hidden * compute.num_bytes  # the cotangent: all of its backward is weight work
    inputs: dict[str, int] = {}
    outputs = 0
    for each in _products(arch, unit, setting):
        inputs[_input_of(each.name)] = each.m * each.k
        outputs += each.m * each.n
    return (sum(inputs.values()) + outputs) * compute.num_bytes


def _block(arch: Arch, unit: int, setting: Setting, compute: Dtype, gradients: Gradients) -> Moments:
    width, hidden = compute.num_bytes, setting.tokens * arch.hidden * compute.num_bytes
    factors = (2 if arch.gated else 1) * setting.tokens * arch.ffn * width
    weights = {each.name.rpartition(".")[2]: each.weight * width for each in _products(arch, unit, setting)}
    down = weights.get("down", 0)
    if gradients.in_place:
        product = down if gradients.width != width else 0
        at_scores = max(_at_scores(arch, unit, setting, compute), _at_norm(arch, unit, setting, compute))
        if setting.selective and not arch.is_routed(unit - 1):
            moments = _selective_block(arch, setting, width, product)
            return Moments(moments.before, max(moments.after, at_scores))
        before = 0
        if arch.experts is not None and arch.is_routed(unit - 1):
            rows = setting.tokens * arch.experts.active * width
            before, factors = 3 * rows * arch.hidden, (2 if arch.gated else 1) * rows * arch.experts.ffn
        product = max(product, at_scores)
        if not setting.gathers:
            return Moments(before, max(factors, product))
        # The cotangent of the last product comes from all ranks; round a ring, its input's gradient comes with it.
        wide = setting.tokens * arch.ffn * width
        if setting.rings:
            return Moments(max(hidden + wide, before), max(factors, hidden + wide + product))
        return Moments(max(hidden, before), max(factors, hidden + max(wide, product)))
    kept = _kept(arch, unit, setting, compute)
    first_half = sum(size for name, size in kept.items() if name.startswith("mlp."))
    middle = sum(weights.get(name, 0) for name in ("gate", "up", "down")) + 2 * hidden - first_half
    late = gradients.own + hidden - sum(kept.values())
    return Moments(max(factors + down, middle), late)


def _at_scores(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """Bytes beyond what was kept when attention has its gradients: those of its inputs and of its output, and the sum
    on the stream, less what was given back by then. Recomputed: what it reads and leaves as well."""
    if arch.latent is not None:
        return 0
    width, tokens, heads = compute.num_bytes, setting.tokens, arch.heads + arch.kv_heads
    ways = setting.ways if setting.gathers else 1
    held = tokens * (heads * (arch.head_dim + arch.value_dim) * width + arch.hidden // ways * width)
    kept = _kept(arch, unit, setting, compute)
    given_back = sum(size for name, size in kept.items() if name.startswith("mlp") or name == "attention_dropout")
    turned = _at_rotation(arch, setting, compute)
    if setting.selective and not arch.is_routed(unit - 1):
        whole = {each.name: each for each in saved(arch, unit, replace(setting, selective=False))}
        made = [
            whole[f"attention.{name}"] for name in ("output", "log_sum_exp", "mask") if f"attention.{name}" in whole
        ]
        again = sum(each.elements * each.role.num_bytes(compute) for each in made)
        if arch.rope is not None:
            again += max(tokens * heads * arch.head_dim * width + _tiles(setting, compute), turned)
        else:
            again += _tiles(setting, compute)
    elif turned:  # what attention kept is gone when its inputs' gradients are turned back
        names = ("query", "key", "value", "output", "log_sum_exp", "mask")
        freed = sum(kept.get(f"attention.{name}", 0) for name in names)
        again = max(_tiles(setting, compute), turned - freed - tokens * arch.heads * arch.value_dim * width)
    else:
        again = _tiles(setting, compute)
    return held + again - given_back


def _at_norm(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """The same when the norm before a feed-forward has its gradient: that of its output and its own, and in lower
    precisions what it computes with. The fullest where the stream is wide beside everything else."""
    width, precise = compute.num_bytes, Role.PRECISE.num_bytes(compute)
    elements = setting.tokens * arch.hidden // (setting.ways if setting.gathers else 1)
    kept = _kept(arch, unit, setting, compute)
    given_back = sum(
        size for name, size in kept.items() if name.startswith("mlp.") or name in ("mlp_norm.output", "mlp_dropout")
    )
    copies = 2 * precise if arch.norm is Norm.RMS and width < precise else 0
    again = width if setting.selective and not setting.gathers and not arch.is_routed(unit - 1) else 0
    return elements * (width + precise + copies + again) - given_back


def _at_dropout(arch: Arch, setting: Setting, compute: Dtype) -> int:
    """Bytes beyond what leaves a branch while some of it falls: the branch scaled beside itself, or before that the
    random numbers, two of 32 bits in each of 64, twice (`model/dropout.py`)."""
    if not arch.dropout:
        return 0
    elements = setting.tokens * arch.hidden // (setting.ways if setting.gathers else 1)
    return elements * max(2 * compute.num_bytes, 8)


def _at_rotation(arch: Arch, setting: Setting, compute: Dtype) -> int:
    """Bytes beside queries' and keys' gradients while these are turned back in float32, queries first, and rounded; or
    pass the norms of heads, which have three such tensors at a time."""
    width, precise = compute.num_bytes, Role.PRECISE.num_bytes(compute)
    if arch.rope is None or width == precise:
        return 0
    of_keys = (arch.heads + arch.kv_heads) * width + 2 * precise * arch.kv_heads
    of_queries = (3 if arch.qk_norm else 2) * precise * arch.heads
    return setting.tokens * arch.head_dim * max(of_queries, of_keys)


def _tiles(setting: Setting, compute: Dtype) -> int:
    """Scores and their gradients that torch's kernel for CPUs has at a time in every thread, 32 to 256 queries by 512
    keys, and in lower precisions a copy of both in the compute dtype (aten/native/cpu/FlashAttentionKernel.cpp)."""
    queries = 256 if setting.sequence >= 768 else 64 if setting.sequence >= 192 else 32
    tile = min(queries, setting.sequence) * min(512, setting.sequence)
    copy = compute.num_bytes if compute.num_bytes < 4 else 0
    return setting.threads * 2 * tile * (Role.PRECISE.num_bytes(compute) + copy)


def _selective_block(arch: Arch, setting: Setting, width: int, product: int) -> Moments:
    """The feed-forward again: what its last product read (gated: and the activation), then the gradients of these and
    of its factors. Under sequence parallel the cotangent arrives from all ranks first."""
    wide = setting.tokens * arch.ffn * width
    cotangent = setting.tokens * arch.hidden * width if setting.gathers else 0
    again, gradients = (2, 3) if arch.gated else (1, 2)
    return Moments(cotangent + again * wide, cotangent + again * wide + max(gradients * wide, product))


def _leaving(hidden: int, setting: Setting) -> int:
    """A product and its sum over the tensor axis. Scattered along the tokens: the own chunk and what arrives of it as
    well; round a ring: a chunk that is sent, one that arrives, and one that is multiplied."""
    if setting.rings:
        return 3 * hidden // setting.ways
    return hidden + (hidden // setting.ways + _arriving(hidden, setting) if setting.gathers else 0)


def _arriving(hidden: int, setting: Setting) -> int:
    """The own chunk as all other ranks send it, side by side until they are added up."""
    return hidden // setting.ways * (setting.ways - 1) if setting.gathers and setting.direct else 0


def _head(arch: Arch, unit: int, setting: Setting, compute: Dtype, gradients: Gradients) -> Moments:
    logits, hidden = setting.tokens * arch.vocab, setting.tokens * arch.hidden * compute.num_bytes
    if setting.ways > 1:
        summed = _leaving(hidden, setting)
        if not gradients.in_place:
            return Moments(gradients.own + summed, gradients.own + summed)
        product = arch.vocab * arch.hidden * compute.num_bytes if gradients.width != compute.num_bytes else 0
        return Moments(summed, summed + product)
    precise = logits * Role.PRECISE.num_bytes(compute)
    kept = sum(_kept(arch, unit, setting, compute).values())
    at_product = logits * compute.num_bytes - precise  # log-probabilities are gone
    if not gradients.in_place:
        return Moments(max(2 * precise, at_product + gradients.own + hidden), gradients.own + hidden - kept)
    if compute.num_bytes >= 4:
        return Moments(hidden, hidden)
    product = arch.vocab * arch.hidden * compute.num_bytes if gradients.width != compute.num_bytes else 0
    return Moments(2 * precise, at_product + max(product, hidden))


def _kept(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> dict[str, int]:
    return {each.name: each.elements * each.role.num_bytes(compute) for each in saved(arch, unit, setting)}


def _products(arch: Arch, unit: int, setting: Setting) -> list[Operation]:
    done = operations(arch, unit, setting.tokens, setting.sequence)
    return [each for each in done if each.kind is OperationKind.MATMUL]


def _input_of(product: str) -> str:
    """Products that read one tensor share its name."""
    path, _, leaf = product.rpartition(".")
    shared = {"query": "stream", "key": "stream", "value": "stream", "gate": "stream", "up": "stream"}
    return f"{path}.{shared.get(leaf, leaf)}"
