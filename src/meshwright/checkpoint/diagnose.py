"""Which tensors damage has reached: those whose bytes are gone, or whose fingerprint is no longer the saved one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.fingerprint import Fingerprints
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import flat_rectangles

if TYPE_CHECKING:
    from meshwright.checkpoint.source import Source, SourceFile, Stored

__all__ = ["lost_tensors", "reached_tensors", "sign"]

_SHOWN = 3


def lost_tensors(source: Source, file: SourceFile, begin: int, end: int) -> str:
    """The damaged tensors among those of bytes [begin, end), by name, at most three; "the header" where none is."""
    names = _names(source, file, begin, end)
    return _told(
        [name for name in names if name not in source.prints or _print_of(source, name) != source.prints[name]]
    )


def reached_tensors(source: Source, file: SourceFile, begin: int = 0) -> str:
    """The tensors of which `file` held something from byte `begin` on, told like lost ones: bytes that are gone."""
    return _told(_names(source, file, begin, file.num_bytes))


def sign(block: Tensor, begin: int, stored: Iterable[Stored], prints: Fingerprints) -> None:
    """Take what `block`, bytes of a file from `begin` on, holds of its tensors."""
    for each in stored:
        size = each.dtype.itemsize
        first = max(begin - each.offset, 0) // size
        last = min((begin + block.numel() - each.offset) // size, math.prod(each.box))
        for rectangle, flat in flat_rectangles(each.box, first, last):
            where = each.offset + flat * size - begin
            values = block[where : where + rectangle.numel * size].view(each.dtype).view(rectangle.extent)
            prints.take(Piece(each.piece.tensor, rectangle.offset_by(each.piece.rectangle.start)), values)


def _names(source: Source, file: SourceFile, begin: int, end: int) -> list[str]:
    here = [each for each in source.stored if source.files[each.file] is file and _overlaps(each, begin, end)]
    return list(dict.fromkeys(each.piece.tensor for each in here))


def _told(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "the header"


def _print_of(source: Source, name: str) -> int | None:
    """The fingerprint of a tensor as the files hold it now, unchecked; None where they cannot be read."""
    prints = Fingerprints()
    for each in source.stored:
        if each.piece.tensor != name:
            continue
        file = source.files[each.file]
        end = each.offset + math.prod(each.box) * each.dtype.itemsize
        try:
            with closing(source.storage.open(file.path)) as reading:
                for begin in range(each.offset, end, file.block_bytes):
                    buffer = bytearray(min(file.block_bytes, end - begin))
                    reading.read_into(begin, memoryview(buffer))
                    sign(torch.frombuffer(buffer, dtype=torch.uint8), begin, (each,), prints)
        except DamagedError:
            return None
    return prints.of(name)


def _overlaps(stored: Stored, begin: int, end: int) -> bool:
    return stored.offset < end and begin < stored.offset + math.prod(stored.box) * stored.dtype.itemsize
