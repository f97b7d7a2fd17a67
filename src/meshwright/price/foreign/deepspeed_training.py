"""Precision, optimizer and learning rate in DeepSpeed's words, both ways.

WarmupLR, WarmupDecayLR     the peak is the scheduler's own warmup_max_lr (0.001 unsaid), whatever the optimizer's lr
WarmupCosineLR              the peak is the optimizer's lr, the least a share of it
gradients                   in the dtype of the model; float32 for bf16 without ZeRO
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config.schema import RunConfig
from meshwright.price.foreign.dialect import Format, Keys, number, ratio_of, refuse, table

__all__ = ["read_training", "training_tables"]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_PARAMS = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
_UNSAID: dict[str, Keys] = {
    "adamw": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
}
_DECAY = 0.01  # of torch's AdamW, which is taken where torch_adam is asked for
_WARMUP = 1000
_LEAST, _PEAK = 1e-4, 1e-3
_KNOWN = {
    "bf16": {"enabled"},
    "fp16": {"enabled", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
             "consecutive_hysteresis", "auto_cast"},
    "data_types": {"grad_accum_dtype"},
    "optimizer": {"type", "params"},
    "scheduler": {"type", "params"},
    "tensor_parallel": {"autotp_size"},
    "expert_parallel": {"enabled", "autoep_size"},
}  # fmt: skip
_KNOWN_PARAMS = {
    "optimizer": {*_PARAMS, "torch_adam", "adam_w_mode", "fused", "bias_correction", "momentum"},
    "scheduler": {"warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_type", "total_num_steps",
                  "cos_min_ratio", "warmup_min_ratio"},
}  # fmt: skip


def read_training(given: Mapping[str, Any], keys: Keys, notes: list[str]) -> set[str]:
    """Add the keys of training; returns the names inside the tables that were left alone. Raises RequestError."""
    _read_precision(given, keys, notes)
    keys["optimizer.clip_norm"] = given.get("gradient_clipping", 0.0)
    if "seed" in given:
        keys["seed"] = given["seed"]
    if given.get("optimizer"):
        _read_optimizer(table(Format.DEEPSPEED, given, "optimizer"), keys, notes)
        _read_schedule(given, keys, notes)
    elif given.get("scheduler"):
        notes.append("scheduler: the optimizer is the script's there, and so is the peak rate; ours stays")
    left = set()
    for name, known in _KNOWN.items():
        inside = table(Format.DEEPSPEED, given, name)
        left |= {f"{name}.{each}" for each in set(inside) - known}
        if name in _KNOWN_PARAMS:
            params = table(Format.DEEPSPEED, inside, "params")
            left |= {f"{name}.params.{each}" for each in set(params) - _KNOWN_PARAMS[name]}
    return left


def _read_precision(given: Mapping[str, Any], keys: Keys, notes: list[str]) -> None:
    on = [name for name in ("bf16", "fp16") if _enabled(given, name)]
    if len(on) > 1:
        raise refuse(Format.DEEPSPEED, "bf16 and fp16", "enables one of them")
    if on:
        keys["precision.compute"] = {"bf16": "bfloat16", "fp16": "float16"}[on[0]]
        keys["precision.reduce"] = keys["precision.compute"] if on == ["fp16"] or keys["parallel.zero"] else "float32"
    summed = _dtype("grad_accum_dtype", table(Format.DEEPSPEED, given, "data_types").get("grad_accum_dtype"))
    if summed:
        keys["precision.reduce"] = summed
    sent = _dtype("communication_data_type", given.get("communication_data_type"))
    if sent and sent != keys.get("precision.reduce", "float32"):
        notes.append(f"communication_data_type: gradients are sent as {sent} there; ours as they are summed")


def _enabled(given: Mapping[str, Any], name: str) -> bool:
    value = table(Format.DEEPSPEED, given, name).get("enabled", False)
    if not isinstance(value, bool):
        raise refuse(Format.DEEPSPEED, f"{name}.enabled: {value}", "wants true or false there", ("true", "false"))
    return value


def _dtype(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if str(value) not in _DTYPES:
        raise refuse(Format.DEEPSPEED, f"{name}: {value}", "has no such type", tuple(_DTYPES))
    return _DTYPES[str(value)]


def _read_optimizer(optimizer: Mapping[str, Any], keys: Keys, notes: list[str]) -> None:
    values = table(Format.DEEPSPEED, optimizer, "params")
    kind = str(optimizer.get("type", "AdamW")).lower()
    if kind not in ("adam", "adamw", "sgd"):
        raise refuse(Format.DEEPSPEED, f'optimizer.type = "{kind}"', "has it, ours has not", ("AdamW", "SGD"))
    ours = "sgd" if kind == "sgd" else "adamw"
    keys["optimizer.kind"] = ours
    usual = dict(_UNSAID[ours])
    if kind == "adamw" and values.get("torch_adam"):
        usual["weight_decay"] = _DECAY
    found = {name: values.get(name, default) for name, default in usual.items()}
    keys |= {f"optimizer.{_PARAMS[name]}": value for name, value in found.items()}
    if kind == "adam" and not values.get("adam_w_mode", True):
        notes.append("adam_w_mode false: decay is added to gradients there; ours is decoupled")
    if kind == "sgd" and values.get("momentum"):
        notes.append(f"momentum {values['momentum']}: ours is plain")


def _read_schedule(given: Mapping[str, Any], keys: Keys, notes: list[str]) -> None:
    """The learning rate over the steps of an optimizer that the file names."""
    scheduler = table(Format.DEEPSPEED, given, "scheduler")
    if not scheduler:
        keys |= {"optimizer.schedule": "constant", "optimizer.min_learning_rate": 0.0, "optimizer.warmup_steps": 0}
        return
    values = table(Format.DEEPSPEED, scheduler, "params")
    shape = str(scheduler.get("type", "WarmupLR"))
    if shape not in _SCHEDULES:
        raise refuse(Format.DEEPSPEED, f'scheduler.type = "{shape}"', "has it, ours has not", tuple(_SCHEDULES))
    keys["optimizer.schedule"] = _SCHEDULES[shape]
    keys["optimizer.warmup_steps"] = values.get("warmup_num_steps", _WARMUP)
    if values.get("total_num_steps") is not None:
        keys["train.steps"] = values["total_num_steps"]
    elif shape != "WarmupLR":
        notes.append("total_num_steps is not given: train.steps stays")
    if shape == "WarmupCosineLR":
        peak = number(Format.DEEPSPEED, "optimizer.params.lr", keys["optimizer.learning_rate"])
        ratio = number(Format.DEEPSPEED, "scheduler.params.cos_min_ratio", values.get("cos_min_ratio", _LEAST))
        keys["optimizer.min_learning_rate"] = ratio * peak
    else:
        told = table(Format.DEEPSPEED, table(Format.DEEPSPEED, given, "optimizer"), "params").get("lr")
        peak = number(Format.DEEPSPEED, "scheduler.params.warmup_max_lr", values.get("warmup_max_lr", _PEAK))
        if told is not None and told != peak:
            notes.append(f"lr {told} of the optimizer counts for nothing beside {shape}: its warmup_max_lr is {peak:g}")
        keys |= {"optimizer.learning_rate": peak, "optimizer.min_learning_rate": 0.0}
    if values.get("warmup_type", "log") == "log" and keys["optimizer.warmup_steps"]:
        notes.append("warm-up: logarithmic there unless warmup_type is linear; ours is linear")
    if values.get("warmup_min_lr") or values.get("warmup_min_ratio"):
        notes.append("warm-up begins above no rate there; ours at none")


def training_tables(run: RunConfig) -> dict[str, Any]:
    """Precision, optimizer and scheduler; what they cannot say is found when they are read back."""
    optimizer, out = run.optimizer, dict[str, Any]()
    short = {ours: theirs for theirs, ours in _DTYPES.items()}
    if run.precision.compute.value in ("bfloat16", "float16"):
        out["bf16" if run.precision.compute.value == "bfloat16" else "fp16"] = {"enabled": True}
        if run.precision.reduce.value in short:
            out["data_types"] = {"grad_accum_dtype": short[run.precision.reduce.value]}
            out["communication_data_type"] = short[run.precision.reduce.value]
    params: dict[str, Any] = {"lr": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.kind.value == "adamw":
        params |= {"betas": list(optimizer.betas), "eps": optimizer.eps}
    out["optimizer"] = {"type": {"adamw": "AdamW", "sgd": "SGD"}.get(optimizer.kind.value, "?"), "params": params}
    kind = next(theirs for theirs, ours in _SCHEDULES.items() if ours == optimizer.schedule.value)
    shape: dict[str, Any] = {"warmup_num_steps": optimizer.warmup_steps, "warmup_type": "linear"}
    if kind == "WarmupCosineLR":
        shape["cos_min_ratio"] = ratio_of(optimizer.min_learning_rate, optimizer.learning_rate)
    else:
        shape["warmup_max_lr"] = optimizer.learning_rate
    if kind != "WarmupLR" and run.train.steps:
        shape["total_num_steps"] = run.train.steps
    out["scheduler"] = {"type": kind, "params": shape}
    return out
