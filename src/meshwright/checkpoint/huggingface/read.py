"""A Hugging Face folder as a source of logical tensors. Only safetensors files are opened; nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.arch.arch import Arch
from meshwright.arch.huggingface import arch_from_hf, read_hf_config
from meshwright.checkpoint.container import Entry, is_plain_name, read_container
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.huggingface.names import BASE_PREFIX, HFTensor, hf_tensors, is_bookkeeping
from meshwright.checkpoint.source import Source, SourceFile, Stored
from meshwright.checkpoint.storage import Local
from meshwright.checkpoint.strict import Reader, parse
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError

__all__ = ["INDEX", "SIDE_FILES", "SINGLE", "HFFolder", "open_hf", "side_files"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What is carried along, byte by byte, beside the weights."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_HEAD = "lm_head.weight"
_MAX_INDEX_BYTES = 1 << 28


@dataclass(frozen=True)
class HFFolder:
    """`source` gives every logical tensor of `arch`, in whatever type it is stored."""

    folder: Path
    config: Mapping[str, Any]
    arch: Arch
    source: Source


def open_hf(folder: str | Path) -> HFFolder:
    """Open the weights of a folder with config.json. Reads headers only, and a tied head that is stored once more.

    Raises RequestError where the folder holds no such model or another one than its config.json says, DamagedError
    for broken files.
    """
    config = read_hf_config(folder)
    arch = arch_from_hf(config)
    place = Path(folder).expanduser()
    place = place.parent if place.is_file() else place
    storage = Local(place)
    files: list[SourceFile] = []
    found: dict[str, tuple[int, Entry]] = {}
    for name in _weight_files(storage, place):
        path = _path(place, name)
        size, entries = _entries(storage, path)
        for entry in entries:
            if entry.name in found:
                raise RequestError(str(place), f"holds {entry.name} in two files")
            found[entry.name] = len(files), entry
        files.append(SourceFile(path, size))
    stored = tuple(each for tensor in hf_tensors(arch) for each in _stored(tensor, found, arch, place))
    _check_rest(found, {each.name for each in hf_tensors(arch)}, arch, place)
    source = Source(storage, tuple(files), stored)
    if arch.tie_embeddings and _HEAD in found:
        _check_tied(source, *found[_HEAD], place)
    return HFFolder(place, config, arch, source)


def side_files(folder: Path) -> list[Path]:
    """Tokenizer, generation settings and templates that lie in `folder`. Raises RequestError for links out of it."""
    found = [folder / name for name in SIDE_FILES if (folder / name).is_file()]
    for file in found:
        _followed(folder, file.name)
    return found


def _path(folder: Path, name: str) -> str:
    """`name`, as a storage of `folder` opens it, which follows no links by itself."""
    return str(_followed(folder, name)) if (folder / name).is_symlink() else name


def _followed(folder: Path, name: str) -> Path:
    """The file itself. A folder that nobody vouches for may name any file of this machine by a link, so links lead
    inside it, or to where a download cache keeps the files of all revisions:

        models--org--name/snapshots/REVISION/model.safetensors -> models--org--name/blobs/DIGEST

    Raises RequestError for any other.
    """
    home, real = folder.resolve(), (folder / name).resolve()
    homes = {home, home.parents[1] / "blobs"} if home.parent.name == "snapshots" else {home}
    if real.parent not in homes:
        rule = f"is a link to {real}, out of its folder, and is not followed"
        raise RequestError(str(folder / name), rule, ("the file itself",))
    return real


def _weight_files(storage: Local, place: Path) -> list[str]:
    index = storage.read(_path(place, INDEX))
    names = storage.names("")
    if index is not None:
        where = storage.where(INDEX)
        if len(index) > _MAX_INDEX_BYTES:
            raise DamagedError(where, f"has {len(index)} bytes, which no index has")
        listed = Reader(parse(index, where), where).object("weight_map").values()
        files = sorted({str(each) for each in listed})
        if bad := [name for name in files if not is_plain_name(name)]:
            raise DamagedError(where, f"names the file {bad[0][:60]!r}: only plain .safetensors names are opened")
        return files
    if SINGLE in names:
        return [SINGLE]
    if pickles := [file.name for pattern in _PICKLES for file in place.glob(pattern)]:
        rule = f"is a pickle, which runs code when it is loaded, and is never opened; wanted is {SINGLE}"
        raise RequestError(str(place / pickles[0]), rule, ("save_pretrained(safe_serialization=True)",))
    raise RequestError(str(place), f"holds neither {SINGLE} nor {INDEX}")


def _entries(storage: Local, name: str) -> tuple[int, tuple[Entry, ...]]:
    reading = storage.open(name)
    try:
        return reading.size, read_container(reading, storage.where(name))
    finally:
        reading.close()


def _stored(tensor: HFTensor, found: Mapping[str, tuple[int, Entry]], arch: Arch, place: Path) -> tuple[Stored, ...]:
    name = tensor.name if tensor.name in found else tensor.name.removeprefix(BASE_PREFIX[Family(arch.family)])
    if name not in found:
        raise RequestError(str(place), f"has no {tensor.name}, which its config.json asks for")
    file, entry = found[name]
    if entry.shape != tensor.shape:
        shapes = f"{list(entry.shape)}, its config.json asks for {list(tensor.shape)}"
        raise RequestError(str(place), f"holds {name} of shape {shapes}")
    if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
        raise RequestError(str(place), f"holds {name} as {entry.dtype}: quantised weights are not read")
    return tuple(Stored(part, file, entry.offset, entry.dtype, tensor.box) for part in tensor.parts)


def _check_rest(found: Mapping[str, tuple[int, Entry]], known: set[str], arch: Arch, place: Path) -> None:
    """No weight is left out in silence."""
    prefix = BASE_PREFIX[Family(arch.family)]
    for name in found:
        tied = name == _HEAD and arch.tie_embeddings
        if name not in known and prefix + name not in known and not tied and not is_bookkeeping(name):
            raise RequestError(str(place), f"holds {name}, which a {arch.family} of this config.json does not have")


def _check_tied(source: Source, file: int, head: Entry, place: Path) -> None:
    """A head that is stored beside the embedding it is tied to is that embedding, or it would be left out in silence.
    Raises RequestError."""
    (embedding,) = (each for each in source.stored if each.piece.tensor == "embedding.weight")
    same = (head.dtype, head.num_bytes) == (embedding.dtype, torch.Size(embedding.box).numel() * head.dtype.itemsize)
    readings = [source.storage.open(source.files[number].path) for number in (file, embedding.file)]
    try:
        step = readings[0].request_bytes
        one, other = bytearray(step), bytearray(step)
        for begin in range(0, head.num_bytes if same else 0, step):
            size = min(step, head.num_bytes - begin)
            for reading, offset, into in zip(readings, (head.offset, embedding.offset), (one, other), strict=True):
                reading.read_into(offset + begin, memoryview(into)[:size])
            same = same and one[:size] == other[:size]
    finally:
        for reading in readings:
            reading.close()
    if not same:
        rule = f"holds a {_HEAD} that is not its embedding, and its config.json ties them"
        raise RequestError(str(place), rule, ("tie_word_embeddings = false",))
