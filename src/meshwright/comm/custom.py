"""Collectives inside a unit, as custom operations: countable and traceable under `torch.compile`.

A graph may hold no Python object, so the group is given by its registered name. The real kernels wait for what they
launch, and count it under the phase that the executor is in; the fake ones know shapes alone. Tensors are cut and
joined along dim 0.

    all_reduce       (N, ...) -> (N, ...)       the sum, everywhere
    reduce_scatter   (N, ...) -> (N / T, ...)   chunk `place` of the sum
    all_gather       (N, ...) -> (N * T, ...)   the chunks of all, in rank order
    exchanged        (N, ...) -> (M, ...)       runs of rows, one from each rank, in rank order

Launched and awaited apart, for kernels that compute meanwhile: `begin_sum`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import operations
from meshwright.comm.communicator import Communicator
from meshwright.comm.registry import lookup
from meshwright.comm.torch_private import kernel_of

__all__ = [
    "all_gather", "all_reduce", "begin_sum", "exchanged", "finish", "gathered", "own_chunk", "real_kernel",
    "reduce_scatter", "size_of",
]  # fmt: skip


@torch.library.custom_op("meshwright::all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum over the group: (N, ...) -> (N, ...). Backward as it stands in `conjugate`."""
    out = x.clone(memory_format=torch.contiguous_format)
    over = lookup(group)
    finish(over, operations.all_reduce(over, out, over.ledger.phase))
    return out


@torch.library.custom_op("meshwright::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Sum over the group, own chunk: (N, ...) -> (N / T, ...)."""
    return begin_sum(x.contiguous(), group, scatter=True)()


@torch.library.custom_op("meshwright::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str) -> Tensor:
    """Chunks of the group, joined: (N, ...) -> (N * T, ...)."""
    return gathered(x, group)


@torch.library.custom_op("meshwright::exchanged", mutates_args=())
def exchanged(x: Tensor, sent: list[int], received: list[int], rows: int, group: str) -> Tensor:
    """Of the first sum(sent) rows of x run r goes to the rank at place r: (N, ...) -> (rows, ...).

    The first sum(received) rows are what the ranks sent, in their order; those behind are zero.
    """
    over = lookup(group)
    leaving, came = sum(sent), sum(received)
    out = x.new_empty(rows, *x.shape[1:])
    out[came:].zero_()
    own = x[:leaving].contiguous()
    finish(over, operations.all_to_all(over, out[:came], own, received, sent, over.ledger.phase))
    return out


@all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // size_of(group), *x.shape[1:])


@all_gather.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] * size_of(group), *x.shape[1:])


@exchanged.register_fake
def _(x: Tensor, sent: list[int], received: list[int], rows: int, group: str) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def size_of(group: str) -> int:
    """Ranks of a registered group."""
    return lookup(group).size


def own_chunk(x: Tensor, group: str) -> Tensor:
    """(N, ...) -> (N / T, ...), the view of this rank's chunk."""
    over = lookup(group)
    size = x.shape[0] // over.size
    return x[over.place * size : (over.place + 1) * size]


def gathered(x: Tensor, group: str) -> Tensor:
    """Inside a kernel: (n, ...) -> (n * T, ...), rank r's chunk at place r."""
    over = lookup(group)
    out = x.new_empty(over.size * x.shape[0], *x.shape[1:])
    own_chunk(out, group).copy_(x)
    finish(over, operations.all_gather(over, out.view(-1), over.ledger.phase))
    return out


def begin_sum(x: Tensor, group: str, *, scatter: bool) -> Callable[[], Tensor]:
    """Inside a kernel: launch the sum of contiguous `x`, which belongs to it from now on; calling the result ends it.

    -> (N, ...), the sum in the memory of x; with `scatter` (N / T, ...), own chunk of it.
    """
    over = lookup(group)
    if not scatter:
        handle = operations.all_reduce(over, x, over.ledger.phase)
    else:
        own = x.new_empty(x.shape[0] // over.size, *x.shape[1:])
        handle = operations.reduce_scatter(over, x.view(-1), own.view(-1), over.ledger.phase)

    def end() -> Tensor:
        finish(over, handle)
        return own if scatter else x

    return end


def finish(over: Communicator, handle: operations.Handle) -> None:
    """End a collective inside a unit, and say how long that took: nobody else sees it."""
    begin = time.perf_counter()
    handle.wait()
    waited, group = over.ledger.waited, over.name.reported
    waited[group] = waited.get(group, 0.0) + time.perf_counter() - begin


def real_kernel(operation: Any) -> Callable[..., Any] | None:
    """The Python function behind a custom operation of this project; None for any other operation.

    For dry runs: on fake tensors the dispatcher would take the fake kernel, which communicates nothing.
    """
    return kernel_of(operation) if operation.namespace == "meshwright" else None
