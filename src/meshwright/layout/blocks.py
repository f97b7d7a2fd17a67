"""Which keys the queries of a rank meet, block by block, as rectangles: decided from indices, on the host.

    ring of 2, 16 tokens in heads and tails       keys of coordinate 0        keys of coordinate 1
                                                  0-3       12-15             4-7       8-11

    queries of 0      0-3                         its own: causal             .         .
                      12-15                                                   whole     whole
    queries of 1      4-7                         whole     .                 its own: causal
                      8-11                        whole     .

What a query sees of a sequence is a run of offsets: from the start of its document or window to itself. Of a block it
sees a run of columns then, for these ascend, and the rectangle around all of them is what a kernel is given; where it
holds keys that a query does not see, it needs the mask as well.

B  sequences      Q  queries of each      Z  keys of a block
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from meshwright.layout.rows import Integers, Rows

__all__ = ["Block", "Meeting", "Sees", "block_of", "blocks", "flat"]


class Sees(IntEnum):
    """What queries of a block see of its keys, inside the rectangle."""

    NOTHING = 0
    ALL = 1
    CAUSAL = 2
    MASKED = 3


@dataclass(frozen=True, slots=True)
class Meeting:
    """Queries of one ring coordinate, and the keys of all, those of a coordinate behind one another: in each sequence
    `ways` runs of as many columns, of which the `own`-th are the queries themselves. `fixed`: rectangles may not differ
    between batches of one shape."""

    queries: Rows
    keys: Rows
    ways: int
    own: int
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Bounds (low, high) among the queries, and among the keys of the block."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    sees: Sees


_EMPTY = Block((0, 0), (0, 0), Sees.NOTHING)


def blocks(meeting: Meeting, window: int = 0) -> tuple[Block, ...]:
    """The rectangle of every ring coordinate's keys; `window` counts tokens as in a layer, 0 is none."""
    queries, keys = meeting.queries, meeting.keys
    ragged = queries.document_ids is not None or queries.valid is not None
    size = keys.num_tokens // meeting.ways
    if ragged and meeting.fixed:
        return (Block((0, queries.num_tokens), (0, size), Sees.MASKED),) * meeting.ways
    sequences = queries.num_sequences if ragged else min(queries.num_sequences, 1)  # without these all are alike
    first, last = _seen(queries, keys, window)
    out = []
    for source in range(meeting.ways):
        held = keys.offsets[:sequences, source * size : (source + 1) * size]
        low, high = (np.empty((sequences, queries.num_tokens), dtype=np.int64) for _ in range(2))
        for row in range(sequences):
            low[row] = np.searchsorted(held[row], first[row], side="left")
            high[row] = np.searchsorted(held[row], last[row], side="right")
        out.append(_around(low, high, causal=source == meeting.own, may_be_whole=queries.valid is None))
    return tuple(out)


def flat(each: Iterable[Block]) -> tuple[int, ...]:
    """Five numbers a block, queries, keys and what they see: a graph holds no objects."""
    return tuple(number for block in each for number in (*block.queries, *block.keys, int(block.sees)))


def block_of(numbers: Sequence[int], source: int) -> Block:
    """The block of a ring coordinate's keys, out of `flat`."""
    low, high, first, last, sees = numbers[5 * source : 5 * source + 5]
    return Block((low, high), (first, last), Sees(sees))


def _seen(rows: Rows, keys: Rows, window: int) -> tuple[Integers, Integers]:
    """(B, Q) the first and the last offset that each token sees at most; a sequence of padding sees itself."""
    last = rows.offsets
    first = np.zeros_like(last) if rows.document_ids is None else last - rows.positions
    if window:
        first = np.maximum(first, last - window + 1)
    return (first if keys.valid is None else np.where(keys.valid.any(1, keepdims=True), first, last)), last


def _around(low: Integers, high: Integers, causal: bool, may_be_whole: bool) -> Block:
    """The rectangle around columns low .. high (B, Q) of each query."""
    sees = high > low
    if not sees.any():
        return _EMPTY
    rows = np.flatnonzero(sees.any(0))
    queries = int(rows[0]), int(rows[-1]) + 1
    keys = int(low[sees].min()), int(high[sees].max())
    area = sees.shape[0] * (queries[1] - queries[0]) * (keys[1] - keys[0])
    if may_be_whole and int((high - low)[sees].sum()) == area:
        return Block(queries, keys, Sees.ALL)
    if causal and may_be_whole and not low.any() and bool((high == np.arange(1, high.shape[1] + 1)).all()):
        return Block(queries, keys, Sees.CAUSAL)
    return Block(queries, keys, Sees.MASKED)
