"""The logical operations of communication, as rows of the ledger name them."""

from __future__ import annotations

from enum import StrEnum


class Operation(StrEnum):
    """A row of the ledger names the operation, whatever moves the bytes."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
