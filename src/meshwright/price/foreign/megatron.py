"""Megatron-LM arguments: `--name value` words, as in `megatron/training/arguments.py` (core 0.15).

theirs                                  ours
DP = world / (TP PP CP)                 dp x ep          their expert axis is no factor of the world: it is folded
EP                                      ep               over DP (and CP), ours stands beside dp
--use-distributed-optimizer             zero 1
order tp-cp-ep-dp-pp (inner first)      pp dp ep cp tp   the same, outermost first
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from meshwright.arch.arch import Norm
from meshwright.price.foreign.arguments import argument_number, arguments
from meshwright.price.foreign.dialect import Dialect, Format, Keys, Reading, Source, check_spoken, refuse, whole

__all__ = ["DIALECT"]

_SELECTIVE = "selective recomputation is of the attention core there; ours also repeats what is cheap"
_NUMBERS = {  # name -> our key; plain numbers
    "num-layers": "model.layers", "hidden-size": "model.hidden", "num-attention-heads": "model.heads",
    "ffn-hidden-size": "model.ffn", "kv-channels": "model.head_dim", "vocab-size": "model.vocab",
    "rotary-base": "model.rope_theta", "norm-epsilon": "model.norm_eps", "num-experts": "model.experts",
    "moe-router-topk": "model.experts_per_token", "moe-ffn-hidden-size": "model.expert_ffn",
    "hidden-dropout": "model.dropout", "seq-length": "data.sequence_length",
    "tensor-model-parallel-size": "mesh.tp", "pipeline-model-parallel-size": "mesh.pp",
    "context-parallel-size": "mesh.cp", "expert-model-parallel-size": "mesh.ep",
    "num-virtual-stages-per-pipeline-rank": "parallel.chunks",
    "micro-batch-size": "batch.micro", "global-batch-size": "batch.global", "lr": "optimizer.learning_rate",
    "min-lr": "optimizer.min_learning_rate", "lr-warmup-iters": "optimizer.warmup_steps",
    "weight-decay": "optimizer.weight_decay", "adam-eps": "optimizer.eps", "clip-grad": "optimizer.clip_norm",
    "train-iters": "train.steps", "seed": "seed", "save-interval": "checkpoint.every",
    "log-interval": "train.log_every",
    "eval-interval": "train.eval_every", "moe-aux-loss-coeff": "moe.auxiliary_loss", "moe-z-loss-coeff": "moe.z_loss",
}  # fmt: skip
_DEGREES = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
            "expert-model-parallel-size", "num-layers", "hidden-size", "num-attention-heads")  # fmt: skip
_FLAGS = {"sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "swiglu", "disable-bias-linear",
          "group-query-attention", "untie-embeddings-and-output-weights", "add-qkv-bias", "qk-layernorm", "bf16",
          "fp16",
          "accumulate-allreduce-grads-in-fp32", "calculate-per-token-loss", "tp-comm-overlap", "optimizer-cpu-offload",
          "use-tp-pp-dp-mapping", "overlap-grad-reduce", "overlap-param-gather", "use-flash-attn", "use-mcore-models",
          "no-masked-softmax-fusion", "no-load-optim", "no-load-rng"}  # fmt: skip
_CONTEXT = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
_SHARDED = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_IGNORED = {"overlap-grad-reduce", "overlap-param-gather", "use-flash-attn", "use-mcore-models", "attention-dropout",
            "no-masked-softmax-fusion", "no-load-optim", "no-load-rng", "transformer-impl", "distributed-backend",
            "init-method-std", "attention-softmax-in-fp32", "recompute-method", "recompute-num-layers", "save", "load",
            "data-path", "split", "tokenizer-type", "tokenizer-model", "eval-iters", "lr-decay-iters",
            "moe-token-dispatcher-type",
            "moe-grouped-gemm", "no-create-attention-mask-in-dataloader", "make-vocab-size-divisible-by"}  # fmt: skip


def _read(text: str, started: int | None = None) -> Reading:
    given, ranks = arguments(text)
    ranks = ranks or started or 0
    keys: Keys = {}
    notes: list[str] = []
    for name, value in given.items():
        if name in _NUMBERS:
            keys[_NUMBERS[name]] = argument_number(name, value)
    for name in _DEGREES:
        _whole(given, name)
    if "num-layers" in given and "vocab-size" not in given:
        notes.append("--vocab-size is the tokenizer's there: give model.vocab=N")
    _read_model(given, keys)
    _read_layout(given, keys, notes)
    _read_training(given, keys, notes)
    known = {*_NUMBERS, *_FLAGS, *_IGNORED, *_HANDLED}
    check_spoken(Format.MEGATRON, (f"--{name}" for name in given), (f"--{name}" for name in known))
    if unknown := sorted(set(given) - known):
        notes.append(f"not read: {', '.join('--' + name for name in unknown)}")
    ep = keys.get("mesh.ep", 1)
    fixed = keys.get("mesh.tp", 1) * keys.get("mesh.pp", 1) * keys.get("mesh.cp", 1)
    keys["mesh.dp"] = "fill"
    if ranks:
        if ranks % (fixed * ep):
            rule = f"folds experts over DP x CP: DP = {ranks // fixed} is no multiple of EP, which ours must be"
            raise refuse(
                Format.MEGATRON, f"--expert-model-parallel-size {ep} on {ranks} ranks", rule, ("a smaller EP",)
            )
        keys["mesh.dp"] = ranks // fixed // ep
    else:
        notes.append("arguments do not name the world size: dp is what the launcher leaves (# ranks N, or mesh.dp=N)")
    return Reading(keys, tuple(notes))


_HANDLED = {"position-embedding-type", "normalization", "num-query-groups", "max-position-embeddings", "lr-decay-style",
            "optimizer", "adam-beta1", "adam-beta2", "recompute-granularity", "cp-comm-type",
            "hierarchical-context-parallel-sizes", "data-parallel-sharding-strategy", "expert-tensor-parallel-size",
            "num-layers-per-virtual-pipeline-stage", "num-distributed-optimizer-instances",
            "pipeline-model-parallel-layout", "train-samples", "lr-warmup-samples", "lr-warmup-fraction", "fp8-format",
            "grad-reduce-in-bf16", "sgd-momentum"}  # fmt: skip


def _whole(given: dict[str, str], name: str, default: int = 1) -> int:
    """The first word of an argument that is a whole number of at least 1."""
    if name not in given:
        return default
    number = argument_number(name, (given[name].split() or [""])[0])
    return whole(Format.MEGATRON, f"--{name}", number)


def _read_model(given: dict[str, str], keys: Keys) -> None:
    if "num-layers" not in given:
        return
    for name in ("hidden-size", "num-attention-heads"):
        if name not in given:
            raise refuse(Format.MEGATRON, f"--{name}", "wants it beside --num-layers", (f"--{name} N",))
    rope = given.get("position-embedding-type", "learned_absolute") == "rope"
    routed = "num-experts" in given
    family = "gpt2"
    if rope or given.get("normalization") == "RMSNorm":
        family = "qwen3_moe" if routed and "qk-layernorm" in given else "mixtral" if routed else "llama"
        if not routed and "qk-layernorm" in given:
            family = "qwen3"
        if not routed and "add-qkv-bias" in given:
            family = "qwen2"
    keys["model.family"] = family
    keys["model.tie_embeddings"] = "untie-embeddings-and-output-weights" not in given
    if "group-query-attention" in given and "num-query-groups" in given:
        keys["model.kv_heads"] = _whole(given, "num-query-groups")
    else:
        keys["model.kv_heads"] = keys["model.heads"]
    if "max-position-embeddings" in given:
        keys["model.max_positions"] = _whole(given, "max-position-embeddings")
    if "ffn-hidden-size" not in given:
        keys["model.ffn"] = 4 * keys["model.hidden"]


def _read_layout(given: dict[str, str], keys: Keys, notes: list[str]) -> None:
    keys["parallel.sequence"] = "sequence-parallel" in given
    keys["parallel.zero"] = int("use-distributed-optimizer" in given)
    if "use-megatron-fsdp" in given:
        strategies = {name: stage for stage, name in _SHARDED.items()}
        keys["parallel.zero"] = strategies.get(given.get("data-parallel-sharding-strategy", ""), 0)
    pp = keys.get("mesh.pp", 1)
    if "num-layers-per-virtual-pipeline-stage" in given:
        per = _whole(given, "num-layers-per-virtual-pipeline-stage")
        keys["parallel.chunks"] = keys.get("model.layers", 0) // pp // per
    if layout := given.get("pipeline-model-parallel-layout"):
        keys["parallel.stages"] = [_blocks(part) for part in layout.split("|")]
        keys["parallel.chunks"] = len(keys["parallel.stages"]) // pp
    if keys.get("parallel.chunks", 1) > 1:
        keys["parallel.schedule"] = "interleaved"
    kind = (given.get("cp-comm-type", "p2p").split() or [""])[0]
    if kind not in ("a2a+p2p", *_CONTEXT.values()):
        raise refuse(Format.MEGATRON, f"--cp-comm-type {kind}", "has no such kind", tuple(_CONTEXT.values()))
    if kind == "a2a+p2p":
        keys["parallel.context_inner"] = _whole(given, "hierarchical-context-parallel-sizes")
    else:
        keys["parallel.context"] = {theirs: ours for ours, theirs in _CONTEXT.items()}[kind]
    keys["parallel.recompute"] = given.get("recompute-granularity", "none")
    keys["parallel.asynchronous_tensor"] = "tp-comm-overlap" in given
    keys["parallel.offload"] = "optimizer" if "optimizer-cpu-offload" in given else "none"
    if "use-tp-pp-dp-mapping" in given:
        keys["mesh.order"] = ["dp", "pp", "ep", "cp", "tp"]
    etp = _whole(given, "expert-tensor-parallel-size", keys.get("mesh.tp", 1))
    if etp != keys.get("mesh.tp", 1):
        rule = "cuts experts otherwise than the rest over the tensor axis, which ours cannot"
        raise refuse(Format.MEGATRON, f"--expert-tensor-parallel-size {etp}", rule, (str(keys.get("mesh.tp", 1)),))
    instances = _whole(given, "num-distributed-optimizer-instances")
    if instances > 1:
        notes.append(f"{instances} optimizer instances: parallel.zero_shard_within is the replicas over {instances}")
    if keys["parallel.recompute"] == "selective":
        notes.append(_SELECTIVE)


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


def _read_training(given: dict[str, str], keys: Keys, notes: list[str]) -> None:
    if "lr-decay-style" in given:
        keys["optimizer.schedule"] = given["lr-decay-style"]
    if {"adam-beta1", "adam-beta2"} & set(given):
        usual = {"adam-beta1": "0.9", "adam-beta2": "0.999"}
        keys["optimizer.betas"] = [float(argument_number(name, given.get(name, beta))) for name, beta in usual.items()]
    kind = given.get("optimizer", "adam")
    keys["optimizer.kind"] = {"adam": "adamw"}.get(kind, kind)
    if {"bf16", "fp16"} <= set(given):
        raise refuse(Format.MEGATRON, "--bf16 and --fp16", "takes one of them")
    if "bf16" in given or "fp16" in given:
        keys["precision.compute"] = "bfloat16" if "bf16" in given else "float16"
        wide = "accumulate-allreduce-grads-in-fp32" in given or "bf16" in given
        wide = wide and "grad-reduce-in-bf16" not in given
        keys["precision.reduce"] = "float32" if wide else keys["precision.compute"]
    if "fp8-format" in given:
        keys["precision.compute"] = "float8"
        notes.append(
            f"--fp8-format {given['fp8-format']}: products of blocks in 8 bits; ours prices them, it runs none"
        )
    _read_samples(given, keys)
    _read_unsaid(given, keys, notes)
    if "calculate-per-token-loss" not in given:
        notes.append(
            "loss: there each micro-batch's mean counts alike; ours divides the sum by the trained tokens of the "
            "global batch (equal where every token is trained)"
        )
    if given.get("attention-dropout", "0.1") not in ("0", "0.0"):
        notes.append("--attention-dropout: ours never drops attention probabilities")


def _read_samples(given: dict[str, str], keys: Keys) -> None:
    """Steps that are told in samples, or as a share."""
    batch = keys.get("batch.global")
    for theirs, ours in (("train-samples", "train.steps"), ("lr-warmup-samples", "optimizer.warmup_steps")):
        if theirs in given:
            if not batch:
                raise refuse(Format.MEGATRON, f"--{theirs}", "wants --global-batch-size beside it")
            samples = whole(Format.MEGATRON, f"--{theirs}", argument_number(theirs, given[theirs]), 0)
            keys[ours] = samples // whole(Format.MEGATRON, "--global-batch-size", batch)
    if "lr-warmup-fraction" in given and "train.steps" in keys:
        share = float(argument_number("lr-warmup-fraction", given["lr-warmup-fraction"]))
        if not 0 <= share <= 1:
            raise refuse(Format.MEGATRON, f"--lr-warmup-fraction {share:g}", "wants a share of the steps there")
        name = "lr-decay-iters" if "lr-decay-iters" in given else "train-iters"
        told = argument_number(name, given[name]) if name in given else keys["train.steps"]
        keys["optimizer.warmup_steps"] = int(share * whole(Format.MEGATRON, f"--{name}", told))


def _read_unsaid(given: dict[str, str], keys: Keys, notes: list[str]) -> None:
    """What an optimizer has there where nothing is said."""
    decay, momentum = given.get("weight-decay", "0.01"), given.get("sgd-momentum", "0.9")
    usual: Keys = {"min_learning_rate": 0.0, "warmup_steps": 0, "schedule": "linear"}
    if keys["optimizer.kind"] == "sgd":
        usual["weight_decay"] = 0.0
        theirs = {"--weight-decay": decay, "--sgd-momentum": momentum}
        if told := [f"{name} {value}" for name, value in theirs.items() if argument_number(name[2:], value)]:
            notes.append(f"--optimizer sgd: ours is plain, without {' and '.join(told)} of there")
    else:
        usual |= {"weight_decay": 0.01, "betas": [0.9, 0.999]}
    if "optimizer.learning_rate" in keys:
        for name, value in usual.items():
            keys.setdefault(f"optimizer.{name}", value)


def _write(source: Source) -> str:
    lines = [f"# ranks {source.ranks}", *(" ".join(words) for words in _arguments(source))]
    return "\n".join(lines) + "\n"


def _arguments(source: Source) -> Iterator[tuple[str, ...]]:
    run, arch, at = source.run, source.arch, source.degrees
    values: dict[str, Any] = {name: _at(run, key) for name, key in _NUMBERS.items() if not key.startswith("model.")}
    values |= {"num-layers": arch.layers, "hidden-size": arch.hidden, "num-attention-heads": arch.heads,
               "ffn-hidden-size": arch.ffn, "kv-channels": arch.head_dim, "vocab-size": arch.vocab,
               "norm-epsilon": arch.norm_eps, "hidden-dropout": arch.dropout, "attention-dropout": 0.0}  # fmt: skip
    if arch.rope is not None:
        values["rotary-base"] = arch.rope.theta
    if arch.experts is None:
        for name in ("moe-aux-loss-coeff", "moe-z-loss-coeff"):
            values.pop(name)
    else:
        values |= {"num-experts": arch.experts.count, "moe-router-topk": arch.experts.active,
                   "moe-ffn-hidden-size": arch.experts.ffn, "expert-tensor-parallel-size": at["tp"]}  # fmt: skip
    explicit = not isinstance(run.parallel.stages, str)
    if at["pp"] == 1 or run.parallel.chunks == 1 or explicit:
        values.pop("num-virtual-stages-per-pipeline-rank")
    if not values["save-interval"]:
        values.pop("save-interval")
    for name, value in values.items():
        if value is not None:
            yield f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)
    yield from _model_words(source)
    yield from _layout_words(source)
    yield from _training_words(source)


def _model_words(source: Source) -> Iterator[tuple[str, ...]]:
    arch = source.arch
    if arch.kv_heads != arch.heads:
        yield "--group-query-attention", "--num-query-groups", str(arch.kv_heads)
    yield "--position-embedding-type", "rope" if arch.rope else "learned_absolute"
    yield "--normalization", "RMSNorm" if arch.norm is Norm.RMS else "LayerNorm"
    yield "--max-position-embeddings", str(arch.max_positions or source.run.data.sequence_length)
    flags = {"swiglu": arch.gated, "disable-bias-linear": not arch.mlp_bias, "qk-layernorm": arch.qk_norm,
             "add-qkv-bias": arch.qkv_bias and not arch.mlp_bias,
             "untie-embeddings-and-output-weights": not arch.tie_embeddings}  # fmt: skip
    yield from ((f"--{name}",) for name, on in flags.items() if on)


def _layout_words(source: Source) -> Iterator[tuple[str, ...]]:
    parallel, at = source.run.parallel, source.degrees
    if parallel.sequence and at["tp"] > 1:
        yield ("--sequence-parallel",)
    if parallel.zero == 1:
        yield ("--use-distributed-optimizer",)
    elif parallel.zero > 1:
        yield "--use-megatron-fsdp", "--data-parallel-sharding-strategy", _SHARDED[parallel.zero]
    if at["pp"] > 1 and not isinstance(parallel.stages, str):
        parts = [f"t*{blocks}" if blocks > 1 else "t" * blocks for blocks in parallel.stages]
        parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
        yield "--pipeline-model-parallel-layout", shlex.quote("|".join(parts))
    if at["cp"] > 1 and parallel.context_inner > 1:
        ring = at["cp"] // parallel.context_inner
        yield (
            "--cp-comm-type",
            "a2a+p2p",
            "--hierarchical-context-parallel-sizes",
            str(parallel.context_inner),
            str(ring),
        )
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


def _training_words(source: Source) -> Iterator[tuple[str, ...]]:
    run = source.run
    yield "--optimizer", {"adamw": "adam"}.get(run.optimizer.kind.value, run.optimizer.kind.value)
    if run.optimizer.kind.value == "sgd":
        yield "--sgd-momentum", "0"
    yield "--adam-beta1", f"{run.optimizer.betas[0]:g}", "--adam-beta2", f"{run.optimizer.betas[1]:g}"
    yield "--lr-decay-style", run.optimizer.schedule.value
    kind, reduce = run.precision.compute.value, run.precision.reduce.value
    flags: dict[str, list[tuple[str, ...]]] = {
        "bfloat16": [("--bf16",)],
        "float16": [("--fp16",)],
        "float8": [("--bf16",), ("--fp8-format", "hybrid")],
    }
    yield from flags.get(kind, [])
    if reduce == "float32" and kind != "float32":
        yield ("--accumulate-allreduce-grads-in-fp32",)
    elif reduce == "bfloat16" and kind != "float32":
        yield ("--grad-reduce-in-bf16",)
    yield ("--calculate-per-token-loss",)


def _at(run: Any, key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(run, section)
    return getattr(value, {"global": "global_"}.get(name, name)) if name else value


def _differences(source: Source) -> list[str]:
    out = ["loss: --calculate-per-token-loss makes Megatron divide by trained tokens, as ours does"]
    if source.degrees["ep"] > 1:
        out.append(
            f"experts: EP {source.degrees['ep']} is folded over their DP = dp x ep = "
            f"{source.degrees['dp'] * source.degrees['ep']}, --expert-tensor-parallel-size is tp"
        )
        if source.degrees["cp"] > 1:
            out.append("experts: EP groups are context neighbours there, ours stand beside cp: other links")
    if source.run.parallel.zero == 3:
        out.append("ZeRO-3: Megatron-FSDP gathers by its own units; reshard_after_forward is its own choice")
    if source.run.parallel.recompute.value == "selective":
        out.append(_SELECTIVE)
    return out


DIALECT = Dialect(
    _read, _write, _differences,
    frozenset({"model", "mesh", "parallel", "batch", "optimizer", "precision", "train", "moe", "seed"}),
)  # fmt: skip
