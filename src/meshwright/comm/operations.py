"""Asynchronous collectives on flat tensors. Each returns a handle that is waited for exactly once.

Gloo's own reduce-scatter moves the bytes of an all-reduce and its all-gather copies twice, so on gloo both go point to
point: every rank sends each peer its chunk, and sums what arrives in rank order, so that all layouts of the same ranks
add in the same order. NCCL's own are good. An all-to-all goes as they go.

    reduce-scatter over ranks 0 1 2                   all-gather

    rank 0   a0 a1 a2     ->  a0+b0+c0                rank 0   a . .     ->  a b c
    rank 1   b0 b1 b2     ->  a1+b1+c1                rank 1   . b .     ->  a b c
    rank 2   c0 c1 c2     ->  a2+b2+c2                rank 2   . . c     ->  a b c
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.communicator import Communicator
from meshwright.plan.action import Phase
from meshwright.plan.folds.traffic import Operation, Transfer


class _Tag(IntEnum):
    """Gathers meet gathers and sums meet sums, in whatever order ranks mix the two."""

    SCATTER = 1
    GATHER = 2
    HOP = 3
    EXCHANGE = 4


@dataclass(slots=True)
class Handle:
    """An operation under way. Tensors it reads or writes belong to it until `wait` returns."""

    works: Sequence[dist.Work] = ()
    finish: Callable[[], None] | None = None
    keeps: tuple[Tensor, ...] = field(default=())

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()
        self.works, self.finish, self.keeps = (), None, ()

    def then(self, action: Callable[[], None]) -> Handle:
        """Do `action` too when the operation has ended, inside `wait`."""
        before = self.finish

        def both() -> None:
            if before is not None:
                before()
            action()

        self.finish = both
        return self


def all_reduce(over: Communicator, tensor: Tensor, phase: Phase) -> Handle:
    """Sum `tensor` (any shape, contiguous) over the group, in place. Shape -> same shape."""
    _record(over, Operation.ALL_REDUCE, phase, tensor)
    work = dist.all_reduce(tensor, group=over.process_group, async_op=True)
    return Handle((work,))


def reduce_scatter(over: Communicator, whole: Tensor, own: Tensor, phase: Phase) -> Handle:
    """Sum `whole` (n * k,) over the n ranks and leave chunk `place` in `own` (k,), which may be that chunk itself."""
    _record(over, Operation.REDUCE_SCATTER, phase, whole)
    if not over.direct:
        work = dist.reduce_scatter_single(own, whole, group=over.process_group, async_op=True)
        return Handle((work,), keeps=(whole, own))
    chunks = list(whole.view(over.size, -1).unbind())
    arrived = [torch.empty_like(own) for _ in range(over.size - 1)]
    works = _exchange(over, chunks, arrived, _Tag.SCATTER)
    return Handle(works, lambda: _add_in_order(chunks[over.place], arrived, over.place, own), keeps=(whole, own))


def all_gather(over: Communicator, whole: Tensor, phase: Phase, shards: Sequence[Tensor] = ()) -> Handle:
    """Fill `whole` (n * k,): on entry chunk `place` is this rank's, on return chunk r is rank r's.

    `shards`: all chunks, where they lie in memory that the ranks share; they are read at the wait, when the reader is
    about to need them, and nothing is sent. `whole` need not hold this rank's then.
    """
    _record(over, Operation.ALL_GATHER, phase, whole)
    if shards:
        return Handle(finish=lambda: _join(shards, whole), keeps=(whole,))
    by_rank = whole.view(over.size, -1)
    if not over.direct:
        work = dist.all_gather_single(whole, by_rank[over.place], group=over.process_group, async_op=True)
        return Handle((work,), keeps=(whole,))
    chunks = list(by_rank.unbind())
    arriving = [chunk for place, chunk in enumerate(chunks) if place != over.place]
    return Handle(_exchange(over, [chunks[over.place]] * over.size, arriving, _Tag.GATHER), keeps=(whole,))


def all_to_all(
    over: Communicator,
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    phase: Phase,
) -> Handle:
    """Send run r of the rows of `inp` to the rank at place r, and fill run r of `out` with what that rank sends here.

    inp (sum of in_splits, ...), out (sum of out_splits, ...), both contiguous; splits are rows for each place, which
    may be 0, and empty splits are equal runs. in_splits[r] here is out_splits[place] at r. Raises ValueError where
    splits are not one for each rank, or do not add up to the rows.
    """
    leaving, arriving = _runs(over, inp, in_splits), _runs(over, out, out_splits)
    sent, kept = inp.nbytes, leaving[over.place].nbytes
    over.ledger.record(Transfer(over.name.reported, over.size, Operation.ALL_TO_ALL, phase, sent, sent - kept))
    if not over.direct:
        coming, going = [len(run) for run in arriving], [len(run) for run in leaving]
        work = dist.all_to_all_single(out, inp, coming, going, group=over.process_group, async_op=True)
        return Handle((work,), keeps=(out, inp))
    arriving[over.place].copy_(leaving[over.place])
    others = [run for place, run in enumerate(arriving) if place != over.place]
    return Handle(_exchange(over, leaving, others, _Tag.EXCHANGE), keeps=(out, inp))


def hop(over: Communicator, outgoing: Tensor, arriving: Tensor) -> Handle:
    """Send to the next rank of the group and receive from the one before, as a ring; counted by who goes round.

    Both at once for NCCL, whose sends and receives between two ranks would else stand in one line.
    """
    after, before = over.ranks[(over.place + 1) % over.size], over.ranks[over.place - 1]
    both = (
        dist.P2POp(dist.irecv, arriving, before, over.process_group, _Tag.HOP),
        dist.P2POp(dist.isend, outgoing, after, over.process_group, _Tag.HOP),
    )
    return Handle(dist.batch_isend_irecv(list(both)), keeps=(outgoing, arriving))


def send(over: Communicator, tensor: Tensor, phase: Phase) -> Handle:
    """Send to the other end of a link; gloo's send is a rendezvous, so the wait may be long."""
    _record(over, Operation.SEND, phase, tensor)
    return Handle((_begun(dist.isend(tensor, _other(over), group=over.process_group)),), keeps=(tensor,))


def receive(over: Communicator, tensor: Tensor) -> Handle:
    """Post the buffer for a send from the other end; receives are not counted."""
    return Handle((_begun(dist.irecv(tensor, _other(over), group=over.process_group)),), keeps=(tensor,))


def count(over: Communicator, operation: Operation, phase: Phase, payload_bytes: int) -> None:
    """One call in the ledger of the group."""
    over.ledger.record(Transfer(over.name.reported, over.pipeline or over.size, operation, phase, payload_bytes))


def _add_in_order(mine: Tensor, arrived: list[Tensor], place: int, out: Tensor) -> None:
    """The sum in rank order of `mine` (from `place`) and what arrived from the others, without memory of its own."""
    before, after = arrived[:place], arrived[place:]
    for part in before[1:]:
        before[0].add_(part)
    torch.add(*((before[0], mine) if before else (mine, after.pop(0))), out=out)
    for part in after:
        out.add_(part)


def _join(shards: Sequence[Tensor], whole: Tensor) -> None:
    torch.cat(list(shards), out=whole)


def _exchange(over: Communicator, outgoing: list[Tensor], arriving: list[Tensor], tag: _Tag) -> list[dist.Work]:
    """Send outgoing[r] to the rank at place r and receive from every other rank, all at once; nothing where empty."""
    group = over.process_group  # its own methods: dist.isend spends as long again on finding it
    peers = [place for place in range(over.size) if place != over.place]
    pairs = zip(peers, arriving, strict=True)
    works = [group.recv([buffer], place, tag) for place, buffer in pairs if buffer.numel()]
    onwards = peers[over.place :] + peers[: over.place]  # else all would begin with the same one
    return works + [group.send([outgoing[place]], place, tag) for place in onwards if outgoing[place].numel()]


def _runs(over: Communicator, tensor: Tensor, splits: Sequence[int]) -> list[Tensor]:
    """Views of the rows of a tensor, one run for each rank."""
    if not splits:
        if len(tensor) % over.size:
            raise ValueError(f"{len(tensor)} rows are no equal runs for {over.size} ranks: give splits")
        splits = [len(tensor) // over.size] * over.size
    if len(splits) != over.size or sum(splits) != len(tensor):
        raise ValueError(f"splits {list(splits)} are not those of {len(tensor)} rows for {over.size} ranks")
    return list(torch.split(tensor, list(splits)))


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank does not belong to the group it communicates on")
    return work


def _other(over: Communicator) -> int:
    return over.ranks[1 - over.place]


def _record(over: Communicator, operation: Operation, phase: Phase, tensor: Tensor) -> None:
    count(over, operation, phase, tensor.numel() * tensor.element_size())
