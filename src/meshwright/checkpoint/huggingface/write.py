"""Export: a Hugging Face folder straight from the files of a checkpoint, whatever layout wrote them.

    config.json                        generation_config.json, tokenizer files     carried along
    model.safetensors                  or model-00001-of-00003.safetensors .. and model.safetensors.index.json

A tied head is not written; the vocabulary has no padding, for no file of ours has any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.arch.arch import Arch
from meshwright.arch.huggingface.dialects import INERT
from meshwright.arch.huggingface.write import hf_config
from meshwright.checkpoint.container import plan_container
from meshwright.checkpoint.dtypes import name_of
from meshwright.checkpoint.huggingface.names import HFTensor, hf_tensors
from meshwright.checkpoint.huggingface.read import INDEX, SIDE_FILES, SINGLE
from meshwright.checkpoint.newfolder import NewFolder, new_folder
from meshwright.checkpoint.source import Source
from meshwright.checkpoint.storage import Buffer, Writing
from meshwright.checkpoint.stream import Box, stream
from meshwright.checkpoint.views import bytes_of
from meshwright.checkpoint.writer import chunks_of
from meshwright.config.errors import RequestError

__all__ = ["CONFIG", "SHARD_BYTES", "Exported", "export_weights", "merged_config"]

CONFIG = "config.json"
SHARD_BYTES = 5_000_000_000
"""Of a file, at most, as transformers cuts by default."""
_OWN_KEYS = frozenset(
    [
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "quantization_config",
        "auto_map",
        "architectures",
        "model_type",
    ]
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    tensors: int
    num_bytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Tensors of the checkpoint that the family has no place for."""


def export_weights(
    source: Source,
    arch: Arch,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    like: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the weights of `source` as a folder that transformers loads.

    `dtype` None keeps the stored type. `like` is the config.json that the model came from: keys that say nothing of
    the arithmetic (token ids) are taken over. `beside` are further files, name -> content. Raises DamagedError,
    RequestError where the family cannot be said, `out` is taken or `dtype` cannot hold a value.
    """
    known = hf_tensors(arch)
    dtypes = [dtype or source.dtype(tensor.parts[0].piece.tensor) for tensor in known]
    config = merged_config(arch, dtypes[0], like)
    sizes = [_num_bytes(tensor, kind) for tensor, kind in zip(known, dtypes, strict=True)]
    shards = _shards(sizes, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(len(shards))]
    with new_folder(out, sum(sizes)) as folder:
        _write(folder, CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        for name, content in (beside or {}).items():
            if name in SIDE_FILES:
                _write(folder, name, content)
        for name, shard in zip(names, shards, strict=True):
            _write_weights(folder, name, source, [known[n] for n in shard], [dtypes[n] for n in shard])
        if len(shards) > 1:
            where = {known[n].name: name for name, shard in zip(names, shards, strict=True) for n in shard}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
            _write(folder, INDEX, (json.dumps(index, indent=2) + "\n").encode())
        folder.finish(None)
    return Exported(len(known), sum(sizes), tuple(names))


def merged_config(arch: Arch, dtype: torch.dtype, like: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config.json of `arch`, with what `like` says of tokens and bookkeeping."""
    kept = {key: value for key, value in (like or {}).items() if key in INERT and key not in _OWN_KEYS}
    return {**kept, **hf_config(arch), "torch_dtype": str(dtype).removeprefix("torch.")}


def _write_weights(
    folder: NewFolder, name: str, source: Source, known: Sequence[HFTensor], dtypes: Sequence[torch.dtype]
) -> None:
    contents = plan_container(
        [(tensor.name, dtype, tensor.shape) for tensor, dtype in zip(known, dtypes, strict=True)], {"format": "pt"}
    )
    boxes = [Box(known[n].box, dtypes[n], known[n].parts) for n in contents.order]
    writing = folder.storage.create(folder.path(name))
    _finish(writing, [contents.header], _values(source, boxes))


def _values(source: Source, boxes: Sequence[Box]) -> Iterator[Tensor]:
    """The values in order. Raises RequestError where a narrower type would make infinities of them."""
    for filled in stream(source, boxes):
        dtype, tensor = boxes[filled.box].dtype, boxes[filled.box].parts[0].piece.tensor
        most = torch.finfo(dtype).max
        if most < torch.finfo(source.dtype(tensor)).max and bool(filled.values.isinf().any()):
            name = name_of(dtype)
            rule = f"{tensor} has values beyond {most:.5g}, the largest of {name}"
            raise RequestError(f"--dtype {name}", rule, ("bfloat16", "float32"))
        yield filled.values


def _write(folder: NewFolder, name: str, content: bytes) -> None:
    _finish(folder.storage.create(folder.path(name)), [content], ())


def _finish(writing: Writing, first: Sequence[Buffer], values: Iterable[Tensor]) -> None:
    try:
        for data in first:
            writing.write(data)
        for value in values:
            for chunk in chunks_of(value):
                writing.write(bytes_of(chunk))
        writing.finish()
    finally:
        writing.abandon()


def _shards(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Runs of tensors of at most `limit` bytes; a larger tensor has a file of its own."""
    shards: list[list[int]] = [[]]
    filled = 0
    for number, size in enumerate(sizes):
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(number)
        filled += size
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _num_bytes(tensor: HFTensor, dtype: torch.dtype) -> int:
    return torch.Size(tensor.shape).numel() * dtype.itemsize
