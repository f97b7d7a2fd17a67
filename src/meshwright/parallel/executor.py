"""The literal executor: for each action, one small method; nothing is launched by a hook.

States of a micro-batch's values at the borders of a unit
---------------------------------------------------------
entering    what a unit will read, detached                             inputs[unit, micro]
saved       its leaf and the gradient edge of its output                saved[unit, micro]
held        the leaf alone, where the unit will be recomputed           held[unit, micro]
cotangent   the gradient of what left the unit                          cotangents[unit, micro]
stash       what a split backward leaves for its weight action          stashes[unit, micro]

A unit's graph ends at its borders: backward runs unit by unit, each time from one edge. After a step all tables are
empty; a value left over is an error of the program, not of the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.comm.mesh import Mesh
from meshwright.comm.operations import Handle, all_gather, all_reduce, receive, reduce_scatter, send
from meshwright.data.batch import Batch
from meshwright.model.decoder import Head
from meshwright.model.rows import Rows, rows_to_torch
from meshwright.optim.scale import loss_scale_for
from meshwright.optim.update import RULES, clip_coefficient, squared_norm
from meshwright.parallel.allocator import Allocator
from meshwright.parallel.balancing import Balancer
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.parallel.expert_axis import ExpertAxis
from meshwright.parallel.offload import Visits
from meshwright.parallel.split import Stash, WeightProducts
from meshwright.parallel.store import Store
from meshwright.parallel.tensor import held_rows
from meshwright.plan.action import COMPUTE, Action, Kind, Op, What
from meshwright.plan.folds.words import in_words
from meshwright.plan.norm import NORM_FLOATS, NUM_TERMS, NormPart, has_terms, norm_floats
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program
from meshwright.plan.strategies.context import held_columns, meeting
from meshwright.plan.strategies.tensor import stream_tokens

Key = tuple[int, int]
"""(unit, micro-batch)"""


@dataclass(slots=True)
class Inputs:
    """One micro-batch on the device."""

    tokens: Tensor
    labels: Tensor
    rows: Rows


class Executor:
    """Runs one program on one rank. `units` are the modules of this stage by unit number."""

    def __init__(
        self, plan: Plan, program: Program, mesh: Mesh, units: dict[int, nn.Module], stores: list[Store],
        allocator: Allocator, products: WeightProducts, read: Callable[[Tensor], list[float]] = Tensor.tolist,
        balancer: Balancer | None = None, expert_axis: ExpertAxis | None = None,
    ) -> None:  # fmt: skip
        self._balancer, self._num_packed, self._has_terms = balancer, norm_floats(plan), has_terms(plan)
        self._expert_axis = expert_axis
        self._read = read  # the only way by which a number leaves the device
        self.plan, self.program, self.mesh = plan, program, mesh
        self.units, self.stores, self.allocator, self.products = units, stores, allocator, products
        self._trains = program.kind is Kind.TRAIN
        self.loss_scale = loss_scale_for(plan.precision.compute)
        self._names = {
            unit: [[s.name for s in store.bucket.segments if unit in s.owner.tensor.readers] for store in stores]
            for unit in units
        }
        self._parameters = {
            unit: [store.parameters[name] for store, held in zip(stores, names, strict=True) for name in held]
            for unit, names in self._names.items()
        }
        self._updated = [action.bucket for action in program.actions if action.op is Op.UPDATE]
        self._visits = Visits([stores[bucket].visitor for bucket in self._updated], allocator)
        self._last_use = {action.micro: i for i, action in enumerate(program.actions) if action.op in COMPUTE}
        self._do: dict[Op, Callable[[Action], Handle | None]] = {
            Op.COUNT: self._count,
            Op.GATHER: self._gather,
            Op.FORWARD: self._forward,
            Op.RECOMPUTE: self._recompute,
            Op.BACKWARD: self._backward,
            Op.WEIGHT: self._weight,
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.SUM: self._sum,
            Op.RELEASE: self._release,
            Op.NORM: self._norm,
            Op.UPDATE: self._update,
            Op.PUBLISH: self._publish,
        }
        self.position = -1
        self.before: Callable[[Action], None] | None = None  # an observer; called ahead of every action
        self._inputs: dict[Key, Tensor] = {}
        self._saved: dict[Key, tuple[Tensor, GradientEdge]] = {}
        self._held: dict[Key, Tensor] = {}
        self._cotangents: dict[Key, Tensor] = {}
        self._stashes: dict[Key, Stash] = {}
        self._handles: dict[int, Handle] = {}
        self._micros: dict[int, Inputs] = {}

    def run(self, batch: Batch, rate: float = 0.0, stop: bool = False) -> None:
        """Execute the program on this rank's share of the global batch; results are in `count`, `loss`, `packed`.

        `stop`: this rank was asked to stop; all ranks learn of it from `packed`.
        """
        device = self.allocator.device
        self._batch, self._rate = batch, rate
        self.count = torch.tensor(batch.trained_tokens, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.packed = torch.zeros(self._num_packed, dtype=torch.float64, device=device)
        self.packed[NormPart.STOP] = float(stop)
        self.norm, self.finite, self.overflowed, self.stops = 0.0, True, False, False
        if self._balancer is not None:
            self._balancer.begin(self.loss_scale.value)
        if self._expert_axis is not None:
            self._expert_axis.begin()
        try:
            self._execute()
        except BaseException as error:
            error.add_note(self._where())
            raise
        self.position = self.allocator.action = -1
        self._check_empty()

    def read(self) -> tuple[float, int]:
        """(loss, trained tokens) of what was run last."""
        (loss,), (count,) = self._read(self.loss.view(1)), self._read(self.count.view(1))
        return float(loss), int(count)

    def _execute(self) -> None:
        for index, action in enumerate(self.program.actions):
            self.position = self.allocator.action = index
            self.mesh.ledger.phase = action.phase
            if self.before is not None:
                self.before(action)
            if action.op is Op.WAIT:
                self._handles.pop(action.of).wait()
                continue
            handle = self._do[action.op](action)
            if handle is not None:
                self._handles[index] = handle
            if self._last_use.get(action.micro) == index:
                self._micros.pop(action.micro, None)

    def _where(self) -> str:
        """Who fails, and in what: rank, stage, action, micro-batch."""
        action = in_words(self.plan, self.program, self.program.actions[self.position])
        stage = f"stage {self.program.stage} of {self.plan.degrees.pp}"
        return f"rank {self.mesh.rank}, {stage}, action {self.position} of the step: {action}"

    # ------------------------------------------------------------------ compute

    def _forward(self, action: Action) -> None:
        key = action.unit, action.micro
        x = self._entering(key)
        if action.keep and self._trains:
            self._keep(key, x)
        else:
            with torch.no_grad():
                self._leave(key, self._call(key, x))
            if self._trains:
                self._held[key] = x
        if self._balancer is not None:
            self._balancer.count(action.unit)
        if self._expert_axis is not None:
            self._expert_axis.record(action.unit, action.micro)

    def _recompute(self, action: Action) -> None:
        key = action.unit, action.micro
        x = _leaf(self._held.pop(key))
        self._saved[key] = x, get_gradient_edge(self._call(key, x))

    def _backward(self, action: Action) -> None:
        key = action.unit, action.micro
        x, edge = self._saved.pop(key)
        cotangent = self._seed() if action.unit == self.plan.arch.head_unit else self._cotangents.pop(key)
        if not action.split:
            torch.autograd.backward((edge,), (cotangent,))
            self._collect(action.unit)
        elif action.unit == 0:
            self._stashes[key] = Stash(whole=(edge, cotangent))  # no gradient of tokens: all of it is weight work
        else:
            self._stashes[key] = self.products.backward(edge, cotangent, self._parameters[action.unit])
        if x.grad is not None:
            self._cotangents[action.unit - 1, action.micro] = x.grad

    def _weight(self, action: Action) -> None:
        self.products.finish(self._stashes.pop((action.unit, action.micro)))
        self._collect(action.unit)

    def _collect(self, unit: int) -> None:
        for store, names in zip(self.stores, self._names[unit], strict=True):
            if names:
                store.collect(names)

    def _seed(self) -> Tensor:
        """() what the backward of a loss share starts from, in the dtype of `token_losses`."""
        dtype = torch.promote_types(TORCH_DTYPES[self.plan.precision.compute], torch.float32)
        return torch.tensor(self.loss_scale.value, dtype=dtype, device=self.allocator.device)

    def _entering(self, key: Key) -> Tensor:
        unit, micro = key
        return self._micro(micro).tokens if unit == 0 else self._inputs.pop(key)

    def _keep(self, key: Key, x: Tensor) -> None:
        x = _leaf(x)
        out = self._call(key, x)
        self._leave(key, out.detach())
        self._saved[key] = x, get_gradient_edge(out)

    def _call(self, key: Key, x: Tensor) -> Tensor:
        """Run a unit; the head gives its share of the loss, divided by the count only in training."""
        unit, micro = key
        inputs = self._micro(micro)
        if unit != self.plan.arch.head_unit:
            out: Tensor = self.units[unit](x, inputs.rows)
            return out
        count = self.count if self._trains else torch.ones_like(self.count)
        head = self.units[unit]
        assert isinstance(head, Head)
        return head.loss(x, inputs.rows, inputs.labels, count)

    def _leave(self, key: Key, out: Tensor) -> None:
        unit, micro = key
        if unit == self.plan.arch.head_unit:
            self.loss += out.double()
        else:
            self._inputs[unit + 1, micro] = out

    def _micro(self, micro: int) -> Inputs:
        if micro not in self._micros:
            device = self.allocator.device
            part = self._batch.micro(micro, self.plan.accumulation)
            met = None
            if self.plan.degrees.cp > 1:
                at = self.mesh.coordinates
                met = meeting(self.plan, at, part.rows)
                part = part.columns(held_columns(self.plan, at, part.rows))
            dtype = TORCH_DTYPES[self.plan.precision.compute]
            rows = rows_to_torch(
                part.rows, self.plan.arch, seed=self.plan.seed, dtype=dtype, device=device, meeting=met
            )
            self._micros[micro] = Inputs(
                torch.from_numpy(part.inputs).to(device),
                torch.from_numpy(part.labels).to(device),
                held_rows(self.plan, self.mesh.coordinates, rows),
            )
        return self._micros[micro]

    # ------------------------------------------------------------------ between ranks

    def _count(self, action: Action) -> Handle | None:
        if action.group is None:
            return None
        return all_reduce(self.mesh.communicator(action.group), self.count, action.phase)

    def _send(self, action: Action) -> Handle:
        value = self._crossing(action).pop((action.arrives_at, action.micro)).contiguous()
        return send(self.mesh.link(self.program.stage, action.peer), value, action.phase)

    def _receive(self, action: Action) -> Handle:
        tokens = stream_tokens(self.plan)
        dtype = TORCH_DTYPES[self.plan.precision.compute]
        value = torch.empty(tokens, self.plan.arch.hidden, dtype=dtype, device=self.allocator.device)
        self._crossing(action)[action.arrives_at, action.micro] = value
        return receive(self.mesh.link(action.peer, self.program.stage), value)

    def _crossing(self, action: Action) -> dict[Key, Tensor]:
        """The table of what crosses a border."""
        return self._inputs if action.what is What.ACTIVATION else self._cotangents

    def _sum(self, action: Action) -> Handle:
        assert action.group is not None
        over = self.mesh.communicator(action.group)
        if action.what is What.LOSS:
            return all_reduce(over, self.loss, action.phase)
        store = self.stores[action.bucket]
        if over.name is not store.group.name:  # copies of a shard, ends of a tied tensor, tensor ranks
            store.seal()
            return all_reduce(over, store.reduced, action.phase)
        if self.plan.sharding.stage == 0:
            return all_reduce(over, store.seal(), action.phase)
        whole, own = store.seal(), store.target()
        return reduce_scatter(over, whole, own, action.phase).then(lambda: store.absorb(own))

    def _gather(self, action: Action) -> Handle:
        assert action.group is not None
        store = self.stores[action.bucket]
        return all_gather(self.mesh.communicator(action.group), store.regrow(), action.phase, store.shards)

    def _release(self, action: Action) -> None:
        self.stores[action.bucket].release()

    # ------------------------------------------------------------------ the end of a step

    def _norm(self, action: Action) -> Handle | None:
        """Each element is counted by one rank: replicas share the work shard by shard, copies leave it to the first."""
        for store in self.stores:
            if store.bucket.trainable:
                store.seal()
                self.packed[NormPart.SQUARED] += store.counted_norm(squared_norm)
        wild = ~torch.isfinite(self.packed[NormPart.SQUARED])
        part = NormPart.OVERFLOW if self.loss_scale.may_fall else NormPart.NONFINITE
        self.packed[part] += wild
        self.packed[NormPart.NONFINITE] += ~torch.isfinite(self.loss)
        if self._balancer is not None:
            self._balancer.pack(self.packed)
        if action.group is None:
            self._judge()
            return None
        return all_reduce(self.mesh.communicator(action.group), self.packed, action.phase).then(self._judge)

    def _judge(self) -> None:
        """One decision for all ranks, from the summed vector: is the step taken, and how much is it clipped."""
        squared, nonfinite, overflows, stops = self._read(self.packed[:NORM_FLOATS])
        self.terms = self._read(self.packed[-NUM_TERMS:]) if self._has_terms else []
        scale = self.loss_scale.value
        self.norm = math.sqrt(squared) / scale
        self.finite, self.stops = nonfinite == 0, stops > 0
        self.overflowed = self.finite and overflows > 0
        self._coefficient = clip_coefficient(self.norm, self.plan.optimizer.clip_norm) / scale
        if self.finite:
            self.loss_scale.after_step(self.overflowed)
        if self._balancer is not None and self.finite and not self.overflowed:
            self._balancer.finish(self.packed)

    def _update(self, action: Action) -> None:
        store = self.stores[action.bucket]
        if self.finite and not self.overflowed:
            gradients = store.gradients_of_runs()
            if self._coefficient != 1.0:
                for gradient in gradients:
                    gradient.mul_(self._coefficient)
            place = self._updated.index(action.bucket)
            runs = self._visits.begin(place)
            RULES[self.plan.optimizer.kind](self.plan.optimizer, runs, gradients, self._rate)
            store.publish_own(runs)
            self._visits.end(place)
        store.drop_gradients()

    def _publish(self, action: Action) -> Handle:
        assert action.group is not None
        return all_gather(self.mesh.communicator(action.group), self.stores[action.bucket].whole, action.phase)

    def _check_empty(self) -> None:
        tables: dict[str, Mapping[Any, object]] = {
            "inputs": self._inputs, "saved": self._saved, "held": self._held,
            "cotangents": self._cotangents, "stashes": self._stashes, "handles": self._handles,
        }  # fmt: skip
        left = {name: list(table) for name, table in tables.items() if table}
        if left:
            raise RuntimeError(f"the program left values behind: {left}")


def _leaf(x: Tensor) -> Tensor:
    """Where a unit's graph begins: a detached leaf; tokens need no gradient."""
    return x.detach().requires_grad_() if x.is_floating_point() else x
