"""Configurations that Accelerate hands to DeepSpeed and to Megatron-LM.

deepspeed_config        zero_stage, offload_*_device, gradient_clipping; or a file of DeepSpeed's own, named
megatron_lm_config      megatron_lm_tp_degree, pp_degree, num_micro_batches, sequence_parallelism, ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.price.foreign.dialect import Format, Keys, number, refuse, table, unread, whole
from meshwright.price.foreign.yaml import FLAGS

__all__ = ["PLUGINS", "flag"]

_STAGE = 2  # where none is given
_MOST = 3
_DEEPSPEED = {
    "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping",
    "gradient_accumulation_steps", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
    "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
}  # fmt: skip
_MEGATRON = {f"megatron_lm_{name}" for name in (
    "tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations",
    "use_distributed_optimizer", "gradient_clipping")}  # fmt: skip


def flag(given: Mapping[str, Any], name: str) -> bool:
    """A boolean, quoted or not; False where it is not given. Raises RequestError."""
    value, flags = str(given.get(name, False)).lower(), {**FLAGS, "1": True, "0": False}
    if value not in flags:
        raise refuse(Format.ACCELERATE, f"{name}: {given[name]}", "wants true or false there", ("true", "false"))
    return flags[value]


def _deepspeed(given: Mapping[str, Any], processes: int | None, notes: list[str]) -> Keys:
    config = table(Format.ACCELERATE, given, "deepspeed_config")
    if file := config.get("deepspeed_config_file"):
        rule = f"leaves the layout to that file: convert {file} --from deepspeed"
        raise refuse(Format.ACCELERATE, f"deepspeed_config_file: {file}", rule)
    stage = whole(Format.ACCELERATE, "zero_stage", config.get("zero_stage", _STAGE), 0)
    if stage > _MOST:
        raise refuse(Format.ACCELERATE, f"zero_stage: {stage}", "has stages 0 to 3", ("0", "1", "2", "3"))
    keys: Keys = {"parallel.zero": stage, "mesh.dp": processes or "fill"}
    for name, ours in (("optimizer", "optimizer"), ("param", "params")):
        device = str(config.get(f"offload_{name}_device", "none"))
        if device not in ("none", "cpu", "nvme"):
            raise refuse(Format.ACCELERATE, f"offload_{name}_device: {device}", "has no such device", ("none", "cpu"))
        if device != "none":
            keys["parallel.offload"] = ours
        if device == "nvme":
            keys["parallel.offload_to"] = str(config.get(f"offload_{name}_nvme_path", "offload"))
    _clipping(config, "gradient_clipping", keys)
    if "gradient_accumulation_steps" in config:
        notes.append(f"gradient_accumulation_steps {config['gradient_accumulation_steps']}: batch.global is micro x "
                     "this x ranks there")  # fmt: skip
    notes += unread(f"deepspeed_config.{name}" for name in set(config) - _DEEPSPEED)
    return keys


def _megatron(given: Mapping[str, Any], processes: int | None, notes: list[str]) -> Keys:
    config = table(Format.ACCELERATE, given, "megatron_lm_config")
    keys: Keys = {}
    for ours in ("tp", "pp"):
        name = f"megatron_lm_{ours}_degree"
        keys[f"mesh.{ours}"] = whole(Format.ACCELERATE, name, config.get(name, 1))
    fixed = keys["mesh.tp"] * keys["mesh.pp"]
    if processes is not None and processes % fixed:
        raise refuse(Format.ACCELERATE, f"num_processes: {processes}", f"wants a multiple of the degrees, {fixed}")
    keys["mesh.dp"] = "fill" if processes is None else processes // fixed
    keys["parallel.sequence"] = flag(config, "megatron_lm_sequence_parallelism")
    keys["parallel.recompute"] = "selective" if flag(config, "megatron_lm_recompute_activations") else "none"
    keys["parallel.zero"] = int(flag(config, "megatron_lm_use_distributed_optimizer"))
    _clipping(config, "megatron_lm_gradient_clipping", keys)
    if "megatron_lm_num_micro_batches" in config:
        number_of = config["megatron_lm_num_micro_batches"]
        notes.append(f"megatron_lm_num_micro_batches {number_of}: batch.global is micro x this x replicas there")
    if keys["mesh.pp"] > 1:
        notes.append("stages have as many blocks each there; ours, balanced, count embedding and head")
    notes += unread(f"megatron_lm_config.{name}" for name in set(config) - _MEGATRON)
    return keys


def _clipping(config: Mapping[str, Any], name: str, keys: Keys) -> None:
    if name in config:
        value = config[name]
        with contextlib.suppress(ValueError):  # told by `number`
            value = float(value) if isinstance(value, str) else value
        keys["optimizer.clip_norm"] = number(Format.ACCELERATE, name, value)


PLUGINS: Mapping[str, Callable[[Mapping[str, Any], int | None, list[str]], Keys]] = {
    "DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron,
}  # fmt: skip
