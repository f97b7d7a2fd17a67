"""When `data_parallel` moves data: hooks, in one order on all ranks, whatever a rank's own control flow does.

Every rank takes part in every gather and every sum, one unit after another. A unit's hook catches up with all before
it, and sets out for the next one; (n) is launched, n is waited for:

    forward    0 (1)   1 (2)   2 (3)   3
    backward   3 (2)   sum 3   2 (1)   sum 2   1   sum 1   sum 0        sums run beside the backward that follows
    end        what is left over: units that this rank did not use, the root (0)

So three units are whole at most (stage 3: the root, the one at work, the next), and two hold gradients that are not
reduced (stages 2 and 3: the one at work, the one under way), the root beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from meshwright.comm.communicator import Communicator
from meshwright.comm.operations import Handle, all_reduce
from meshwright.comm.torch_private import tree_leaves, tree_map
from meshwright.parallel.data_parallel_units import Unit
from meshwright.plan.action import Phase

__all__ = ["Order"]


class Order:
    """Gathers and sums of `units`, the root's first; `every` rank keeps it (None: there is one)."""

    def __init__(self, units: Sequence[Unit], stage: int, every: Communicator | None) -> None:
        self._units, self._stage, self._every = units, stage, every
        self._forward_at = self._backward_at = self._summed = self._forwards = 0
        self._running = False
        self._under_way: list[Handle] = []

    def hook(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Stages 2 and 3: follow `module` and its units' `modules`."""
        if self._stage < 2:
            return
        for place, unit in enumerate(self._units):
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient(place))  # type: ignore[no-untyped-call]
            if self._stage == 3 and place and unit.parameters:
                register_multi_grad_hook(unit.parameters, self._on_computed(place))
        module.register_forward_pre_hook(lambda *_: self._begin_forward())
        module.register_forward_hook(lambda *_: self._end_forward(), always_call=True)
        for place, each in enumerate(modules, 1):
            each.register_forward_pre_hook(
                lambda _m, args, kwargs, place=place: self._come(place, (args, kwargs)), with_kwargs=True
            )
            each.register_forward_hook(
                lambda _m, args, kwargs, out, place=place: self._leave(place, (args, kwargs), out),
                with_kwargs=True,
                always_call=True,
            )

    def begin_backward(self) -> None:
        if self._stage == 3 and not self._forwards:  # this rank had nothing to compute; the others need its pieces
            self._begin_forward()
            self._end_forward()
        self._running, self._backward_at, self._summed = True, len(self._units), len(self._units)
        for unit in self._units:
            unit.missing, unit.computed = unit.num_trained, False
        self._units[0].gather(Phase.BACKWARD)

    def end_backward(self) -> None:
        if self._stage == 3:
            self._reach(0)
        if self._stage >= 2:
            self._sum_down_to(0)
            self._sum_late()
            self._settle()
        self._running, self._forwards = False, 0
        for unit in self._units:
            unit.release()

    def sum_all(self) -> None:
        """Once a step, stages 0 and 1: every unit's gradients."""
        for unit in reversed(self._units):
            self._sum(unit)
        self._settle()

    # ------------------------------------------------------------------ forward

    def _begin_forward(self) -> None:
        if self._running:  # a checkpoint around the module runs it again
            return
        self._forward_at = 0
        self._forwards += torch.is_grad_enabled()
        self._enter(0)

    def _come(self, place: int, inputs: Any) -> Any:
        self._enter(place)
        unit = self._units[place]
        return inputs if unit.all_trained or not torch.is_grad_enabled() else self._followed(place, inputs)

    def _enter(self, place: int) -> None:
        """Take part in every gather up to `place`; only that unit, the next and the root stay whole."""
        if self._running:  # a checkpoint around the unit runs it again
            self._reach(place)
            return
        while self._forward_at <= place:
            at = self._forward_at
            self._forward_at += 1
            self._units[at].gather(Phase.FORWARD)
            if self._forward_at < len(self._units):
                self._units[self._forward_at].begin_gather(Phase.FORWARD)
            if 0 < at < place:
                self._units[at].release()
        self._units[place].gather(Phase.FORWARD)

    def _leave(self, place: int, inputs: Any, outputs: Any) -> None:
        """What only passes through a unit belongs to the one that made it: its gradient comes long after."""
        if not self._running:
            self._units[place].release()
        if torch.is_grad_enabled():
            entered = {id(leaf) for leaf in tree_leaves(inputs)}
            for leaf in tree_leaves(outputs):
                if _differentiable(leaf) and id(leaf) not in entered:
                    leaf.register_hook(lambda _, place=place: self._reach(place))

    def _end_forward(self) -> None:
        if self._running:
            return
        if self._forward_at < len(self._units):
            self._enter(len(self._units) - 1)
            self._units[-1].release()
        if not torch.is_grad_enabled():
            self._units[0].release()

    def _followed(self, place: int, inputs: Any) -> Any:
        """What enters a unit of frozen weights, which are needed until all of it has a gradient.

        Views are followed in place of the tensors, whose gradients may be made of other units' as well, and whose
        hooks would come after the one that calls for the unit before.
        """
        unit = self._units[place]
        views = tree_map(lambda leaf: leaf.view_as(leaf) if _differentiable(leaf) else leaf, inputs)
        entered = [leaf for leaf in tree_leaves(views) if _differentiable(leaf)]
        unit.passed_on = not entered

        def passed_on(_: Sequence[Tensor | None]) -> None:
            unit.passed_on = True
            self._let_go(place)

        if entered:
            register_multi_grad_hook(entered, passed_on)
        return views

    # ------------------------------------------------------------------ backward

    def _reach(self, place: int) -> None:
        """Backward comes to a unit: sum those behind it and gather those before it, in one order on all ranks."""
        while self._backward_at > place:
            self._backward_at -= 1
            at = self._backward_at
            if self._passes_once:
                self._sum_down_to(at + 1)
                self._let_go(at + 1)
            self._units[at].gather(Phase.BACKWARD)
            if at > 1:
                self._units[at - 1].begin_gather(Phase.BACKWARD)
            if at != place and self._passes_once:
                self._units[at].release()
        self._units[place].gather(Phase.BACKWARD)

    @property
    def _passes_once(self) -> bool:
        """Whether backward is done with a unit once it is past it.

        After several forwards an earlier one comes to it again, on some ranks perhaps: it stays whole and is summed at
        the end, for nobody may gather it a second time alone.
        """
        return self._forwards == 1

    def _on_gradient(self, place: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            unit = self._units[place]
            unit.missing -= 1
            if not self._running or unit.missing:
                return
            if self._stage == 3:
                self._let_go(place)
            else:
                while self._summed and self._units[self._summed - 1].missing == 0:
                    self._sum_down_to(self._summed - 1)

        return arrived

    def _on_computed(self, place: int) -> Callable[[Sequence[Tensor | None]], None]:
        def computed(_: Sequence[Tensor | None]) -> None:
            self._units[place].computed = True
            self._let_go(place)

        return computed

    def _let_go(self, place: int) -> None:
        """Release a unit, the root apart, once nothing that is left of its backward reads a parameter."""
        if not self._running or not self._passes_once or not 0 < place < len(self._units):
            return
        unit = self._units[place]
        if unit.passed_on and (not unit.missing or (unit.computed and self._backward_at < place)):
            unit.release()

    # ------------------------------------------------------------------ sums

    def _sum_down_to(self, place: int) -> None:
        """Sum the units from the last one on that were not summed in this backward, one under way at a time."""
        while self._summed > place:
            self._summed -= 1
            self._sum(self._units[self._summed])

    def _sum_late(self) -> None:
        """Gradients that came after their unit was summed, on any rank: an unusual graph, but no gradient is lost."""
        late = torch.tensor([float(unit.has_gradients) for unit in self._units], dtype=torch.float64)
        late = late.to(next(bucket.whole.device for unit in self._units for bucket in unit.buckets))
        self._settle()
        if self._every is not None:
            all_reduce(self._every, late, Phase.REDUCE).wait()
        for unit, count in zip(reversed(self._units), reversed(late.tolist()), strict=True):
            if count:
                self._sum(unit)

    def _sum(self, unit: Unit) -> None:
        self._settle()
        for bucket in unit.trained:
            bucket.collect()
            self._under_way.append(bucket.reduce())

    def _settle(self) -> None:
        for handle in self._under_way:
            handle.wait()
        self._under_way.clear()


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
