"""The mesh joined to process groups.

All communicators are made once, eagerly, by all ranks together in the order of `layout.communicators`. Nothing is
created on first use, so no rank can wait for a group that another one never makes; and a group's name is its number in
that list. (A group made by its members alone is named after the number of groups they have: this differs between
neighbours, and repeats once a mesh was closed, when a member may meet the address of a dead one. What a rank does for a
group of others takes some 20 microseconds.)

Gloo connects all members of a group while it is made, and torch does not wait for the others: a rank that left again
would end the meeting of slower ones, who find a closed connection. So the ranks meet once after the last group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.comm.torch_private import group_timeout
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Coordinates, Degrees
from meshwright.layout.communicators import Joined, communicators
from meshwright.layout.groups import GroupName, groups
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.context import ulysses_ways
from meshwright.plan.strategies.tensor import kv_copies


class Mesh:
    """Degrees of the five axes, and after `start` the communicators of this rank.

        mesh = Mesh(dp=2, tp=2)          # plain data
        mesh.start()                     # joins the default process group, which must have 4 ranks

    A mesh of one rank needs no process group. Raises ValueError at degrees, an order or groups that no mesh has.
    """

    def __init__(
        self,
        dp: int = 1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        *,
        order: Iterable[str] = tuple(Axis),
        shard_within: int = 0,
        kv_copies: int = 1,
        ulysses: int = 1,
    ) -> None:
        self.degrees = Degrees(dp, tp, pp, cp, ep, _axes(order))
        groups(self.degrees, shard_within, kv_copies, ulysses)  # refuses what does not divide, before anybody waits
        self.shard_within, self.kv_copies, self.ulysses = shard_within, kv_copies, ulysses
        self.shares_memory = True
        """ZeRO-3: ranks of one machine read parameters where they lie, on CPUs. False: all travels in messages."""
        self.rank = 0
        self._communicators: dict[GroupName, Communicator] = {}
        self._links: dict[tuple[int, int], Communicator] = {}
        self._ledger = Ledger(Transport.DIRECT)
        self._made_world = False

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """The mesh that `plan` runs on, not started yet."""
        ways = {axis.value: plan.degrees.on(axis) for axis in Axis}
        copies = kv_copies(plan.degrees, plan.arch)
        return cls(
            **ways, order=plan.degrees.order, shard_within=plan.sharding.within, kv_copies=copies,
            ulysses=ulysses_ways(plan.degrees.cp, plan.context),
        )  # fmt: skip

    def check_runs(self, plan: Plan) -> None:
        """Raises ValueError where this is not the mesh of `plan`."""
        wanted = Mesh.of(plan)
        for what in ("degrees", "shard_within", "kv_copies", "ulysses"):
            mine, its = getattr(self, what), getattr(wanted, what)
            if mine != its:
                raise ValueError(f"the plan's mesh has {what} {its}, this one {mine}: take Mesh.of(plan)")

    @property
    def coordinates(self) -> Coordinates:
        return self.degrees.coordinates(self.rank)

    @property
    def ledger(self) -> Ledger:
        """What this rank has sent since the ledger was last cleared."""
        return self._ledger

    def start(self, join: Callable[[], bool] | None = None) -> Self:
        """Create every communicator of this rank. Collective over all ranks; a second call is an error.

        `join` makes the default process group where there is none, and `close` then ends it; False: it made none.
        """
        if self._communicators:
            raise RuntimeError("this mesh has been started already")
        if not dist.is_initialized():
            if self.degrees.ranks == 1:
                return self
            self._made_world = join is not None and join()
        self._check_world()
        self.rank = dist.get_rank()
        native = dist.get_backend() == "nccl"
        self._ledger.transport = Transport.NCCL if native else Transport.DIRECT
        for wanted in communicators(self.degrees, self.shard_within, self.kv_copies, self.ulysses):
            made = _new_group(wanted)
            if made is not None:
                self._keep(wanted, made)
        if not native:
            dist.barrier()
        return self

    def communicator(self, name: GroupName) -> Communicator:
        """The group `name` of this rank; raises LookupError where the rank is alone in it."""
        if name not in self._communicators:
            raise LookupError(f"rank {self.rank} is alone on group {name}, or the mesh was not started")
        return self._communicators[name]

    def link(self, source: int, target: int) -> Communicator:
        """The communicator of one direction between two pipeline stages."""
        return self._links[source, target]

    def close(self) -> None:
        """Forget the communicators. The default process group ends with them where `start` made it."""
        for process_group in {id(c.process_group): c.process_group for c in self._all()}.values():
            if process_group is not dist.group.WORLD:
                dist.destroy_process_group(process_group)
        self._communicators.clear()
        self._links.clear()
        if self._made_world:
            dist.destroy_process_group()
            self._made_world = False

    def _all(self) -> list[Communicator]:
        return [*self._communicators.values(), *self._links.values()]

    def _check_world(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("no process group: start the ranks with torchrun, or call dist.init_process_group first")
        world = dist.get_world_size()
        if world != self.degrees.ranks:
            raise ValueError(f"the mesh has {self.degrees.ranks} ranks, the process group {world}")

    def _keep(self, joined: Joined, made: dist.ProcessGroup) -> None:
        ranks, place = joined.ranks, joined.ranks.index(self.rank)
        for name in joined.names:
            self._communicators[name] = Communicator(name, ranks, place, made, self._ledger)
        if joined.link is not None:
            pipeline = self.degrees.pp
            self._links[joined.link] = Communicator(GroupName.PP, ranks, place, made, self._ledger, pipeline)


def _axes(order: Iterable[str]) -> tuple[Axis, ...]:
    names, known = tuple(order), [axis.value for axis in Axis]
    strange = [name for name in names if name not in known]
    if strange:
        raise ValueError(f"order names {strange[0]!r}: the axes are {', '.join(known)}")
    return tuple(map(Axis, names))


def _new_group(wanted: Joined) -> dist.ProcessGroup | None:
    """The group, made by every rank of the world; None on the ranks outside it. What joins all ranks is the world, but
    not a link."""
    if len(wanted.ranks) == dist.get_world_size() and wanted.link is None:
        return dist.group.WORLD
    group = dist.new_group(list(wanted.ranks), group_desc=wanted.told, timeout=_timeout())
    return group if isinstance(group, dist.ProcessGroup) else None


def _timeout() -> timedelta | None:
    """How long the joined process group waits for a rank; groups made from it would take torch's half hour instead."""
    kinds = {"gloo": "cpu", "nccl": "cuda"}
    kind = kinds.get(dist.get_backend())
    world = dist.group.WORLD
    if kind is None or world is None:
        return None
    return group_timeout(world, kind)


def no_cuda() -> RequestError:
    """The refusal of a run on CUDA where there is none."""
    return RequestError('train.device = "cuda"', "no CUDA device is found here", ('train.device = "cpu"',))


def device_of(kind: str) -> torch.device:
    """The device a rank computes on: "auto" takes CUDA where there is one. Raises RequestError where "cuda" is not."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise no_cuda()
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
