"""The layout in Megatron-LM's words, both ways.

theirs                                  ours
DP = world / (TP PP CP)                 dp x ep          their expert axis is no factor of the world: it is folded
EP                                      ep               over DP (and CP), ours stands beside dp
--use-distributed-optimizer             zero 1           N instances: within replicas / N
layers / (PP x chunks) on every stage   stages = [..]    ours, balanced, counts embedding and head
order tp-cp-ep-dp-pp (inner first)      pp dp ep cp tp   the same, outermost first
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from meshwright.price.foreign.arguments import argument_number
from meshwright.price.foreign.dialect import Format, Keys, Source, refuse, whole
from meshwright.price.foreign.megatron_model import whole_argument

__all__ = ["LAYOUT_ARGUMENTS", "layout_words", "read_degrees", "read_layout"]

LAYOUT_ARGUMENTS = {
    "tensor-model-parallel-size": "mesh.tp", "pipeline-model-parallel-size": "mesh.pp",
    "context-parallel-size": "mesh.cp", "expert-model-parallel-size": "mesh.ep",
    "num-virtual-stages-per-pipeline-rank": "parallel.chunks",
}  # fmt: skip
_CONTEXT = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
_SHARDED = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_FEWER = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_COUNTED = "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"
_METHODS: tuple[str, ...] = ("type:transformer", "type:transformer|embedding")
_SELECTED = "core_attn"
_OTHER = {"pipeline-model-parallel-split-rank", "pipeline-model-parallel-comm-backend-split", "use-tp-pp-dp-cp-mapping",
          "tensor-model-parallel-split", "hybrid-context-parallel", "dynamic-context-parallel"}  # fmt: skip


def read_degrees(given: Mapping[str, str], keys: Keys, ranks: int, notes: list[str]) -> None:
    """Add mesh.dp: what the ranks leave. Raises RequestError where they do not divide."""
    if "ds-sequence-parallel-size" in given:  # Megatron-DeepSpeed
        keys |= {"mesh.cp": whole_argument(given, "ds-sequence-parallel-size"), "parallel.context": "ulysses"}
    if "moe-expert-parallel-size" in given:
        keys["mesh.ep"] = whole_argument(given, "moe-expert-parallel-size")
    ep = keys.get("mesh.ep", 1)
    fixed = keys.get("mesh.tp", 1) * keys.get("mesh.pp", 1) * keys.get("mesh.cp", 1)
    keys["mesh.dp"] = "fill"
    if not ranks:
        notes.append("arguments do not name the world size: dp is what the launcher leaves (# ranks N, or mesh.dp=N)")
        return
    if ranks % fixed:
        lower = ranks // fixed * fixed
        rule = f"wants a multiple of TP x PP x CP = {fixed}"
        works = tuple(f"--ranks {each}" for each in (lower, lower + fixed) if each)
        raise refuse(Format.MEGATRON, f"{ranks} ranks", rule, works)
    if ranks % (fixed * ep):
        rule = f"folds experts over DP x CP: DP = {ranks // fixed} is no multiple of EP, which ours must be"
        raise refuse(Format.MEGATRON, f"--expert-model-parallel-size {ep} on {ranks} ranks", rule, ("a smaller EP",))
    keys["mesh.dp"] = ranks // fixed // ep


def read_layout(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    """Add the keys of the layout but for mesh.dp, which `read_degrees` has added. Raises RequestError."""
    for name in sorted(_OTHER & set(given)):
        raise refuse(Format.MEGATRON, f"--{name} {given[name]}".strip(), "has it, ours has not")
    keys["parallel.sequence"] = "sequence-parallel" in given
    _read_sharding(given, keys, notes)
    _read_stages(given, keys)
    _read_context(given, keys)
    _read_recomputation(given, keys, notes)
    keys["parallel.asynchronous_tensor"] = "tp-comm-overlap" in given
    offloads = {"optimizer-cpu-offload", "cpu-optimizer"} & set(given)
    keys["parallel.offload"] = "optimizer" if offloads else "none"
    share = given.get("optimizer-offload-fraction", "1.0")
    if offloads and argument_number("optimizer-offload-fraction", share) != 1:
        raise refuse(Format.MEGATRON, f"--optimizer-offload-fraction {share}", "offloads a share, ours all", ("1.0",))
    if "use-tp-pp-dp-mapping" in given:
        keys["mesh.order"] = ["dp", "pp", "ep", "cp", "tp"]
    etp = whole_argument(given, "expert-tensor-parallel-size", keys.get("mesh.tp", 1))
    if etp != keys.get("mesh.tp", 1):
        rule = "cuts experts otherwise than the rest over the tensor axis, which ours cannot"
        raise refuse(Format.MEGATRON, f"--expert-tensor-parallel-size {etp}", rule, (str(keys.get("mesh.tp", 1)),))


def _read_sharding(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    stage = int("use-distributed-optimizer" in given)
    if {"use-megatron-fsdp", "use-custom-fsdp"} & set(given):
        strategies = {name: each for each, name in _SHARDED.items()}
        name = given.get("data-parallel-sharding-strategy", "no_shard")
        if name not in strategies:
            raise refuse(Format.MEGATRON, f"--data-parallel-sharding-strategy {name}", "has no such", tuple(strategies))
        stage = strategies[name]
    elif "use-torch-fsdp2" in given:
        stage = 3
    elif "zero-stage" in given:  # Megatron-DeepSpeed
        stage = whole(Format.MEGATRON, "--zero-stage", argument_number("zero-stage", given["zero-stage"]), 0)
    keys["parallel.zero"] = stage
    instances = whole_argument(given, "num-distributed-optimizer-instances")
    if instances > 1 and isinstance(keys["mesh.dp"], int):
        replicas = keys["mesh.dp"] * keys.get("mesh.ep", 1) * keys.get("mesh.cp", 1)
        if replicas % instances:
            rule = f"wants a divisor of the replicas, {replicas}"
            raise refuse(Format.MEGATRON, f"--num-distributed-optimizer-instances {instances}", rule)
        keys["parallel.zero_shard_within"] = replicas // instances
    elif instances > 1:
        notes.append(f"{instances} optimizer instances: parallel.zero_shard_within is the replicas over {instances}")


def _read_stages(given: Mapping[str, str], keys: Keys) -> None:
    """Stages as they are cut there: as many blocks on each, unless the arguments say otherwise."""
    pp, layers = keys.get("mesh.pp", 1), keys.get("model.layers", 0)
    if pp == 1:
        keys.pop("parallel.chunks", None)
        return
    per = "num-layers-per-virtual-pipeline-stage"
    if per in given and layers:
        blocks = whole_argument(given, per)
        if layers % (pp * blocks):
            rule = f"wants stages of equal size: {layers} layers on {pp} stages are no multiple of it"
            raise refuse(Format.MEGATRON, f"--{per} {blocks}", rule)
        keys["parallel.chunks"] = layers // pp // blocks
    if layout := given.get("pipeline-model-parallel-layout"):
        keys["parallel.stages"] = [_blocks(part) for part in layout.split("|")]
        keys["parallel.chunks"] = len(keys["parallel.stages"]) // pp
    elif layers:
        keys["parallel.stages"] = _even(given, layers, pp * keys.get("parallel.chunks", 1))
    if keys.get("parallel.chunks", 1) > 1:
        keys["parallel.schedule"] = "interleaved"


def _even(given: Mapping[str, str], layers: int, parts: int) -> list[int]:
    """Blocks of each stage: equal, but for the first and the last where they are told or count more than blocks."""
    if parts > layers:
        rule = f"wants a block at least on each of {parts} stages"
        raise refuse(Format.MEGATRON, f"--num-layers {layers}", rule, (f"--num-layers {parts}",))
    ends: list[int | None] = [whole_argument(given, name) if name in given else None for name in _FEWER]
    method = given.get("pp-partition-method", "type:transformer")  # Megatron-DeepSpeed
    if method.replace(" ", "").lower() not in _METHODS:
        raise refuse(Format.MEGATRON, f"--pp-partition-method {method}", "cuts stages by size", tuple(_METHODS))
    extra = [int(name in given or "embedding" in method) for name in _COUNTED]
    if ends == [None, None]:
        each, left = divmod(layers + sum(extra), parts)
        out = [each] * parts
        out[0], out[-1] = out[0] - extra[0], out[-1] - extra[1]
    else:
        told = [end for end in ends if end is not None]
        each, left = divmod(layers - sum(told), max(parts - len(told), 1))
        out = [each] * parts
        out[0], out[-1] = (each if end is None else end for end in ends)
    if left or min(out) < 1 or sum(out) != layers:
        rule = f"wants as many blocks on each of {parts} stages"
        works = (f"--num-layers {layers // parts * parts or parts}", "--pipeline-model-parallel-layout")
        raise refuse(Format.MEGATRON, f"--num-layers {layers}", rule, works)
    return out


def _blocks(part: str) -> int:
    """Blocks of a stage of a layout string: Et*3, ttt, t*2L."""
    count, rest = 0, part.replace("E", "").replace("L", "")
    while rest:
        if not rest.startswith("t"):
            raise refuse(Format.MEGATRON, f"--pipeline-model-parallel-layout {part}", "has stages ours cannot have")
        rest = rest[1:]
        digits = ""
        if rest.startswith("*"):
            rest = rest[1:]
            while rest[:1].isdecimal():
                digits, rest = digits + rest[0], rest[1:]
        name = "pipeline-model-parallel-layout"
        count += whole(Format.MEGATRON, f"--{name} {part}", argument_number(name, digits or "1"))
    return count


def _read_context(given: Mapping[str, str], keys: Keys) -> None:
    if "ds-sequence-parallel-size" in given:
        return
    kind = (given.get("cp-comm-type", "p2p").split() or [""])[0]
    if kind not in ("a2a+p2p", *_CONTEXT.values()):
        raise refuse(Format.MEGATRON, f"--cp-comm-type {kind}", "has no such kind", tuple(_CONTEXT.values()))
    if kind == "a2a+p2p":
        keys["parallel.context_inner"] = whole_argument(given, "hierarchical-context-parallel-sizes")
    else:
        keys["parallel.context"] = {theirs: ours for ours, theirs in _CONTEXT.items()}[kind]


def _read_recomputation(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    kind = given.get("recompute-granularity", "selective" if "recompute-activations" in given else "none")
    if "checkpoint-activations" in given:  # of older releases
        kind = "full"
    if kind not in ("none", "selective", "full"):
        raise refuse(Format.MEGATRON, f"--recompute-granularity {kind}", "has no such kind", ("selective", "full"))
    keys["parallel.recompute"] = kind
    if kind == "selective":
        if (modules := given.get("recompute-modules", _SELECTED)) != _SELECTED:
            notes.append(
                f"selective recomputation is of {modules} there; ours is of the attention core and what is cheap"
            )
        else:
            notes.append("selective recomputation is of the attention core there; ours also repeats what is cheap")
    if kind != "full":
        return
    many = whole_argument(given, "recompute-num-layers")
    stages = keys.get("parallel.stages") or [keys.get("model.layers", 0)]
    if given.get("recompute-method") == "block" and many < max(stages):
        rule = "recomputes so many blocks of a stage and keeps the rest; ours recomputes every block or none"
        works = ("--recompute-method uniform --recompute-num-layers 1",)
        raise refuse(Format.MEGATRON, f"--recompute-method block --recompute-num-layers {many}", rule, works)
    if given.get("recompute-method") != "block" and many > 1:
        notes.append(f"--recompute-num-layers {many}: keeps the input of every {many}th block there, ours of every one")


def layout_words(source: Source) -> Iterator[tuple[str, ...]]:
    """The layout's arguments; what they cannot say is found when they are read back."""
    parallel, at = source.run.parallel, source.degrees
    for name, key in LAYOUT_ARGUMENTS.items():
        if key.startswith("mesh."):
            yield f"--{name}", str(at[key.removeprefix("mesh.")])
    if source.arch.experts is not None:
        yield "--expert-tensor-parallel-size", str(at["tp"])
    if parallel.sequence and at["tp"] > 1:
        yield ("--sequence-parallel",)
    if parallel.zero == 1:
        yield ("--use-distributed-optimizer",)
        if 0 < parallel.zero_shard_within < source.replicas:
            yield "--num-distributed-optimizer-instances", str(source.replicas // parallel.zero_shard_within)
    elif parallel.zero > 1:
        yield "--use-megatron-fsdp", "--data-parallel-sharding-strategy", _SHARDED[parallel.zero]
    if at["pp"] > 1:
        yield from _stage_words(source)
    if at["cp"] > 1 and parallel.context_inner > 1:
        sizes = str(parallel.context_inner), str(at["cp"] // parallel.context_inner)
        yield "--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", *sizes
    elif at["cp"] > 1:
        yield "--cp-comm-type", _CONTEXT[parallel.context.value]
    if parallel.recompute.value == "full":
        yield "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"
    elif parallel.recompute.value == "selective":
        yield "--recompute-granularity", "selective"
    if parallel.asynchronous_tensor and at["tp"] > 1:
        yield ("--tp-comm-overlap",)
    if parallel.offload.value == "optimizer":
        yield ("--optimizer-cpu-offload",)
    if [axis for axis in source.run.mesh.order if at[axis] > 1 and axis in ("dp", "pp")] == ["dp", "pp"]:
        yield ("--use-tp-pp-dp-mapping",)


def _stage_words(source: Source) -> Iterator[tuple[str, ...]]:
    """Equal stages are what Megatron makes of itself; others are drawn."""
    if len(set(source.stages)) == 1:
        if source.run.parallel.chunks > 1:
            yield "--num-virtual-stages-per-pipeline-rank", str(source.run.parallel.chunks)
        return
    parts = [f"t*{blocks}" if blocks > 1 else "t" * blocks for blocks in source.stages]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    yield "--pipeline-model-parallel-layout", shlex.quote("|".join(parts))
