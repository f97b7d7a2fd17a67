"""Hugging Face folders and checkpoints, one into the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from meshwright.arch.arch import Arch
from meshwright.checkpoint.beside import beside_of
from meshwright.checkpoint.dtypes import name_of
from meshwright.checkpoint.errors import DamagedError, spelled
from meshwright.checkpoint.fits import planned_checkpoint
from meshwright.checkpoint.huggingface.read import HFFolder, open_hf, side_files
from meshwright.checkpoint.huggingface.write import CONFIG, SHARD_BYTES, Exported, export_weights
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.rewrite import write_checkpoint
from meshwright.checkpoint.source import checkpoint_source
from meshwright.checkpoint.state import is_bias
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.strict import parse
from meshwright.config.choices import Dtype
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.plan.plan import Plan, Precision
from meshwright.plan.resolve import resolve

__all__ = ["export_checkpoint", "import_checkpoint", "plan_of_import"]


def import_checkpoint(folder: str | Path, out: str | Path, plan: Plan | None = None) -> Manifest:
    """Write the weights of an HF folder as a checkpoint of step 0 at `out`, in the type they are stored in.

    It has no states of an optimizer. `plan` None: one process. Raises what `open_hf` and `write_checkpoint` raise.
    """
    opened = open_hf(folder)
    plan = plan or plan_of_import(opened)
    config = (json.dumps(opened.config, indent=2) + "\n").encode()
    beside = {CONFIG: config} | {file.name: file.read_bytes() for file in side_files(opened.folder)}
    return write_checkpoint(opened.source, out, plan, lambda name: "/" not in name, beside=beside)


def export_checkpoint(
    storage: Storage,
    path: str,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the checkpoint at `path` of `storage` as an HF folder; `dtype` None keeps the master's.

    Tokenizer and generation settings come from `like`, else from where the model came from. Raises DamagedError,
    RequestError, CheckpointError.
    """
    manifest, plan = planned_checkpoint(storage, path)
    config, beside = _carried(storage, path, manifest, plan, like)
    source = checkpoint_source(storage, path, manifest)
    done = export_weights(source, plan.arch, out, dtype=dtype, like=config, beside=beside, shard_bytes=shard_bytes)
    return replace(done, left_out=tuple(each.name for each in manifest.tensors if is_bias(each.name)))


def plan_of_import(opened: HFFolder) -> Plan:
    """One process that computes in the narrowest type that holds every value of the types the weights are stored in:
    of bfloat16 and float16 that is float32."""
    widest = reduce(torch.promote_types, {each.dtype for each in opened.source.stored})
    return replace(_plan_alone(opened.arch), precision=_precision(Dtype(name_of(widest))))


def _precision(stored: Dtype) -> Precision:
    return Precision(stored, stored if stored is Dtype.FLOAT64 else Dtype.FLOAT32, stored)


def _plan_alone(arch: Arch) -> Plan:
    length = min(2048, arch.max_positions or 2048)
    return resolve(build_run({"mesh": {"dp": 1}, "data": {"sequence_length": length}}), arch)


def _carried(
    storage: Storage, path: str, manifest: Manifest, plan: Plan, like: str | Path | None
) -> tuple[Mapping[str, Any] | None, dict[str, bytes]]:
    """The config.json that the model came from and the files beside it, from the first place that has any."""
    if like is not None and not (str(like) and Path(like).is_dir()):
        raise RequestError(f"--like {spelled(str(like))}", "is no folder", ("a folder with tokenizer and config.json",))
    if like is None and (found := beside_of(storage, path, manifest)):
        return _config(found.pop(CONFIG, None)), found
    named = like or plan.start.folder
    if named and (place := Path(named)).is_dir():
        config = place / CONFIG
        return (
            _config(config.read_bytes() if config.is_file() else None),
            {file.name: file.read_bytes() for file in side_files(place)},
        )
    tokenizer = Path(plan.data.tokenizer)
    if tokenizer.is_dir():
        return None, {file.name: file.read_bytes() for file in side_files(tokenizer)}
    return None, {tokenizer.name: tokenizer.read_bytes()} if tokenizer.is_file() else {}


def _config(content: bytes | None) -> Mapping[str, Any] | None:
    if content is None:
        return None
    try:
        value = parse(content, CONFIG)
    except DamagedError:
        return None  # it is only asked for token ids
    return value if isinstance(value, dict) else None
