"""The mesh joined to process groups.

All communicators are made once, eagerly, by all ranks together in the order of the plan's list, and equal member sets
share one. Nothing is created on first use, so no rank can wait for a group that another one never makes; and a group's
name is its number in that list. (A group made by its members alone is named after the number of groups they have: this
differs between neighbours, and repeats once a mesh was closed, when a member may meet the address of a dead one. What a
rank does for a group of others takes some 20 microseconds.)

Gloo connects all members of a group while it is made, and torch does not wait for the others: a rank that left again
would end the meeting of slower ones, who find a closed connection. So the ranks meet once after the last group.

Stages of a pipeline form a ring, and each direction of each of its links has a communicator of its own: receives are
posted ahead of need, and two directions on one ordered stream would wait for each other.

    stage 0 --0>1--> stage 1 --1>2--> stage 2 --2>0--> stage 0      chunks of an interleaved schedule come round
            <--1>0--         <--2>1--         <--0>2--
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.comm.torch_private import group_timeout
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Coordinates, Degrees
from meshwright.layout.groups import Group, GroupName, groups
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.tensor import kv_copies


class Mesh:
    """Degrees of the five axes, and after `start` the communicators of this rank.

        mesh = Mesh(dp=2, tp=2)          # plain data
        mesh.start()                     # joins the default process group, which must have 4 ranks

    Where there is none yet, a rank that torchrun started makes it: NCCL and its own device with CUDA, else gloo. A
    mesh of one rank needs no process group.
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
    ) -> None:
        self.degrees = Degrees(dp, tp, pp, cp, ep, tuple(Axis(name) for name in order))
        self.shard_within, self.kv_copies = shard_within, kv_copies
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
        return cls(**ways, order=plan.degrees.order, shard_within=plan.sharding.within, kv_copies=copies)

    def check_runs(self, plan: Plan) -> None:
        """Raises ValueError where this is not the mesh of `plan`."""
        wanted = Mesh.of(plan)
        for what in ("degrees", "shard_within", "kv_copies"):
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

    def start(self) -> Mesh:
        """Create every communicator of this rank. Collective over all ranks; a second call is an error."""
        if self._communicators:
            raise RuntimeError("this mesh has been started already")
        if not dist.is_initialized():
            if self.degrees.ranks == 1:
                return self
            self._made_world = _join_launcher()
        self._check_world()
        self.rank = dist.get_rank()
        native = dist.get_backend() == "nccl"
        self._ledger.transport = Transport.NCCL if native else Transport.DIRECT
        shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for name, group in groups(self.degrees, self.shard_within, self.kv_copies).items():
            for ranks in self._member_sets(group):
                if ranks not in shared:
                    shared[ranks] = _new_group(ranks, name.value)
                self._join(name, ranks, shared[ranks])
        for source, target in ring(self.degrees.pp):
            for ranks in self._ends(source, target):
                made = _new_group(ranks, f"stage {source} to {target}", own=True)
                if made is not None:
                    self._links[source, target] = self._joined(GroupName.PP, ranks, made, self.degrees.pp)
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

    def _member_sets(self, group: Group) -> Iterator[tuple[int, ...]]:
        """The ranks of every group of this name that has more than one, by first rank."""
        if group.size > 1:
            for at in self._places():
                if group.place(self.degrees, at) == 0:
                    ranks = group.members(self.degrees, at)
                    if len(ranks) > 1:
                        yield ranks

    def _ends(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """The two ranks at the ends of a link, in every pipeline."""
        for at in self._places():
            if at.pp == source:
                yield self.degrees.rank(at), self.degrees.rank(replace(at, pp=target))

    def _places(self) -> Iterator[Coordinates]:
        return map(self.degrees.coordinates, range(self.degrees.ranks))

    def _join(self, name: GroupName, ranks: tuple[int, ...], made: dist.ProcessGroup | None) -> None:
        if made is not None:
            self._communicators[name] = self._joined(name, ranks, made)

    def _joined(
        self, name: GroupName, ranks: tuple[int, ...], made: dist.ProcessGroup, pipeline: int = 0
    ) -> Communicator:
        return Communicator(name, ranks, ranks.index(self.rank), made, self._ledger, pipeline)


def ring(stages: int) -> list[tuple[int, int]]:
    """The directed links of a pipeline: every stage to the next one and back, the last next to the first."""
    if stages == 1:
        return []
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if stages > 2 else 1)]
    return [link for first, second in pairs for link in ((first, second), (second, first))]


def _join_launcher() -> bool:
    """Make the default process group from what torchrun says of this rank; False where it started none."""
    if not dist.is_torchelastic_launched():
        return False
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return True


def _new_group(ranks: tuple[int, ...], name: str, own: bool = False) -> dist.ProcessGroup | None:
    """A group made by every rank of the world; None on the ranks outside it. All ranks share the world unless `own`."""
    if len(ranks) == dist.get_world_size() and not own:
        return dist.group.WORLD
    group = dist.new_group(list(ranks), group_desc=name, timeout=_timeout())
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
