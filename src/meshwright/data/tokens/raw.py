"""Raw token files: .npy and .bin, memory-mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.config.choices import TokenDtype
from meshwright.config.errors import RequestError
from meshwright.data.tokens.width import apparent_bytes, sampled

_SCAN_TOKENS = 1 << 22
_TELLING = {
    True: "zeros or very small numbers stand at every second place",
    False: "no vocabulary is as large as these tokens, and their halves are alike",
}
"""By whether the file's numbers are wider than what they are read as."""


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
    """Tokens (n,) of a headerless .bin file of little-endian integers.

    Raises RequestError for a part of a token, and where the numbers are plainly those of another width.
    """
    stored = np.dtype(dtype.value).newbyteorder("<")
    size_bytes = file.stat().st_size
    if size_bytes == 0 or size_bytes % stored.itemsize:
        rule = f"{size_bytes} bytes are not a whole number of {dtype.value} tokens (data.dtype), at least one"
        raise RequestError(str(file), rule)
    _check_width(file, dtype, stored.itemsize)
    return np.memmap(file, dtype=stored, mode="r").view(np.ndarray)


def first_beyond(tokens: npt.NDArray[np.integer[Any]], vocab: int) -> int | None:
    """The first position of a token that is not below `vocab`; None where all are. In constant memory."""
    for first in range(0, len(tokens), _SCAN_TOKENS):
        beyond = np.flatnonzero(tokens[first : first + _SCAN_TOKENS] >= vocab)
        if beyond.size:
            return first + int(beyond[0])
    return None


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


def _check_width(file: Path, dtype: TokenDtype, token_bytes: int) -> None:
    seen = apparent_bytes(sampled(file))
    if seen is None or seen == token_bytes:
        return
    known = next((each for each in TokenDtype if np.dtype(each.value).itemsize == seen), None)
    if known is None:
        looks, works = f"uint{8 * seen}, which is not read", "tokens written as uint16 or uint32"
    else:
        looks, works = known.value, f"data.dtype={known.value}"
    rule = f"is read as {dtype.value} (data.dtype), but looks like {looks}: {_TELLING[seen > token_bytes]}"
    raise RequestError(str(file), rule, (works, "a .npy, which tells its type"))
