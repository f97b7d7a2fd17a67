"""The memory of one bucket on one rank.

States of a bucket's parameters and gradients
---------------------------------------------
whole       all elements in the compute dtype; the model's parameters are views of it. Under ZeRO-3 it has memory only
            between gather and release
own         the run [first, last) that this rank updates: everything at stage 0, its shard from stage 1 on
master      own elements in the master dtype; a view of `whole` where no copy is kept
shard       own elements in the compute dtype, where `whole` is not always there (stage 3, and others hold it too)
shards      those of all ranks, where they share memory: then a gather reads them and `shard` is one of them
gradient    unreduced sums over micro-batches, reduce dtype, whole; it has memory from the first write to the update
            (stages 0, 1) or to the end of its reduction (2, 3)
reduced     own elements of the summed gradient: a run of `gradient` (0, 1) or a tensor of its own (2, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meshwright.arch.tensors import Tensor as LogicalTensor
from meshwright.comm.communicator import Communicator
from meshwright.comm.shared import shared_zeros
from meshwright.layout.axes import Coordinates
from meshwright.layout.groups import REPLICA_AXES, GroupName, groups
from meshwright.layout.rectangles import Rectangle, flat_rectangles
from meshwright.model.counter import fill
from meshwright.optim.update import STATE_NAMES, Run
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.parallel.offload import Homes, Visitor
from meshwright.plan.buckets import Bucket, Segment, in_pieces, is_hybrid, sharding_group
from meshwright.plan.category import Category
from meshwright.plan.plan import Plan

Values = Callable[[Tensor, LogicalTensor, Rectangle], None]
"""Writes what a logical tensor has inside a rectangle into `out` (numel,), of any dtype."""


class Store:
    """Parameters, gradients and optimizer state of `bucket` for the rank at `at`.

    `readers`: who may read its shard where it lies, at stage 3; making the store is collective over them.
    """

    def __init__(
        self, plan: Plan, bucket: Bucket, at: Coordinates, allocator: Allocator, readers: Communicator | None = None
    ) -> None:
        self.plan, self.bucket, self.allocator = plan, bucket, allocator
        self._homes = Homes(plan.execution, allocator)
        self._at = at
        self.group = sharding_group(plan, bucket.replicas)
        mine = bucket.shard(self.group.size, self.group.place(plan.degrees, at))
        self.first, self.last = mine if plan.sharding.stage else (0, bucket.numel)
        self._counted = mine if _counts_here(plan, bucket, at) else (0, 0)
        self.compute = TORCH_DTYPES[plan.precision.compute]
        self.whole = allocator.zeros(bucket.numel, self.compute, Category.PARAMETERS)
        # .data gives each view a version counter of its own: a unit gathered again holds the values its graph saved.
        self.parameters = {
            segment.name: nn.Parameter(self._view(self.whole, segment).data, requires_grad=bucket.trainable)
            for segment in bucket.segments
        }
        self.shards: Sequence[Tensor] = ()
        self.shard: Tensor | None = None
        if in_pieces(plan, bucket):
            self.shard = self._allocate_shard(readers)
            allocator.release(self.whole, Category.PARAMETERS)
        self.master = self._allocate_master()
        self.runs = self._build_runs()
        self.gradient = torch.empty(0, dtype=TORCH_DTYPES[plan.precision.reduce], device=allocator.device)
        self._reduced: Tensor | None = None
        self._segments = {segment.name: segment for segment in bucket.segments}
        self._flats: dict[str, Tensor] = {}  # views last, for the gradient's memory goes and comes back under it
        self._written: set[str] = set()
        self._sealed = False

    # ------------------------------------------------------------------ parameters

    @torch.no_grad()
    def initialise(self) -> None:
        """Counter-based start values, rounded once to float32 before any cast: every rank computes what it holds."""
        self.fill(self._start_values)

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        """Write `values` wherever parameters are kept: each cast once, from what `values` writes."""
        if self.shard is None:
            self._fill(self.whole, 0, self.bucket.numel, values)
        if self._has_copy:
            self._fill(self.master, self.first, self.last, values)
        if self.shard is not None:
            self._fill(self.shard, self.first, self.last, values)

    @torch.no_grad()
    def publish_own(self, runs: Sequence[Run] | None = None) -> None:
        """Own elements: master -> compute dtype, from updated `runs`. Nothing to do where masters are views of them."""
        if not self._has_copy:
            return
        own = self.own_parameters()
        for (low, high, _), run in zip(self._spans(), self.runs if runs is None else runs, strict=True):
            own[low:high].copy_(run.values, non_blocking=True)

    def own_parameters(self) -> Tensor:
        """(last - first,) own elements in the compute dtype."""
        return self._own(self.whole) if self.shard is None else self.shard

    def regrow(self) -> Tensor:
        """Make room for the whole parameters, own elements in place unless a gather reads them: what it fills."""
        assert self.shard is not None
        self.allocator.regrow(self.whole, Category.PARAMETERS)
        if not self.shards:
            with torch.no_grad():
                self._own(self.whole).copy_(self.shard, non_blocking=True)
        return self.whole

    def release(self) -> None:
        self.allocator.release(self.whole, Category.PARAMETERS)

    # ------------------------------------------------------------------ gradients

    @torch.no_grad()
    def collect(self, names: Sequence[str]) -> None:
        """Move the `.grad` of the named parameters into the flat gradient: copied the first time, then added."""
        if not self.bucket.trainable:
            return
        self._begin_gradient()
        for segment in self.bucket.segments:
            parameter = self.parameters[segment.name]
            if segment.name not in names or parameter.grad is None:
                continue
            flat = self._flat(segment)
            if segment.name in self._written:
                flat.add_(parameter.grad)
            else:
                flat.copy_(parameter.grad)
                self._written.add(segment.name)
            parameter.grad = None

    def add_product(self, name: str, g_NO: Tensor, x_NI: Tensor) -> None:
        """The weight gradient g^T x of a linear, straight into the flat gradient: written first, added later.

        Called within backward or with detached tensors: nothing here is recorded anyway, and once a product is often.
        """
        self._begin_gradient()
        flat = self._flats.get(name)
        if flat is None:
            flat = self._flat(self._segments[name])
        first = name not in self._written
        if first:
            self._written.add(name)
        if flat.dtype is not g_NO.dtype:
            product = torch.mm(g_NO.t(), x_NI)
            flat.copy_(product) if first else flat.add_(product)
        elif first:
            torch.mm(g_NO.t(), x_NI, out=flat)
        else:
            flat.addmm_(g_NO.t(), x_NI)

    @torch.no_grad()
    def add_grouped(self, name: str, g_MO: Tensor, x_MI: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """The gradients g^T x of all experts' weights (E, O, I), each of its rows: written first, added later. That of
        an expert without rows is exactly zero."""
        self._begin_gradient()
        flat = self._flat(self._segments[name])
        first = name not in self._written
        self._written.add(name)
        for (low, high), each in zip(bounds, flat, strict=True):
            if low == high:
                if first:
                    each.zero_()
            elif first and each.dtype is g_MO.dtype:
                torch.mm(g_MO[low:high].t(), x_MI[low:high], out=each)
            elif first:
                each.copy_(torch.mm(g_MO[low:high].t(), x_MI[low:high]))
            elif each.dtype is g_MO.dtype:
                each.addmm_(g_MO[low:high].t(), x_MI[low:high])
            else:
                each.add_(torch.mm(g_MO[low:high].t(), x_MI[low:high]))

    @torch.no_grad()
    def add_rows(self, name: str, rows_N: Tensor, g_ND: Tensor) -> None:
        """Gradients g of looked-up rows of a table, straight into the flat gradient; repeated rows add up in order."""
        self._begin_gradient()
        flat = self._flat(self._segments[name])
        if name not in self._written:
            self._written.add(name)
            flat.zero_()
        if flat.device.type == "cpu":
            flat.index_add_(0, rows_N, g_ND.to(flat.dtype))
        else:  # index_add_ adds in no fixed order there
            flat.add_(torch.ops.aten.embedding_dense_backward(g_ND, rows_N, flat.shape[0], -1, False))

    @torch.no_grad()
    def seal(self) -> Tensor:
        """The gradient, complete: segments that no micro-batch wrote are zero. Padding always is."""
        if self._sealed:
            return self.gradient
        self._begin_gradient()
        for segment in self.bucket.segments:
            if segment.name not in self._written:
                self._flat(segment).zero_()
        self._sealed = True
        return self.gradient

    def own_gradient(self) -> Tensor:
        """(last - first,) the own elements of the gradient buffer."""
        return self._own(self.gradient)

    def target(self) -> Tensor:
        """Where a reduce-scatter leaves the own elements: in the gradient buffer, or where they will stay (2, 3)."""
        if self.plan.sharding.stage >= 2 and self._reduced is None:
            self._reduced = self.allocator.empty(self.last - self.first, self.gradient.dtype, Category.GRADIENTS)
            return self._reduced
        return self.own_gradient()

    @torch.no_grad()
    def absorb(self, arrived: Tensor) -> None:
        """After the reduce-scatter into `target`: stages 2, 3 add a later micro-batch's, and free the gradient."""
        if self._reduced is None:
            return
        if arrived is not self._reduced:
            self._reduced.add_(arrived)
        self.allocator.release(self.gradient, Category.GRADIENTS)

    def counted_norm(self, squared_norm: Callable[[Tensor], Tensor]) -> Tensor | float:
        """() float64: the sum of squares of the elements that this rank counts; each has one such rank in the world."""
        low, high = self._counted[0] - self.first, self._counted[1] - self.first
        if low >= high:
            return 0.0
        shared = REPLICA_AXES[self.bucket.replicas]
        owned = [segment.owner.owns(self.plan.degrees, self._at, shared) for segment in self.bucket.segments]
        if all(owned):
            return squared_norm(self.reduced[low:high])
        total: Tensor | float = 0.0
        for segment, mine in zip(self.bucket.segments, owned, strict=True):
            start, stop = max(segment.offset - self.first, low), min(segment.stop - self.first, high)
            if mine and start < stop:
                total = total + squared_norm(self.reduced[start:stop])
        return total

    @property
    def reduced(self) -> Tensor:
        """(last - first,) own elements of the summed gradient."""
        return self.own_gradient() if self._reduced is None else self._reduced

    def drop_gradients(self) -> None:
        """After the update: nothing of the gradient is left."""
        self._sealed = False
        if self._reduced is not None:
            self.allocator.release(self._reduced, Category.GRADIENTS)
            self._reduced = None
        if self.gradient.untyped_storage().nbytes():
            self.allocator.release(self.gradient, Category.GRADIENTS)

    # ------------------------------------------------------------------ inside

    def _begin_gradient(self) -> None:
        """Make room for the gradient at its first write, padding zeroed; nothing to do while it has memory."""
        if self.gradient.untyped_storage().nbytes():
            return
        self._written.clear()
        self._sealed = False
        if self.gradient.numel() == 0:
            self.gradient = self.allocator.empty(self.bucket.numel, self.gradient.dtype, Category.GRADIENTS)
        else:
            self.allocator.regrow(self.gradient, Category.GRADIENTS)
        end = 0
        for segment in self.bucket.segments:
            self.gradient[end : segment.offset].zero_()
            end = segment.stop
        self.gradient[end:].zero_()

    def _start_values(self, out: Tensor, tensor: LogicalTensor, box: Rectangle) -> None:
        fill(out, tensor.name, self.plan.seed, tensor.shape, box.start, box.extent, tensor.init)

    def _fill(self, flat: Tensor, first: int, last: int, values: Values) -> None:
        """`values` of the elements [first, last) of the bucket into `flat` (last - first,)."""
        for segment in self.bucket.segments:
            tensor, box = segment.owner.tensor, segment.owner.rectangle(self.plan.degrees, self._at)
            # Only dim 0 is cut unevenly, so what the tensor fills of a segment comes first and padding after it.
            low, high = max(segment.offset, first), min(segment.offset + box.numel, last)
            for piece, offset in flat_rectangles(box.extent, low - segment.offset, high - segment.offset):
                start = segment.offset + offset - first
                values(flat[start : start + piece.numel], tensor, piece.offset_by(box.start))

    @property
    def _has_copy(self) -> bool:
        """Whether the master is memory of its own."""
        return self.plan.precision.has_master and self.bucket.trainable

    def _allocate_shard(self, readers: Communicator | None) -> Tensor:
        size, away = self.last - self.first, self._homes.parameters
        if readers is not None and not away:
            self.shards = shared_zeros(readers, size, self.compute) or ()
        if self.shards and readers is not None:
            return self.allocator.adopt(self.shards[readers.place], Category.PARAMETERS)
        return self._homes.zeros(size, self.compute, Category.PARAMETERS, away)

    def _allocate_master(self) -> Tensor:
        if self._has_copy:
            dtype = TORCH_DTYPES[self.plan.precision.master]
            return self._homes.zeros(self.last - self.first, dtype, Category.MASTER, self._homes.optimizer)
        return self._own(self.whole) if self.shard is None else self.shard

    def _spans(self) -> list[tuple[int, int, bool]]:
        """(low, high, decays) of the decaying and the plain part of the own elements, empty ones left out."""
        if not self.bucket.trainable:
            return []
        cut = min(max(self.bucket.decay_stop, self.first), self.last) - self.first
        parts = ((0, cut, True), (cut, self.last - self.first, False))
        return [part for part in parts if part[0] != part[1]]

    def _build_runs(self) -> list[Run]:
        """Each span with its state."""
        runs = []
        for low, high, decays in self._spans():
            state = tuple(
                self._homes.zeros(high - low, self.master.dtype, Category.OPTIMIZER, self._homes.optimizer)
                for _ in STATE_NAMES[self.plan.optimizer.kind]
            )
            step = torch.zeros((), dtype=torch.float32, device=self.allocator.device)
            runs.append(Run(self.master[low:high], state, decays, step))
        return runs

    @property
    def visitor(self) -> Visitor:
        """What of this bucket is brought to the device for its update."""
        if self._has_copy:
            values_away, category = self._homes.optimizer, Category.MASTER
        else:
            values_away, category = self._homes.parameters and self.shard is not None, Category.PARAMETERS
        return Visitor(self.runs, values_away, self._homes.optimizer and any(run.state for run in self.runs), category)

    def gradients_of_runs(self) -> list[Tensor]:
        """The summed gradient of each run, in the master dtype."""
        return [self.reduced[low:high].to(self.master.dtype) for low, high, _ in self._spans()]

    def _own(self, flat: Tensor) -> Tensor:
        return flat[self.first : self.last]

    def _flat(self, segment: Segment) -> Tensor:
        """Where the gradient of a segment lies, in its shape."""
        if segment.name not in self._flats:
            self._flats[segment.name] = self._view(self.gradient, segment)
        return self._flats[segment.name]

    def _view(self, flat: Tensor, segment: Segment) -> Tensor:
        return flat[segment.offset : segment.stop].view(segment.shape)


def _counts_here(plan: Plan, bucket: Bucket, at: Coordinates) -> bool:
    """Hybrid sharding copies every shard: the first copy counts it."""
    if not is_hybrid(plan, bucket.replicas):
        return True
    return groups(plan.degrees, plan.sharding.within)[GroupName.COPY].place(plan.degrees, at) == 0
