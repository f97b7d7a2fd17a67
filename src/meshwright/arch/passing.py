"""What a unit holds only while it runs, beside what its forward keeps for its backward, in bytes.

    block    the fullest moment of its tape (`block_tape.py`)
    head     forward: logits beside log-probabilities, or a run of them beside logits. Backward: the gradients of these,
             where they are two; that of the stream beside the largest product; the norm's, where the stream is wide
    compiled backwards of a compiled unit are one of these moments:

             early   the gradients of a feed-forward's two factors exist, and nothing of attention is given back
             middle  the gradients of the first half's weights are there; its activations are gone
             late    every weight's gradient is there, all activations are gone

A weight gradient that is written in place (`parallel/direct.py`) is nobody's memory, where the flat gradient has the
compute dtype; where it is wider, one product exists at a time. So written, a head of at least float32 turns its logits
into their gradient in one memory. A split backward keeps the factors of products instead.
Measured against the allocator's own events on one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.arch.activations import Role, Setting, kept_bytes
from meshwright.arch.arch import Arch, Norm
from meshwright.arch.arithmetic import Operation, OperationKind, operations
from meshwright.arch.block_backward import BlockBackward, Moments
from meshwright.arch.block_forward import BlockForward
from meshwright.arch.tape import Tape
from meshwright.arch.tensors import UnitKind
from meshwright.config.choices import Dtype

__all__ = [
    "LOSS_CHUNK_ELEMENTS",
    "Gradients",
    "Moments",
    "backward_passing",
    "forward_passing",
    "split_passing",
    "stash_bytes",
    "weight_passing",
]

LOSS_CHUNK_ELEMENTS = 1 << 20
"""Logits of which a vocabulary-parallel loss makes exponentials at a time: what a core's caches hold a good part of."""


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
    hidden = setting.tokens * arch.hidden * width
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING:
            return _embedding(arch, setting, compute)
        case UnitKind.BLOCK:
            return BlockForward(arch, unit, setting, compute).passing()
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
        case UnitKind.EMBEDDING:
            return _embedding_back(arch, setting, compute, gradients)
        case UnitKind.BLOCK if gradients.in_place:
            widened = gradients.width != compute.num_bytes
            return BlockBackward(arch, unit, setting, compute, widened=widened).moments()
        case UnitKind.BLOCK:
            return _compiled_block(arch, unit, setting, compute, gradients)
        case UnitKind.HEAD:
            return _head(arch, unit, setting, compute, gradients)


def split_passing(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """The fullest moment of a backward that keeps the factors of its products: none is given back."""
    match arch.unit_kind(unit):
        case UnitKind.EMBEDDING:
            return 0
        case UnitKind.BLOCK:
            moments = BlockBackward(arch, unit, setting, compute, split=True).moments()
            return max(moments.before, moments.between, moments.after)
        case UnitKind.HEAD:
            at_norm = _of_last_norm(arch, setting, compute)
            if setting.ways > 1:
                return max(_leaving(setting.tokens * arch.hidden * compute.num_bytes, setting), at_norm)
            logits, precise = setting.tokens * arch.vocab, Role.PRECISE.num_bytes(compute)
            first = 0 if compute.num_bytes >= 4 else 2 * logits * precise
            return max(first, at_norm + logits * (compute.num_bytes - precise))  # log-probabilities are gone


def weight_passing(arch: Arch, unit: int, setting: Setting, compute: Dtype, gradients: Gradients) -> Moments:
    """The fullest moments of weight work, beyond the factors of its products: the largest product, where it is added to
    gradients of another dtype. All of an embedding's backward is weight work, which gives its cotangent back early."""
    if not gradients.in_place:
        return Moments(0, gradients.own)
    if arch.unit_kind(unit) is UnitKind.EMBEDDING:
        moments = _embedding_back(arch, setting, compute, gradients)
        cotangent = _part(arch, setting) * compute.num_bytes if setting.ways > 1 else 0
        return replace(moments, after=moments.after - cotangent)
    if gradients.width == compute.num_bytes:
        return Moments(0, 0)
    largest = max((each.n * each.k for each in _products(arch, unit, setting)), default=0)
    return Moments(0, largest * compute.num_bytes)


def stash_bytes(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """Factors of the weight products that a split backward leaves: each input once, each output's gradient."""
    if arch.unit_kind(unit) is UnitKind.EMBEDDING:
        return _part(arch, setting) * (compute.num_bytes + (arch.dropout > 0))  # all of its backward is weight work
    inputs: dict[str, int] = {}
    outputs = 0
    for each in _products(arch, unit, setting):
        routes = each.name == "mlp.router"  # in float32, of a copy where others read lower precisions
        width = Role.PRECISE.num_bytes(compute) if routes else compute.num_bytes
        rows = setting.expert_rows(arch.experts) if arch.experts and each.name.startswith("mlp.experts.") else each.m
        reads = "mlp.shared.stream" if routes and width == compute.num_bytes else _input_of(each.name)
        inputs[reads] = rows * each.k * width
        outputs += rows * each.n * width
    return sum(inputs.values()) + outputs + _halves(arch, unit, setting) * compute.num_bytes


def _halves(arch: Arch, unit: int, setting: Setting) -> int:
    """Elements of a ring's gradient of keys that stay with the values' (`BlockBackward._turn_back`)."""
    turned = arch.rope is not None or arch.qk_norm
    is_half = setting.crossing is not None and setting.crossing.ulysses == 1 and turned
    return setting.tokens * arch.kv_heads * arch.head_dim if is_half and 0 < unit < arch.head_unit else 0


def _embedding(arch: Arch, setting: Setting, compute: Dtype) -> int:
    """Bytes of a look-up beyond what leaves it: on a tensor axis the rows with and without those of other ranks, and
    their sum; learned positions and the sum with them; then the random numbers of a dropout."""
    tape = Tape()
    hidden = setting.tokens * arch.hidden * compute.num_bytes
    part = _part(arch, setting) * compute.num_bytes
    learned = hidden if arch.rope is None and not arch.alibi else 0
    tape.come(hidden)
    if setting.ways > 1:
        tape.flash(hidden)
        tape.come(learned, 0 if setting.gathers else learned)
    else:
        tape.come(learned)
    if setting.gathers:
        tape.come(part, _arriving(hidden, setting))
    elif learned:
        tape.come(hidden)
    tape.go(tape.live - part)
    dropped = part // compute.num_bytes if arch.dropout else 0
    tape.flash(8 * dropped)
    tape.come(dropped)
    tape.flash(2 * part if arch.dropout else 0)
    return tape.peak - part - dropped


def _embedding_back(arch: Arch, setting: Setting, compute: Dtype, gradients: Gradients) -> Moments:
    """On a tensor axis autograd makes the gradient of the table from a cotangent that is zero where others hold the
    row; else rows are added where they belong, in the dtype of the flat gradient."""
    if not gradients.in_place:
        return Moments(gradients.own, gradients.own)
    part, width = _part(arch, setting), compute.num_bytes
    mask = part if arch.dropout else 0
    if setting.ways > 1:
        hidden, table = setting.tokens * arch.hidden * width, arch.vocab * arch.hidden * width
        whole = hidden * (2 if setting.gathers else 1)
        places = gradients.own - table  # of learned positions: made first, there until they are added up
        return Moments(places + max(whole, hidden + table) - mask, places + table - mask, of_autograd=True)
    fallen = part * width if arch.dropout else 0
    widened = part * gradients.width if gradients.width != width else 0
    return Moments(2 * fallen - mask, fallen - mask + widened)


def _part(arch: Arch, setting: Setting) -> int:
    """Elements of the stream that a rank holds."""
    return setting.tokens * arch.hidden // (setting.ways if setting.gathers else 1)


def _compiled_block(arch: Arch, unit: int, setting: Setting, compute: Dtype, gradients: Gradients) -> Moments:
    width, hidden = compute.num_bytes, setting.tokens * arch.hidden * compute.num_bytes
    factors = (2 if arch.gated else 1) * setting.tokens * arch.ffn * width
    weights = {each.name.rpartition(".")[2]: each.weight * width for each in _products(arch, unit, setting)}
    kept = kept_bytes(arch, unit, setting, compute)
    first_half = sum(size for name, size in kept.items() if name.startswith("mlp."))
    middle = sum(weights.get(name, 0) for name in ("gate", "up", "down")) + 2 * hidden - first_half
    late = gradients.own + hidden - sum(kept.values())
    return Moments(max(factors + weights.get("down", 0), middle), late)


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
    widened = gradients.in_place and gradients.width != compute.num_bytes
    product = arch.vocab * arch.hidden * compute.num_bytes if widened else 0
    at_norm = _at_last_norm(arch, unit, setting, compute)
    if setting.ways > 1:
        summed = _leaving(hidden, setting)
        if not gradients.in_place:
            return Moments(gradients.own + summed, gradients.own + summed)
        return Moments(summed, max(summed + product, at_norm))
    precise = logits * Role.PRECISE.num_bytes(compute)
    kept = sum(kept_bytes(arch, unit, setting, compute).values())
    at_product = logits * compute.num_bytes - precise  # log-probabilities are gone
    if not gradients.in_place:
        return Moments(max(2 * precise, at_product + gradients.own + hidden), gradients.own + hidden - kept)
    if compute.num_bytes >= 4:
        return Moments(hidden, max(hidden, at_norm))
    return Moments(2 * precise, max(at_product + max(product, hidden), at_norm))


def _at_last_norm(arch: Arch, unit: int, setting: Setting, compute: Dtype) -> int:
    """Bytes beyond what was kept when the norm before the head has its gradient: that and the one of its output, and
    what lower precisions compute it with; all that comes after it is given back."""
    kept = kept_bytes(arch, unit, setting, compute)
    given_back = sum(size for name, size in kept.items() if name.startswith("loss.") or name == "norm.output")
    return _of_last_norm(arch, setting, compute) - given_back


def _of_last_norm(arch: Arch, setting: Setting, compute: Dtype) -> int:
    raised = Role.UPCAST.num_bytes(compute) if arch.norm is Norm.RMS else 0
    return _part(arch, setting) * (2 * compute.num_bytes + 3 * raised)


def _products(arch: Arch, unit: int, setting: Setting) -> list[Operation]:
    done = operations(arch, unit, setting.tokens, setting.sequence)
    return [each for each in done if each.kind is OperationKind.MATMUL]


def _input_of(product: str) -> str:
    """Products that read one tensor share its name."""
    path, _, leaf = product.rpartition(".")
    shared = {"query": "stream", "key": "stream", "value": "stream", "gate": "stream", "up": "stream"}
    return f"{path}.{shared.get(leaf, leaf)}"
