"""The keys of a run file as a list, and the valid key nearest to one that does not exist."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from meshwright.config.schema import RunConfig

__all__ = ["Key", "key_names", "key_of", "nearest_keys", "section_keys"]

Key = tuple[str, ...]

# What other trainers call our keys: too far from ours for a comparison of letters.
_ELSEWHERE = {
    "lr": ("optimizer.learning_rate",),
    "min_lr": ("optimizer.min_learning_rate",),
    "lr_scheduler": ("optimizer.schedule",),
    "wd": ("optimizer.weight_decay",),
    "grad_clip": ("optimizer.clip_norm",),
    "gradient_clipping": ("optimizer.clip_norm",),
    "max_grad_norm": ("optimizer.clip_norm",),
    "beta1": ("optimizer.betas",),
    "beta2": ("optimizer.betas",),
    "batch_size": ("batch.global", "batch.micro"),
    "global_": ("batch.global",),
    "global_batch_size": ("batch.global",),
    "train_batch_size": ("batch.global",),
    "micro_batch_size": ("batch.micro",),
    "train_micro_batch_size_per_gpu": ("batch.micro",),
    "gradient_accumulation_steps": ("batch.global", "batch.micro"),
    "seq_len": ("data.sequence_length",),
    "seq_length": ("data.sequence_length",),
    "block_size": ("data.sequence_length",),
    "tensor_parallel": ("mesh.tp",),
    "tensor_model_parallel_size": ("mesh.tp",),
    "pipeline_parallel": ("mesh.pp",),
    "pipeline_model_parallel_size": ("mesh.pp",),
    "context_parallel_size": ("mesh.cp",),
    "expert_model_parallel_size": ("mesh.ep",),
    "zero_stage": ("parallel.zero",),
    "stage": ("parallel.zero",),
    "activation_checkpointing": ("parallel.recompute",),
    "recompute_granularity": ("parallel.recompute",),
    "max_steps": ("train.steps",),
    "train_iters": ("train.steps",),
    "save_interval": ("checkpoint.every",),
    "num_layers": ("model.layers",),
    "n_layer": ("model.layers",),
    "num_hidden_layers": ("model.layers",),
    "hidden_size": ("model.hidden",),
    "n_embd": ("model.hidden",),
    "num_attention_heads": ("model.heads",),
    "n_head": ("model.heads",),
    "num_key_value_heads": ("model.kv_heads",),
    "intermediate_size": ("model.ffn",),
    "vocab_size": ("model.vocab",),
    "rms_norm_eps": ("model.norm_eps",),
    "dtype": ("precision.compute", "data.dtype"),
}


@functools.cache
def section_keys(section: type[BaseModel] = RunConfig) -> dict[str, type[BaseModel] | None]:
    """Return the names in one table, each with its class where it is a table itself."""
    return {info.alias or name: _table(info.annotation) for name, info in section.model_fields.items()}


@functools.cache
def key_names() -> tuple[str, ...]:
    """Return every key as ``section.key``, in the order of the run file."""
    return tuple(_walk(RunConfig, ""))


def key_of(location: tuple[str | int, ...]) -> Key:
    """Cut a validator's location back to its key; positions in lists and branches of unions lie below a key."""
    section: type[BaseModel] | None = RunConfig
    for depth, part in enumerate(location):
        section = section_keys(section).get(str(part)) if section is not None else None
        if section is None:
            return tuple(map(str, location[: depth + 1]))
    return tuple(map(str, location))


def nearest_keys(key: Key) -> tuple[str, ...]:
    """Return the valid keys nearest to an unknown one, best first: at least one."""
    *path, last = key
    siblings = _siblings(tuple(path))
    prefix = "".join(f"{part}." for part in path)
    every = key_names()
    same_name = tuple(name for name in every if name.endswith(f".{last}"))
    close = tuple(prefix + name for name in difflib.get_close_matches(last, siblings, n=2, cutoff=0.6))
    by_name = {name.rsplit(".", 1)[-1]: name for name in reversed(every)}
    anywhere = tuple(by_name[name] for name in difflib.get_close_matches(last, by_name, n=2, cutoff=0.7))
    return _ELSEWHERE.get(last, ()) or same_name or close or anywhere or tuple(prefix + name for name in siblings)


def _siblings(path: Key) -> tuple[str, ...]:
    section: type[BaseModel] | None = RunConfig
    for part in path:
        section = section_keys(section).get(part) if section is not None else None
    return tuple(section_keys(section)) if section is not None else tuple(section_keys())


def _walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, table in section_keys(section).items():
        if table is None:
            yield prefix + name
        else:
            yield from _walk(table, f"{prefix}{name}.")


def _table(annotation: Any) -> type[BaseModel] | None:
    """Return the table class an annotation holds, optional or not."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None
