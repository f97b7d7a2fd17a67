"""Every constant of the price model that is not on a device's data sheet, in one table.

    sheet      stated by a vendor
    measured   somebody measured it, independently of the runs the model is checked with
    prior      an order of magnitude from how the thing works; the model is insensitive to it
    fitted     chosen so that published step times come out right (docs/pricing.md): at most ten

Names are `what.generation.class`; nothing here belongs to one model, run or source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    SHEET = "sheet"
    MEASURED = "measured"
    PRIOR = "prior"
    FITTED = "fitted"


@dataclass(frozen=True, slots=True)
class Constant:
    """One number, where it comes from, and what it means."""

    name: str
    value: float
    kind: Kind
    source: str


_RUNS = "published step times, docs/pricing.md"

_TABLE = (
    # Products in training over the same products alone (whose share of the peak stands in the device's file).
    Constant("matrix.volta.16", 0.95, Kind.PRIOR, "as ampere, on older libraries"),
    Constant("matrix.ampere.16", 0.95, Kind.FITTED, _RUNS),
    Constant("matrix.ada.16", 0.95, Kind.PRIOR, "as ampere"),
    Constant("matrix.ada.8", 0.95, Kind.PRIOR, "as ampere"),
    Constant("matrix.hopper.16", 0.825, Kind.FITTED, _RUNS),
    Constant("matrix.hopper.8", 0.973, Kind.FITTED, _RUNS),
    Constant("matrix.blackwell.16", 0.97, Kind.PRIOR, "as blackwell in 8 bits"),
    Constant("matrix.blackwell.8", 0.973, Kind.FITTED, _RUNS),
    Constant("matrix.blackwell.4", 0.97, Kind.PRIOR, "as blackwell in 8 bits"),
    Constant("matrix.cdna3.16", 0.95, Kind.PRIOR, "as ampere"),
    Constant("matrix.cdna3.8", 0.95, Kind.PRIOR, "as ampere"),
    Constant("matrix.cpu.32", 1.00, Kind.PRIOR, "no other limit known"),
    Constant("clock.power", 0.865, Kind.FITTED, f"{_RUNS}: sustained clock = (power / power that the peak needs)^x"),
    # Fused attention: share of the 16-bit peak at long sequences.
    Constant("attention.volta.triton", 0.30, Kind.PRIOR, "no measurement found"),
    Constant("attention.ampere.triton", 0.40, Kind.MEASURED, "arXiv:2307.08691, fig. 4: Triton at about 125 TFLOP/s"),
    Constant("attention.ampere.flash2", 0.60, Kind.MEASURED, "FlashAttention-2, arXiv:2307.08691, fig. 5-6"),
    Constant("attention.ampere.flash3", 0.60, Kind.PRIOR, "no such kernel: as flash2"),
    Constant("attention.ada.flash2", 0.55, Kind.PRIOR, "as ampere"),
    Constant("attention.hopper.triton", 0.236, Kind.FITTED, _RUNS),
    Constant("attention.hopper.flash2", 0.33, Kind.MEASURED, "FlashAttention-3, arXiv:2407.08608: flash2 on H100 0.35"),
    Constant("attention.hopper.flash3", 0.56, Kind.FITTED, f"{_RUNS}; the paper reaches 0.60"),
    Constant("attention.blackwell.flash2", 0.20, Kind.PRIOR, "Hopper's kernels on a device twice as fast"),
    Constant("attention.blackwell.flash3", 0.517, Kind.FITTED, _RUNS),
    Constant("attention.cdna3.flash2", 0.30, Kind.PRIOR, "no measurement found"),
    Constant("attention.cpu.flash2", 0.40, Kind.PRIOR, "no measurement found"),
    Constant("attention.ramp_tokens", 512, Kind.PRIOR, "sequence at which half the rate is reached"),
    Constant("attention.backward", 0.75, Kind.MEASURED, "rate of backward to forward; arXiv:2307.08691, fig. 5-6"),
    Constant("attention.batched", 0.70, Kind.PRIOR, "batched products of unfused attention against large ones"),
    Constant("attention.ramp_k", 256, Kind.PRIOR, "the same of batches of small products"),
    Constant("attention.score_bytes.forward", 3, Kind.PRIOR, "causal softmax, counted: reads half of the scores"),
    Constant("attention.score_bytes.backward", 4, Kind.PRIOR, "the same backward: halves of two, writes one"),
    Constant("attention.dropout_bytes", 5, Kind.PRIOR, "dropped probabilities, counted: read, written, a mask"),
    # Products of any shape.
    Constant("matrix.wave", 0.6, Kind.PRIOR, "how much of the last wave's idle processors shows"),
    Constant("matrix.ramp_k", 256, Kind.PRIOR, "inner dimension lost to filling and draining a tile"),
    Constant("matrix.unaligned", 0.10, Kind.PRIOR, "a dimension that is no multiple of 64"),
    Constant("matrix.four", 7.0, Kind.PRIOR, "rows not of 16 bytes: no asynchronous copies, half vectors"),
    Constant("matrix.odd", 11.0, Kind.PRIOR, "rows not of 8 bytes: no tensor cores"),
    Constant("matrix.grouped", 0.85, Kind.PRIOR, "grouped products of experts against one product"),
    # Memory traffic.
    Constant("memory.share", 0.80, Kind.MEASURED, "streaming kernels reach 0.8-0.9 of the data sheet"),
    Constant("elementwise.stream", 20, Kind.PRIOR, "forward bytes an element, counted: two norms, two residual sums"),
    Constant("dropout.forward", 2, Kind.PRIOR, "two masks, where there is dropout"),
    Constant("dropout.backward", 10, Kind.PRIOR, "the same backward: gradients pass through masks"),
    Constant("bias.backward", 4, Kind.PRIOR, "gradients of two biases read the stream's, where there are biases"),
    Constant("elementwise.heads.fused", 4, Kind.PRIOR, "bytes an element of query, key and value: read and written"),
    Constant("elementwise.heads.unfused", 6, Kind.PRIOR, "bytes an element around batched products of strided views"),
    Constant("elementwise.eager", 1.66, Kind.FITTED, f"{_RUNS}: traffic of unfused elementwise kernels over fused"),
    Constant("elementwise.rotary", 24, Kind.PRIOR, "bytes a query or key element of eager float32 rotation, forward"),
    Constant("elementwise.backward.stream", 1.2, Kind.PRIOR, "the same of backward over forward, counted"),
    Constant("elementwise.backward.inner", 1.6, Kind.PRIOR, "bytes of backward over forward, inner activations"),
    Constant("experts.copied.forward", 14, Kind.PRIOR, "bytes a routed element: permuted, sent, weighed, summed"),
    Constant("experts.copied.backward", 20, Kind.PRIOR, "the same backward"),
    Constant("experts.fused.forward", 6, Kind.PRIOR, "the same where exchanges permute (releases from 26.06, NVL72)"),
    Constant("experts.fused.backward", 8, Kind.PRIOR, "the same backward"),
    Constant("recompute.cheap", 0.5, Kind.PRIOR, "norms and activations among a block's elementwise traffic"),
    Constant("logits.bytes.fused", 30, Kind.PRIOR, "float32 cross entropy, forward and backward, a logit"),
    Constant("logits.bytes.eager", 50, Kind.PRIOR, "the same with a copy for every step"),
    Constant("optimizer.bytes", 46, Kind.PRIOR, "Adam: reads and writes of master, moments, gradient, parameter; norm"),
    # The host.
    Constant("host.fused", 0.9e-3, Kind.PRIOR, "launches of one block, forward and backward, seconds"),
    Constant("host.legacy", 0.7e-3, Kind.PRIOR, "the same for the few large kernels of 2020"),
    Constant("host.eager", 4.9e-3, Kind.MEASURED, "unfused kernels launched from Python: shows at micro-batch 1"),
    Constant("host.experts", 0.0094, Kind.FITTED, f"{_RUNS}: dropless routing synchronises with the host"),
    Constant("host.grace", 0.64, Kind.PRIOR, "the same on a Grace host"),
    Constant("host.graphs", 0.43, Kind.PRIOR, "the same where releases from 26.06 capture graphs (NVL72 only)"),
    # Links.
    Constant("link.node", 0.78, Kind.MEASURED, "ring bus bandwidth of NVLink: 235 of 300, 365 of 450 GB/s"),
    Constant("link.network", 0.70, Kind.PRIOR, "bus bandwidth under training load; idle fabrics reach 0.9"),
    Constant("link.call_s", 12e-6, Kind.MEASURED, "one collective call; NCCL graph/tuning.cc base 8-14 us"),
    Constant("link.hop.node_s", 3.4e-6, Kind.MEASURED, "NCCL graph/tuning.cc, ring, Simple, NVLink"),
    Constant("link.hop.network_s", 14e-6, Kind.MEASURED, "NCCL graph/tuning.cc, ring, Simple, network"),
    Constant("straggler", 0.01, Kind.PRIOR, "spread of the speed of nodes: a step waits for the slowest of them"),
    Constant("overlap.tensor", 0.60, Kind.PRIOR, "hidden share of tensor collectives cut into chunks under products"),
    Constant("overlap.experts", 0.20, Kind.PRIOR, "hidden share of the experts' all-to-all"),
    Constant("overlap.experts.graphs", 0.60, Kind.PRIOR, "the same where releases from 26.06 capture graphs"),
    Constant("overlap.slow", 0.10, Kind.PRIOR, "what computing and communicating at once costs of the shorter"),
    Constant("overlap.reduce", 0.85, Kind.PRIOR, "hidden share of gradient sums that fit under a backward"),
    Constant("overlap.border", 0.70, Kind.PRIOR, "hidden share of sends between stages of modern stacks"),
    # Memory outside tensors.
    Constant("memory.slack", 1.01, Kind.MEASURED, "reserved over allocated of eight published pairs, and beside it"),
    Constant("memory.slack_bytes", 0.7e9, Kind.MEASURED, "half-used blocks: pairs differ by 0.3-2.3 GiB at any size"),
    Constant("memory.flat", 0.75, Kind.PRIOR, "flat copies of legacy sharded optimizers, in gradients"),
    Constant("memory.gathered", 1.5e9, Kind.MEASURED, "DeepSpeed: max_live_parameters 1e9, prefetch_bucket_size 5e8"),
    Constant("memory.bucket", 5e8, Kind.MEASURED, "DeepSpeed: reduce_bucket_size, elements of gradients on their way"),
    Constant("memory.working", 1.35, Kind.PRIOR, "a recomputed block's working set, gradients of activations among it"),
    Constant("memory.logits.plain", 12, Kind.MEASURED, "a logit, its float32 log-probability, two gradients"),
    Constant("memory.logits.fused", 6, Kind.PRIOR, "16-bit logits and gradient; 8 beside a float32 copy"),
    Constant("memory.context_bytes", 2.0e9, Kind.MEASURED, "CUDA context 0.5-1 GB, libraries and workspaces"),
    Constant("memory.communicator_bytes", 0.6e9, Kind.PRIOR, "channel buffers of one kind of group"),
)  # fmt: skip

CONSTANTS: Mapping[str, Constant] = MappingProxyType({each.name: each for each in _TABLE})
"""By name."""

VALUES: Mapping[str, float] = MappingProxyType({each.name: each.value for each in _TABLE})
"""What the model reads; a validation passes others."""

FITTED = tuple(each.name for each in _TABLE if each.kind is Kind.FITTED)
