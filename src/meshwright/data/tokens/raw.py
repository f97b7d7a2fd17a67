"""Raw token files: .npy and .bin, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.config.choices import TokenDtype
from meshwright.config.errors import RequestError

_SCAN_TOKENS = 1 << 22


def open_npy(file: Path) -> npt.NDArray[np.integer[Any]]:
    """Tokens (n,) of a .npy file. An array of objects is refused unread: it would be unpickled."""
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except ValueError as error:
        rule = f"is no array that can be mapped ({error}); pickled objects are never read"
        raise RequestError(str(file), rule, ["a one-dimensional .npy of unsigned integers"]) from None
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size == 0:
        rule = f"tokens are one dimension of at least one integer, not {array.dtype} of shape {array.shape}"
        raise RequestError(str(file), rule, ["a one-dimensional .npy of uint16 or uint32"])
    return array.view(np.ndarray)


def open_bin(file: Path, dtype: TokenDtype) -> npt.NDArray[np.integer[Any]]:
    """Tokens (n,) of a headerless .bin file of little-endian integers."""
    stored = np.dtype(dtype.value).newbyteorder("<")
    size_bytes = file.stat().st_size
    if size_bytes == 0 or size_bytes % stored.itemsize:
        rule = f"{size_bytes} bytes are not a whole number of {dtype.value} tokens (data.dtype), at least one"
        raise RequestError(str(file), rule)
    return np.memmap(file, dtype=stored, mode="r").view(np.ndarray)


def largest_token(file: Path, tokens: npt.NDArray[np.integer[Any]]) -> int:
    """The largest token, by a full read in constant memory. Raises RequestError for a negative one."""
    largest = 0
    for first in range(0, len(tokens), _SCAN_TOKENS):
        window = tokens[first : first + _SCAN_TOKENS]
        if int(window.min()) < 0:
            at = first + int(np.flatnonzero(window < 0)[0])
            raise RequestError(f"{file}, token {at}", f"tokens are not negative, this is {int(tokens[at])}")
        largest = max(largest, int(window.max()))
    return largest
