"""Reading a whole checkpoint to say whether every byte of it is what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.checkpoint.beside import beside_of
from meshwright.checkpoint.container import read_container
from meshwright.checkpoint.diagnose import sign
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.fingerprint import Fingerprints, check_fingerprint
from meshwright.checkpoint.folder import load_manifest
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.source import Source, SourceFile, Stored, checkpoint_source, open_file, read_block
from meshwright.checkpoint.storage import Reading, Storage

__all__ = ["Checked", "check_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checked:
    """`problems` in the order of files; empty where the checkpoint is whole. `manifest` None where it is damaged."""

    manifest: Manifest | None
    problems: tuple[DamagedError, ...]


def check_checkpoint(
    storage: Storage, path: str, told: Callable[[str, int], None] = lambda file, done: None
) -> Checked:
    """Every size, header, block and fingerprint of a checkpoint, in constant memory. `told(file, bytes)` as it goes."""
    try:
        manifest = load_manifest(storage, path)
    except DamagedError as error:
        return Checked(None, (error,))
    source = checkpoint_source(storage, path, manifest)
    problems: list[DamagedError] = []
    prints = Fingerprints()
    for number, file in enumerate(source.files):
        stored = [each for each in source.stored if each.file == number]
        try:
            _check_file(source, file, stored, prints, problems, told)
        except DamagedError as error:
            problems.append(error)
    try:
        beside_of(storage, path, manifest)
    except DamagedError as error:
        problems.append(error)
    if not problems:
        where = storage.where(f"{path}/{MANIFEST}" if path else MANIFEST)
        for tensor in manifest.tensors:
            try:
                check_fingerprint(where, tensor.name, tensor.fingerprint, prints.of(tensor.name))
            except DamagedError as error:
                problems.append(error)
    return Checked(manifest, tuple(problems))


def _check_file(
    source: Source, file: SourceFile, stored: list[Stored], prints: Fingerprints, problems: list[DamagedError],
    told: Callable[[str, int], None],
) -> None:  # fmt: skip
    reading = open_file(source, file)
    try:
        buffer = bytearray(min(file.block_bytes, file.num_bytes))
        damaged = False
        for number in range(len(file.digests)):
            begin = number * file.block_bytes
            size = min(file.block_bytes, file.num_bytes - begin)
            try:
                read_block(source, file, reading, number, memoryview(buffer)[:size])
            except DamagedError as error:
                problems.append(error)
                damaged = True
                continue
            sign(torch.frombuffer(buffer, dtype=torch.uint8, count=size), begin, stored, prints)
            told(source.storage.where(file.path), begin + size)
        if not damaged:
            _check_header(source, file, reading, stored)
    finally:
        reading.close()


def _check_header(source: Source, file: SourceFile, reading: Reading, stored: list[Stored]) -> None:
    """The safetensors header, which other programs read, says the same as the manifest."""
    where = source.storage.where(file.path)
    header = {(entry.offset, entry.dtype, entry.shape) for entry in read_container(reading, where)}
    if header != {(each.offset, each.dtype, each.box) for each in stored}:
        raise DamagedError(where, "the header and the manifest name different tensors")
