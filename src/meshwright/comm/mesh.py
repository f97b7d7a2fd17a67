"""The mesh joined to process groups.

All communicators are made once, eagerly, in the order of the plan's list; each rank makes the list filtered to its own
groups, and equal member sets share one. Nothing is created on first use, so no rank can wait for a group that another
one never makes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.layout.axes import Axis, Coordinates, Degrees
from meshwright.layout.groups import GroupName, groups
from meshwright.plan.folds.traffic import Transport


class Mesh:
    """Degrees of the five axes, and after `start` the communicators of this rank.

        mesh = Mesh(dp=2, tp=2)          # plain data
        mesh.start()                     # joins the default process group, which must have 4 ranks

    A mesh of one rank needs no process group. `links` are the directed pairs of pipeline stages that exchange border
    values; each gets a communicator of its own.
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
    ) -> None:
        self.degrees = Degrees(dp, tp, pp, cp, ep, tuple(Axis(name) for name in order))
        self.shard_within = shard_within
        self.rank = 0
        self._communicators: dict[GroupName, Communicator] = {}
        self._links: dict[tuple[int, int], Communicator] = {}
        self._ledger = Ledger(Transport.DIRECT)

    @property
    def coordinates(self) -> Coordinates:
        return self.degrees.coordinates(self.rank)

    @property
    def ledger(self) -> Ledger:
        """What this rank has sent since the ledger was last cleared."""
        return self._ledger

    def start(self, links: Iterable[tuple[int, int]] = ()) -> Mesh:
        """Create every communicator of this rank. Collective over all ranks; a second call is an error."""
        if self._communicators:
            raise RuntimeError("this mesh has been started already")
        if self.degrees.ranks == 1 and not dist.is_initialized():
            return self
        self._check_world()
        self.rank = dist.get_rank()
        native = dist.get_backend() == "nccl"
        self._ledger.transport = Transport.NCCL if native else Transport.DIRECT
        shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
        here = self.coordinates
        for name, group in groups(self.degrees, self.shard_within).items():
            ranks = group.members(self.degrees, here)
            if len(ranks) > 1:
                if ranks not in shared:
                    shared[ranks] = _new_group(ranks, name.value)
                place = ranks.index(self.rank)
                self._communicators[name] = Communicator(name, ranks, place, shared[ranks], self._ledger)
        for source, target in links:
            if here.pp in (source, target):
                self._links[source, target] = self._new_link(source, target)
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
        """Forget the communicators; the default process group is whoever's made it."""
        for process_group in {id(c.process_group): c.process_group for c in self._all()}.values():
            if process_group is not dist.group.WORLD:
                dist.destroy_process_group(process_group)
        self._communicators.clear()
        self._links.clear()

    def _all(self) -> list[Communicator]:
        return [*self._communicators.values(), *self._links.values()]

    def _check_world(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("join a process group first: torch.distributed.init_process_group, or a launcher")
        world = dist.get_world_size()
        if world != self.degrees.ranks:
            raise ValueError(f"the mesh has {self.degrees.ranks} ranks, the process group {world}")

    def _new_link(self, source: int, target: int) -> Communicator:
        here = self.coordinates
        ends = []
        for stage in (source, target):
            at = Coordinates(here.dp, here.tp, stage, here.cp, here.ep)
            ends.append(self.degrees.rank(at))
        ranks = tuple(ends)
        group = _new_group(ranks, f"stage {source} to {target}")
        return Communicator(GroupName.PP, ranks, ranks.index(self.rank), group, self._ledger)


def _new_group(ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


def device_of(kind: str) -> torch.device:
    """The device a rank computes on: "auto" takes CUDA where there is one."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
