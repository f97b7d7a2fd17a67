"""Why a figure is what it is: its formula in the field's symbols, the numbers of this layout, and the source.

b micro-batch  s sequence  h hidden  f ffn  a heads  V vocabulary  L layers     t tensor  p stages  v chunks
d data  c context  e expert  m micro-batches a step  Ψ parameters of a rank  N ranks
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.config.errors import RequestError
from meshwright.price.constants import CONSTANTS
from meshwright.price.layouts import of_plan
from meshwright.price.memory import block_bytes
from meshwright.price.price import DENSE_RANGE, EXPERTS_RANGE, GUESS_FACTOR, MEMORY_RANGE, Price
from meshwright.price.schedule import in_flight
from meshwright.price.weights import weights

__all__ = ["FIGURES", "Figure", "explain"]

_ZERO = "ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054, section 5"
_KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198, table 2 and section 4.2.3"
_NARAYANAN = "Narayanan et al. 2021, arXiv:2104.04473, section 2.2"
_NCCL = "nccl-tests PERFORMANCE.md (factors); NCCL graph/tuning.cc (latencies)"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure's formula, where it comes from, and the constants in it."""

    formula: str
    source: str
    constants: tuple[str, ...] = ()


FIGURES: Mapping[str, Figure] = {
    "memory.parameters": Figure("2Ψ bytes in 16 bits; ZeRO-3: 2Ψ/(d·e·c); its gathered units are buffers", _ZERO),
    "memory.gradients": Figure(
        "w·Ψ bytes, w = bytes of precision.reduce; w·Ψ/(d·e·c) under ZeRO-3, and under ZeRO-2 unless they are "
        "accumulated over micro-batches (usual trainers; the literal program scatters each micro-batch's)",
        _ZERO, ("memory.flat",)),
    "memory.optimizer": Figure("AdamW: 2·4Ψ bytes of moments; from ZeRO-1 on 8Ψ/(d·e·c)", _ZERO),
    "memory.master": Figure("4Ψ bytes where precision.master is wider; from ZeRO-1 on 4Ψ/(d·e·c)", _ZERO),
    "memory.activations": Figure(
        "blocks of the stage x micro-batches in flight x bytes a block.  A block keeps sbh(34 - masks)/t "
        "(GELU, 4h) or its table of saved tensors; +5as²b/t with unfused attention; 2sbh[/t] where it is recomputed, "
        "then once a block's working set.  In flight: 1F1B p - i on stage i (the first stage holds p: its activations "
        "do not fall with p), interleaved p(1 + (p-1)/(pv)), gpipe m",
        _KORTHIKANTI, ("memory.working",)),
    "memory.logits": Figure(
        "k·s·b·V/(t·c) bytes on the last stage only, k bytes a logit", "float32 cross entropy, counted",
        ("memory.logits.plain", "memory.logits.fused")),
    "memory.buffers": Figure(
        "ZeRO-3: 2 of the largest unit and one block, gathered (2 bytes an element); a unit's own gradients; "
        "messages between stages 2sbh[/t]; what visits of states that live elsewhere",
        f"{_ZERO}; the step program's bound of gathered units"),
    "memory.peak": Figure("the largest sum of all categories over the first, an inner and the last stage",
                          "running sum over the step program, or the closed form of its fullest moment"),
    "memory.reserved": Figure("peak x slack + blocks half used by the caching allocator", "published pairs",
        ("memory.slack", "memory.slack_bytes")),
    "memory.device": Figure("reserved + contexts and libraries + a buffer a kind of communicator", "ml-engineering",
                            ("memory.context_bytes", "memory.communicator_bytes")),
    "time.step_seconds": Figure("pipeline + exposed sums and gathers + optimizer", "parts",
                                ("straggler",)),
    "time.compute": Figure(
        "m x (blocks x (forward + backward [+ forward again]) + embedding + head) on the stage that works longest.  "
        "A product: waves of tiles over the processors at peak x share alone x share in training x clock; attention: "
        "4sbh·keys/t FLOPs at its kernel's share; elementwise: bytes over memory bandwidth",
        "constants below; the device's file",
        ("matrix.wave", "matrix.ramp_k", "attention.ramp_tokens", "elementwise.stream", "memory.share", "clock.power")),
    "time.tp": Figure("2 all-reduces of 2sbh bytes a pass and block: 2(t-1)/t·S/B + latency; 2 gathers, 2 scatters, "
                      "backward one gather more (sequence parallel)", f"arXiv:1909.08053, {_KORTHIKANTI}; {_NCCL}",
                      ("link.node", "link.call_s", "overlap.tensor")),
    "time.cp": Figure("(c-1) x max(hop - core, latency) forward, twice the bytes backward; a hop sends keys and values",
                      "ring attention, arXiv:2310.01889", ("link.network",)),
    "time.ep": Figure("4 all-to-alls of 2·k·b·s·h bytes a block and step; across nodes (N-1)(1-(1-1/N)^k)/k of it",
                      "arXiv:2412.19437, section 3.2", ("overlap.experts", "overlap.experts.graphs")),
    "time.dp": Figure("gradient sums and parameter gathers that no backward or forward hides: ZeRO-0 2(d-1)/d·wΨ/B, "
                      "ZeRO-1, 2 scatter and gather, ZeRO-3 three of 2Ψ a micro-batch", f"{_ZERO}; {_NCCL}",
                      ("overlap.reduce", "overlap.slow", "link.network")),
    "time.pp": Figure("messages of 2sbh[/t] bytes that nothing hides: 2 a micro-batch and chunk", _NARAYANAN,
                      ("overlap.border",)),
    "time.bubble": Figure("pipeline less work: (p-1)/m of the work for gpipe and 1F1B, (p-1)/(vm) interleaved; more "
                          "where stages are uneven: the slowest one sets the pace", _NARAYANAN),
    "time.optimizer": Figure("bytes of the own shard and a pass over all gradients, over memory bandwidth", "counted",
                             ("optimizer.bytes",)),
    "time.other": Figure("launches that the device waits for, and the slowest node of all", "counted",
                         ("host.fused", "host.legacy", "host.eager", "host.experts", "straggler")),
    "time.mfu": Figure("model FLOPs (6 x matmul parameters + causal attention) / (step x N x peak)", "contract"),
    "flops.model_per_step": Figure("(6 x matmul parameters + 6Lsh_a) x tokens: causal half of attention, look-up out",
                                   "contract; arXiv:2205.05198, appendix A"),
    "flops.model_full_attention_per_step": Figure("(6 x matmul parameters + 12Lsh_a) x tokens", "older papers"),
    "flops.hardware_per_step": Figure("model FLOPs and the forward that recomputation repeats", "contract"),
    "memory.per_rank": Figure("memory.peak of the stage that the rank is on", "ranks of a stage run one program"),
    "time.data": Figure("0: batches are read beside the step before", "the trainer's loader"),
    "time.model_tflops_per_gpu": Figure("model FLOPs (causal attention) / (step x N)", "contract"),
    "time.tokens_per_second_per_gpu": Figure("sequences a step x s / (step x N)", "contract"),
    "plan": Figure("digest of every stored field of the plan", "equal plans have equal digests"),
    "ranks": Figure("N = d·t·p·c·e", "mesh"),
    "cluster": Figure("the cluster file; every rate in it carries its source", "--cluster"),
    "fits": Figure("memory.reserved <= the device's memory", "what every published run that ran satisfies"),
    "fits_surely": Figure(
        f"memory.device x {1 + MEMORY_RANGE:g} <= the device's memory; without the {100 * MEMORY_RANGE:g} % where "
        "memory is the fold of the program",
        "nine of ten published figures of memory lie so near"),
    "peak_at": Figure("the action of the program, or the moment of the closed form, with most live bytes", "fold"),
    "time_from": Figure("the closed form where it is within 1 % of the simulated program, else the simulation",
                        "price/applies.py names what the forms do not hold for"),
    "uncalibrated": Figure("whether the rates of the device are guesses, good to a factor of 4",
                           "cluster.sources; `meshwright doctor --calibrate` measures this machine"),
    "range": Figure(f"step x (1 ± {100 * DENSE_RANGE:g} %), with experts ± {100 * EXPERTS_RANGE:g} %, between "
                    f"1/{GUESS_FACTOR:g} and {GUESS_FACTOR:g} times where uncalibrated; "
                    "masked documents from no other keys on",
                    "nine of ten published runs"),
    "trained_peak": Figure(
        "the fold of the program that `meshwright train` runs, with as many micro-batches as fill its pipeline; null "
        "where it does not run such a plan", "plan/folds/memory.py, held against dry runs and allocators",
    ),
    "fits_trained": Figure("trained_peak, as reserved, <= the device's memory; true where nothing runs", "-"),
    "worst_routing_peak": Figure("peak + routed activations x (min(e, experts/active) - 1): all tokens to one rank",
                                 "bound"),
    "dollars_per_step": Figure("price of a device-hour x N x step / 3600", "cluster.price"),
    "traffic": Figure("calls x payload of the step program; sent: all-reduce 2(n-1)/n, gather, scatter, all-to-all "
                      "(n-1)/n of it, a send all", _NCCL),
}  # fmt: skip


def explain(price: Price, name: str) -> Iterator[str]:
    """Formula, this layout's numbers, source and constants of the figure called `name`. Raises RequestError."""
    key = "traffic" if name.startswith("traffic") else name
    if key not in FIGURES:
        near = [each for each in FIGURES if each.endswith(f".{name}")] or difflib.get_close_matches(
            name, FIGURES, 3, 0.4
        )
        raise RequestError(f"--why {name}", "is no figure of an estimate", near or list(FIGURES)[:5])
    figure = FIGURES[key]
    yield f"{name} = {_value(price, name)}"
    yield f"  formula    {figure.formula}"
    yield f"  here       {_symbols(price)}"
    yield from _details(price, key)
    yield f"  source     {figure.source}"
    for constant in (CONSTANTS[each] for each in figure.constants):
        yield f"  constant   {constant.name} = {constant.value:g} ({constant.kind.value}: {constant.source})"


def _value(price: Price, name: str) -> str:
    section, _, key = name.partition(".")
    if key == "per_rank":
        return ", ".join(f"stage {stage}: {peak:,} bytes" for stage, peak in enumerate(price.stage_peaks))
    if not key and name != "traffic":
        return str(price.to_json()[name])
    if key.endswith("_per_gpu"):
        return f"{price.to_json()['time'][key]:.6g}"
    if section == "memory":
        return f"{price.memory[key]:,} bytes"
    if section == "flops":
        return f"{price.flops[key]:,}"
    if section == "traffic":
        rows = [row for row in price.traffic if not key or row.group.value == key]
        return f"{sum(row.sent_bytes for row in rows):,} bytes sent in {sum(row.calls for row in rows):,} calls"
    if key == "mfu":
        return f"{price.mfu}"
    return f"{price.step_seconds if key == 'step_seconds' else price.parts[key]:.6g} s"


def _symbols(price: Price) -> str:
    plan, arch, degrees = price.plan, price.plan.arch, price.plan.degrees
    symbols = {
        "b": plan.batch.micro, "s": plan.data.sequence_length, "h": arch.hidden, "f": arch.ffn, "a": arch.heads,
        "V": arch.vocab, "L": arch.layers, "t": degrees.tp, "p": degrees.pp, "v": plan.pipeline.chunks,
        "d": degrees.dp, "c": degrees.cp, "e": degrees.ep, "m": plan.accumulation, "N": degrees.ranks,
    }  # fmt: skip
    return "  ".join(f"{name} {value}" for name, value in symbols.items())


def _details(price: Price, key: str) -> Iterator[str]:
    found = _DETAILS.get(key)
    if found is not None:
        yield from (f"             {line}" for line in found(price))


def _states(price: Price) -> Iterator[str]:
    held = weights(price.target, of_plan(price.plan))
    for place, dense, routed in zip(("first", "inner", "last"), held.dense, held.routed, strict=True):
        if dense[0] + routed[0]:
            yield f"Ψ on the {place} stage: {dense[0] + routed[0]:,.0f} parameters"


def _activations(price: Price) -> Iterator[str]:
    layouts = of_plan(price.plan)
    tokens = layouts.micro * price.target.sequence / layouts.cp
    flight = in_flight(layouts, np.zeros(1))[0]
    yield f"a block keeps {block_bytes(price.target, layouts, tokens)[0]:,.0f} bytes of a micro-batch"
    yield f"on the first stage: micro-batches in flight {flight:g}, blocks {layouts.first[0]:g}"


_DETAILS: Mapping[str, Callable[[Price], Iterator[str]]] = {
    "memory.parameters": _states, "memory.gradients": _states, "memory.optimizer": _states, "memory.master": _states,
    "memory.activations": _activations,
}  # fmt: skip
