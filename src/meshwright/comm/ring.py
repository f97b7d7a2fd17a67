"""Gathers and scatters beside products: at once, or round a ring in chunks under them.

    T ranks, N tokens in T chunks; i is the step. Each hop carries one chunk from every rank to the next while a product
    of another chunk is computed.

    gather, then multiply (chunk r - i of x)            multiply, then scatter the sum (chunk r - 1 - i of y)

           | y0 = x0 W | y2 = x2 W | y1 = x1 W |               | p2      | p1 + s1 | p0 + s0 |  y0
    rank 0 |                                                   |
           | x0 -> 1   | x2 -> 1   |                                     | s2 -> 1 | s1 -> 1 |

           | y1 = x1 W | y0 = x0 W | y2 = x2 W |               | p0      | p2 + s2 | p1 + s1 |  y1
    rank 1 |                                                   |
           | x1 -> 2   | x0 -> 2   |                                     | s0 -> 2 | s2 -> 2 |

           | y2 = x2 W | y1 = x1 W | y0 = x0 W |               | p1      | p0 + s0 | p2 + s2 |  y2
    rank 2 |                                                   |
           | x2 -> 0   | x1 -> 0   |                                     | s1 -> 0 | s0 -> 0 |

A rank sends T - 1 chunks, (T - 1) / T of the payload, as any ring does: the ledger has the row of the one collective.
A step lasts as long as the longer of its product and its hop. The gathered tensor is kept whole, for it is a factor of
a weight gradient; of a sum three chunks exist at a time. Hops are sends and receives of the group itself, so one code
serves gloo and NCCL, which has a stream of its own for them.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS, doi:10.1145/3567955.3567959). Inside kernels of custom operations only; whether a group goes round is
`Communicator.ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from meshwright.comm import operations
from meshwright.comm.communicator import Communicator
from meshwright.comm.custom import begin_sum, finish, gathered, own_chunk
from meshwright.comm.registry import lookup
from meshwright.plan.operation import Operation

__all__ = ["Spans", "begin_leaving", "entering", "goes_round"]

Spans = Iterable[tuple[int, int]]
"""Bounds (low, high) of tokens, in the order in which they are there; each is to be worked on before the next is asked
for."""


def goes_round(group: str) -> bool:
    """Whether gathers and scatters of a registered group go round in chunks."""
    return lookup(group).ring


def entering(x: Tensor, group: str, sequence: bool) -> tuple[Tensor, Spans]:
    """f, or g under `sequence`: (N, ...) as it is, or (N/T, ...) -> (whole (N, ...), its rows as they arrive).

    The whole is complete when the rows are through.
    """
    over = lookup(group)
    if sequence and over.ring:
        whole = x.new_empty(over.size * x.shape[0], *x.shape[1:])
        own_chunk(whole, group).copy_(x)
        operations.count(over, Operation.ALL_GATHER, over.ledger.phase, _num_bytes(whole))
        return whole, _arrivals(whole, over)
    whole = gathered(x, group) if sequence else x
    return whole, ((0, whole.shape[0]),)


def begin_leaving(
    product: Callable[[int, int], Tensor], tokens: int, group: str, sequence: bool
) -> Callable[[], Tensor]:
    """f*, or g* under `sequence`: the sum over the group of `product(0, tokens)`, launched; calling the result ends it.

    `product(low, high)`: new memory (high - low, ...) of these tokens. -> (N, ...), or own chunk (N/T, ...).
    """
    over = lookup(group)
    if not (sequence and over.ring):
        return begin_sum(product(0, tokens), group, scatter=sequence)
    size = tokens // over.size
    part = product(*_bounds(over.place - 1, over, size))
    operations.count(over, Operation.REDUCE_SCATTER, over.ledger.phase, over.size * _num_bytes(part))
    for step in range(1, over.size):
        arriving = part.new_empty(part.shape)
        under_way = operations.hop(over, part, arriving)
        part = product(*_bounds(over.place - 1 - step, over, size))
        if step < over.size - 1:
            finish(over, under_way)
            part.add_(arriving)

    def end() -> Tensor:
        finish(over, under_way)
        return part.add_(arriving)

    return end


def _arrivals(whole: Tensor, over: Communicator) -> Iterator[tuple[int, int]]:
    """The chunks of `whole`, own one first: each is sent on, and the next received, while its rows are worked on."""
    size = whole.shape[0] // over.size
    for step in range(over.size - 1):
        here, coming = (_bounds(over.place - back, over, size) for back in (step, step + 1))
        under_way = operations.hop(over, whole[slice(*here)], whole[slice(*coming)])
        yield here
        finish(over, under_way)
    yield _bounds(over.place + 1, over, size)


def _bounds(chunk: int, over: Communicator, size: int) -> tuple[int, int]:
    """Rows of a chunk, counted round the ring."""
    low = chunk % over.size * size
    return low, low + size


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
