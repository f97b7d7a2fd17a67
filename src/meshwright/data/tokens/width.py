"""How many bytes a token of a headerless file seems to have, told from the numbers themselves.

A file of wider integers read as narrow ones is every token twice or four times as many numbers, none of them too large
for any vocabulary, so nothing else would notice:

    stored   u32   |    17     |  40123    |     9     |  65540    |        17 0 | 40123 0 | 9 0 | 4 1    read as u16
             u16   |  17 | 901 | 40123 | 8 |   9  | 77 |                901·65536 + 17 ...                read as u32

Of wide tokens the upper halves are zero, or few and small (a vocabulary of 2^20 leaves them below 16), while the lower
ones are anything; of narrow tokens both halves are tokens alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

__all__ = ["apparent_bytes", "sampled"]

_WINDOWS, _WINDOW_BYTES = 3, 1 << 18
_LEAST_BYTES = 256
_UPPER = 16
"""Upper halves of real vocabularies, below 2^20, are smaller than this."""
_WIDE = 1 << 12
"""A vocabulary that needs upper halves has lower ones above this."""


def sampled(file: Path) -> bytes:
    """Bytes from the beginning, the middle and the end of a file, each from a multiple of eight; all of a small one."""
    size = file.stat().st_size // 8 * 8
    with file.open("rb") as stream:
        if size <= _WINDOWS * _WINDOW_BYTES:
            return stream.read(size)
        last = size - _WINDOW_BYTES
        firsts = [part * last // (_WINDOWS - 1) // 8 * 8 for part in range(_WINDOWS)]
        return b"".join(_read(stream, first, _WINDOW_BYTES) for first in firsts)


def apparent_bytes(sample: bytes) -> int | None:
    """2, 4 or 8: the width of the little-endian integers in `sample`; None where it is too short or too even to tell.

    `sample` holds whole groups of eight bytes, each from a place that is a multiple of eight.
    """
    if len(sample) < _LEAST_BYTES:
        return None
    words = np.frombuffer(sample[: len(sample) // 8 * 8], dtype="<u2").reshape(-1, 4)
    first, second, third, fourth = words.T
    if not third.any() and not fourth.any() and _above(second, first):
        return 8
    lower, upper = words[:, 0::2], words[:, 1::2]
    if _above(upper, lower):
        return 4
    return 2 if int(upper.max()) >= _UPPER and 4 * int(upper.max()) >= int(lower.max()) else None


def _above(upper: npt.NDArray[np.uint16], lower: npt.NDArray[np.uint16]) -> bool:
    """Whether these are the upper halves of numbers with those lower ones."""
    most = int(upper.max())
    return int(lower.max()) > 0 if most == 0 else most < _UPPER and int(lower.max()) >= _WIDE


def _read(stream: BinaryIO, first: int, count: int) -> bytes:
    stream.seek(first)
    return stream.read(count)
