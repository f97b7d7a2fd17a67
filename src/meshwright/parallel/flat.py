"""Flat memory of any module's parameters: what `data_parallel` keeps of one unit.

whole      all parameters of the bucket, one after the other; the module's parameters are views of it. At stage 3 it
           has memory only while the unit is gathered
own        this rank's part, elements first to last: an equal run for each rank, the last ones padding; `kept` holds it
counted    what of it this rank stands for where each element counts once
pieces     own elements, tensor by tensor: what an optimizer is given
gradient   flat like `whole`, from the first backward until it is reduced
reduced    own elements of the sum over the ranks that share a bucket; of all ranks once `meet` was waited for

    hybrid, groups of 2 of 4 ranks          rank     0     1     2     3
                                            owns     a     b     a     b        shard: 0 1, 2 3     copies: 0 2, 1 3
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.comm.communicator import Communicator
from meshwright.comm.operations import Handle, all_gather, all_reduce, reduce_scatter
from meshwright.parallel.allocator import Allocator
from meshwright.plan.action import Phase
from meshwright.plan.buckets import ALIGN, ceil_to
from meshwright.plan.category import Category


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    offset: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Who else trains the same parameters; None: nobody.

    `every` rank there is, those that `shard` a bucket among them, those that own a copy of the same part.
    """

    every: Communicator | None = None
    shard: Communicator | None = None
    copies: Communicator | None = None

    @property
    def is_first_copy(self) -> bool:
        return self.copies is None or self.copies.place == 0


class FlatBucket:
    """Parameters of one dtype and trainability over `replicas`.

    Values are rank 0's. The parameters given become views of flat memory and keep their identity.
    """

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], stage: int, replicas: Replicas, allocator: Allocator
    ) -> None:
        self._replicas, self._over, self._allocator, self._sharded = replicas, replicas.shard, allocator, stage == 3
        self.stage, self.trainable = stage, named[0][1].requires_grad
        ways, place = (self._over.size, self._over.place) if self._over is not None else (1, 0)
        self.slots, end = self._lay_out(named)
        self.numel = ceil_to(end, ALIGN * ways)
        share = self.numel // ways
        mine = place * share, (place + 1) * share
        self.first, self.last = mine if stage else (0, self.numel)
        self.counted = mine if replicas.is_first_copy else (self.first, self.first)
        self.whole = allocator.zeros(self.numel, named[0][1].dtype, Category.PARAMETERS)
        self._adopt()
        self.kept = self.whole[self.first : self.last]
        if self._sharded:
            kept = allocator.empty(share, self.whole.dtype, Category.PARAMETERS)
            self.kept = kept.copy_(self.kept)
            allocator.release(self.whole, Category.PARAMETERS)
        self.gathered = not self._sharded
        self._coming: Handle | None = None
        self.gradient: Tensor | None = None
        self.reduced: Tensor | None = None
        self.pieces = self._cut()

    @staticmethod
    def _lay_out(named: list[tuple[str, nn.Parameter]]) -> tuple[list[Slot], int]:
        slots, end = [], 0
        for name, parameter in named:
            slots.append(Slot(name, parameter, ceil_to(end, ALIGN), parameter.shape))
            end = slots[-1].stop
        return slots, end

    @torch.no_grad()
    def _adopt(self) -> None:
        every = self._replicas.every
        if every is None or every.place == 0:
            for slot in self.slots:
                self._view(self.whole, slot).copy_(slot.parameter)
        if every is not None:
            all_reduce(every, self.whole, Phase.UPDATE).wait()  # the others hold zeros
        for slot in self.slots:
            slot.parameter.data = self._view(self.whole, slot).data

    def _cut(self) -> dict[str, nn.Parameter]:
        """Own elements by tensor, flat; a tensor of which this rank owns nothing has no piece."""
        out = {}
        for slot in self.slots if self.trainable else []:
            low, high = max(slot.offset, self.first), min(slot.stop, self.last)
            if low < high:
                out[slot.name] = nn.Parameter(self.kept[low - self.first : high - self.first].data)
        return out

    # ------------------------------------------------------------------ parameters

    @torch.no_grad()
    def begin_gather(self, phase: Phase) -> None:
        """Launch what makes the parameters whole, to be ended by `gather`; nothing where they are, or are coming."""
        if self.gathered or self._coming is not None:
            return
        self._allocator.regrow(self.whole, Category.PARAMETERS)
        self.whole[self.first : self.last].copy_(self.kept)
        self._coming = self._share(phase)

    def gather(self, phase: Phase) -> None:
        """Make the parameters whole; collective at stage 3, nothing elsewhere."""
        self.begin_gather(phase)
        if self._coming is not None:
            self._coming.wait()
            self._coming, self.gathered = None, True

    def release(self) -> None:
        if self._coming is not None:
            self._coming.wait()
            self._coming, self.gathered = None, True
        if self._sharded and self.gathered:
            self._allocator.release(self.whole, Category.PARAMETERS)
            self.gathered = False

    def publish(self) -> None:
        """After an update: what others own of the whole parameters (stages 1, 2)."""
        if self.stage in (1, 2) and self.trainable:
            self._share(Phase.UPDATE).wait()

    def _share(self, phase: Phase) -> Handle:
        return Handle() if self._over is None else all_gather(self._over, self.whole, phase)

    # ------------------------------------------------------------------ gradients

    @torch.no_grad()
    def collect(self) -> None:
        """Move every `.grad` into the flat gradient; one that is missing counts as zero."""
        if self.gradient is None:
            self.gradient = self._allocator.zeros(self.numel, self.whole.dtype, Category.GRADIENTS)
        for slot in self.slots:
            if slot.parameter.grad is not None:
                self._view(self.gradient, slot).add_(slot.parameter.grad)
                slot.parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> Handle:
        """Sum the flat gradient over the ranks; stages 2 and 3 add it to `reduced` and free it."""
        assert self.gradient is not None
        gradient, own = self.gradient, self.gradient[self.first : self.last]
        if self._over is None:
            handle = Handle()
        elif self.stage == 0:
            handle = all_reduce(self._over, gradient, Phase.REDUCE)
        else:
            handle = reduce_scatter(self._over, gradient, own, Phase.REDUCE)
        return handle.then(lambda: self._keep(gradient, own))

    @torch.no_grad()
    def _keep(self, gradient: Tensor, own: Tensor) -> None:
        if self.stage < 2:
            self.reduced = own
            return
        if self.reduced is None:
            self.reduced = self._allocator.zeros(own.numel(), own.dtype, Category.GRADIENTS)
        self.reduced.add_(own)
        self._allocator.release(gradient, Category.GRADIENTS)
        self.gradient = None

    @torch.no_grad()
    def meet(self) -> Handle:
        """Hybrid: sum the reduced elements over the ranks that own a copy of them, once a step."""
        assert self.reduced is not None
        copies = self._replicas.copies
        return Handle() if copies is None else all_reduce(copies, self.reduced, Phase.REDUCE)

    def counted_gradient(self) -> Tensor:
        """The reduced elements that this rank counts in a norm: each is counted once over all ranks."""
        assert self.reduced is not None
        return self.reduced[self.counted[0] - self.first : self.counted[1] - self.first]

    def attach(self) -> None:
        """Give every piece its gradient, in the piece's dtype."""
        assert self.reduced is not None
        for slot in self.slots:
            piece = self.pieces.get(slot.name)
            if piece is not None:
                low = max(slot.offset, self.first) - self.first
                piece.grad = self.reduced[low : low + piece.numel()]

    def drop(self) -> None:
        """Forget the gradients of a step."""
        for piece in self.pieces.values():
            piece.grad = None
        for slot in self.slots:
            slot.parameter.grad = None
        if self.gradient is not None:
            self._allocator.release(self.gradient, Category.GRADIENTS)
        elif self.reduced is not None:
            self._allocator.release(self.reduced, Category.GRADIENTS)
        self.gradient = self.reduced = None

    def _view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.stop].view(slot.shape)
