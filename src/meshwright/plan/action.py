"""The words of a step program: one action is one line that a rank executes.

    count      sum the trained tokens of the global batch                      launches
    gather     make a bucket's parameters whole                                launches
    forward    run a unit on a micro-batch (keep=False: no graph is kept)
    recompute  run it again, keeping the graph
    backward   gradients of a unit (split=True: of its input only)
    weight     the weight products a split backward left
    send       a border value to a neighbouring stage                          launches
    receive    post the buffer for one                                         launches
    sum        reduce a bucket's gradient, or the loss, over a group           launches
    wait       the end of the action `of` launched
    release    free a bucket's whole parameters
    norm       gradient norm, overflow and non-finite flags, in one packed sum launches
    update     the optimizer on a bucket
    publish    all-gather the updated parameters of a bucket                   launches

Whatever launches has exactly one wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from meshwright.layout.groups import GroupName


class Op(Enum):
    __hash__ = object.__hash__  # members are single objects; what Enum has is Python code, asked of every action

    COUNT = "count"
    GATHER = "gather"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WEIGHT = "weight"
    SEND = "send"
    RECEIVE = "receive"
    SUM = "sum"
    WAIT = "wait"
    RELEASE = "release"
    NORM = "norm"
    UPDATE = "update"
    PUBLISH = "publish"


class What(Enum):
    """What a send, receive or sum carries."""

    __hash__ = object.__hash__  # as of Op

    ACTIVATION = "activation"
    COTANGENT = "cotangent"
    GRADIENT = "gradient"
    LOSS = "loss"


class Phase(Enum):
    """The part of a step that an action belongs to: a row of the ledger is (group, operation, phase)."""

    COUNT = "count"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    NORM = "norm"
    UPDATE = "update"


class Kind(Enum):
    TRAIN = "train"
    EVALUATE = "evaluate"


COMPUTE = frozenset({Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.WEIGHT})
LAUNCHES = frozenset({Op.COUNT, Op.GATHER, Op.SEND, Op.RECEIVE, Op.SUM, Op.NORM, Op.PUBLISH})


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank; fields an op does not use keep their default.

    `unit` and `micro` name a compute, or the unit on this side of a border; `bucket` is an index into the buckets of
    the stage; `peer` the pipeline coordinate at the other end; `of` the index of the action a wait ends. `group` is
    None where nobody else takes part.
    """

    op: Op
    phase: Phase
    unit: int = -1
    micro: int = -1
    bucket: int = -1
    what: What | None = None
    group: GroupName | None = None
    peer: int = -1
    of: int = -1
    keep: bool = True
    split: bool = False

    @property
    def launches(self) -> bool:
        return self.op in LAUNCHES and (self.group is not None)

    @property
    def arrives_at(self) -> int:
        """Of a send or a receive: the unit that what crosses the border is for, by which both ends know it."""
        if self.op is Op.RECEIVE:
            return self.unit
        return self.unit + (1 if self.what is What.ACTIVATION else -1)
