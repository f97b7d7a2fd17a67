"""Batch, optimizer, steps and precision in Megatron-LM's words, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.price.foreign.arguments import argument_number
from meshwright.price.foreign.dialect import Format, Keys, Source, refuse, whole

__all__ = ["TRAINING_ARGUMENTS", "read_training", "training_words"]

TRAINING_ARGUMENTS = {
    "seq-length": "data.sequence_length", "micro-batch-size": "batch.micro", "global-batch-size": "batch.global",
    "lr": "optimizer.learning_rate", "min-lr": "optimizer.min_learning_rate",
    "lr-warmup-iters": "optimizer.warmup_steps", "weight-decay": "optimizer.weight_decay", "adam-eps": "optimizer.eps",
    "clip-grad": "optimizer.clip_norm", "train-iters": "train.steps", "seed": "seed",
    "save-interval": "checkpoint.every", "log-interval": "train.log_every", "eval-interval": "train.eval_every",
    "moe-aux-loss-coeff": "moe.auxiliary_loss", "moe-z-loss-coeff": "moe.z_loss",
}  # fmt: skip
_SCHEDULES = "constant", "linear", "cosine"
_UNSAID = {
    "optimizer.min_learning_rate": 0.0, "optimizer.warmup_steps": 0, "optimizer.schedule": "linear",
    "optimizer.clip_norm": 1.0, "optimizer.eps": 1e-8, "seed": 1234, "train.log_every": 100, "train.eval_every": 1000,
}  # fmt: skip


def read_training(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    """Add the keys of training beside those of the layout. Raises RequestError."""
    if (style := given.get("lr-decay-style")) is not None:
        if style not in _SCHEDULES:
            raise refuse(Format.MEGATRON, f"--lr-decay-style {style}", "has it, ours has not", _SCHEDULES)
        keys["optimizer.schedule"] = style
    if {"adam-beta1", "adam-beta2"} & set(given):
        usual = {"adam-beta1": "0.9", "adam-beta2": "0.999"}
        keys["optimizer.betas"] = [float(argument_number(name, given.get(name, beta))) for name, beta in usual.items()]
    kind = given.get("optimizer", "adam")
    if kind not in ("adam", "adamw", "sgd"):
        raise refuse(Format.MEGATRON, f"--optimizer {kind}", "has it, ours has not", ("adam", "sgd"))
    keys["optimizer.kind"] = {"adam": "adamw"}.get(kind, kind)
    _read_batch(keys, notes)
    _read_precision(given, keys, notes)
    _read_samples(given, keys)
    _read_unsaid(given, keys, notes)
    _read_decay(given, keys, notes)
    if "calculate-per-token-loss" not in given:
        notes.append(
            "loss: there each micro-batch's mean counts alike; ours divides the sum by the trained tokens of the "
            "global batch (equal where every token is trained)"
        )
    if argument_number("attention-dropout", given.get("attention-dropout", "0.1")):
        notes.append("--attention-dropout: ours never drops attention probabilities")
    if "rampup-batch-size" in given:
        notes.append("--rampup-batch-size: ours has the whole batch from the first step on; steps are counted with it")


def _read_batch(keys: Keys, notes: list[str]) -> None:
    """One micro-batch on every replica, where the global batch is not told."""
    if "batch.global" in keys or "batch.micro" not in keys:
        return
    if isinstance(keys["mesh.dp"], int):
        micro = whole(Format.MEGATRON, "--micro-batch-size", keys["batch.micro"])
        keys["batch.global"] = micro * keys["mesh.dp"] * keys.get("mesh.ep", 1)
    else:
        notes.append("--global-batch-size is not given: batch.global stays; it is micro x data-parallel ranks there")


def _read_precision(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
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


def _read_samples(given: Mapping[str, str], keys: Keys) -> None:
    """Steps that are told in samples, or as a share."""
    for theirs, ours in (("train-samples", "train.steps"), ("lr-warmup-samples", "optimizer.warmup_steps")):
        if theirs in given:
            keys[ours] = _steps(given, keys, theirs)
    for theirs, ours in (("train-tokens", "train.steps"), ("lr-warmup-tokens", "optimizer.warmup_steps")):
        if theirs in given:  # Megatron-DeepSpeed, which stops at the first of both
            steps = _steps(given, keys, theirs)
            keys[ours] = min(steps, keys.get(ours, steps))
    if "lr-warmup-fraction" in given and "train.steps" in keys:
        share = float(argument_number("lr-warmup-fraction", given["lr-warmup-fraction"]))
        if not 0 <= share <= 1:
            raise refuse(Format.MEGATRON, f"--lr-warmup-fraction {share:g}", "wants a share of the steps there")
        if "lr-decay-samples" in given:
            total = _steps(given, keys, "lr-decay-samples")
        else:
            name = "lr-decay-iters" if "lr-decay-iters" in given else "train-iters"
            told = argument_number(name, given[name]) if name in given else keys["train.steps"]
            total = whole(Format.MEGATRON, f"--{name}", told)
        keys["optimizer.warmup_steps"] = int(share * total)


def _steps(given: Mapping[str, str], keys: Keys, name: str) -> int:
    batch = keys.get("batch.global")
    if not batch:
        raise refuse(Format.MEGATRON, f"--{name}", "wants --global-batch-size beside it")
    told = whole(Format.MEGATRON, f"--{name}", argument_number(name, given[name]), 0)
    step = whole(Format.MEGATRON, "--global-batch-size", batch)
    if name.endswith("-tokens"):
        step *= whole(Format.MEGATRON, "--seq-length", keys.get("data.sequence_length", 0))
    return told // step


def _read_unsaid(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    """What an optimizer has there where nothing is said."""
    decay, momentum = given.get("weight-decay", "0.01"), given.get("sgd-momentum", "0.9")
    usual: Keys = dict(_UNSAID)
    if keys["optimizer.kind"] == "sgd":
        usual["optimizer.weight_decay"] = 0.0
        theirs = {"--weight-decay": decay, "--sgd-momentum": momentum}
        if told := [f"{name} {value}" for name, value in theirs.items() if argument_number(name[2:], value)]:
            notes.append(f"--optimizer sgd: ours is plain, without {' and '.join(told)} of there")
    else:
        usual |= {"optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.999]}
    if "optimizer.learning_rate" in keys:
        for name, value in usual.items():
            keys.setdefault(name, value)


def _read_decay(given: Mapping[str, str], keys: Keys, notes: list[str]) -> None:
    """Where the rate falls over other steps than those of the run, or begins elsewhere."""
    if "optimizer.learning_rate" not in keys:
        return
    steps = keys.get("train.steps")
    if "lr-decay-tokens" in given:
        decay: int | float | None = _steps(given, keys, "lr-decay-tokens")
    elif "lr-decay-samples" in given:
        decay = _steps(given, keys, "lr-decay-samples")
    else:
        decay = argument_number("lr-decay-iters", given["lr-decay-iters"]) if "lr-decay-iters" in given else None
    if decay is not None and decay != steps and keys["optimizer.schedule"] != "constant":
        notes.append(f"the rate falls over {decay} steps there and then stays; ours falls over all {steps} of the run")
    if keys["optimizer.warmup_steps"]:
        notes.append("warm-up: step s (from 0) has s / warm-up of the peak there, (s + 1) / warm-up in ours")
    if "override-opt_param-scheduler" in given or "lr-warmup-init" in given:
        notes.append("--lr-warmup-init: ours begins at no rate")


def training_words(source: Source) -> Iterator[tuple[str, ...]]:
    """The arguments of training; what they cannot say is found when they are read back."""
    run = source.run
    for name, key in TRAINING_ARGUMENTS.items():
        value = _at(run, key)
        if value is not None and not key.startswith("moe.") and (value or name != "save-interval"):
            yield f"--{name}", _shown(value)
    if source.arch.experts is not None:
        yield from _balance_words(source)
    yield "--optimizer", {"adamw": "adam"}.get(run.optimizer.kind.value, run.optimizer.kind.value)
    if run.optimizer.kind.value == "sgd":
        yield "--sgd-momentum", "0"
    yield "--adam-beta1", _shown(run.optimizer.betas[0]), "--adam-beta2", _shown(run.optimizer.betas[1])
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


def _balance_words(source: Source) -> Iterator[tuple[str, ...]]:
    moe = source.run.moe
    kind = "seq_aux_loss" if moe.balance.value == "auxiliary" else "none"
    yield "--moe-router-load-balancing-type", kind
    yield "--moe-aux-loss-coeff", _shown(moe.auxiliary_loss if moe.balance.value == "auxiliary" else 0.0)
    yield "--moe-z-loss-coeff", _shown(moe.z_loss)
    if moe.balance.value == "bias":
        yield ("--moe-router-enable-expert-bias",)
    if moe.capacity:
        yield "--moe-expert-capacity-factor", _shown(moe.capacity)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _at(run: Any, key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(run, section)
    return getattr(value, {"global": "global_"}.get(name, name)) if name else value
