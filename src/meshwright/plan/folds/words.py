"""Actions in words: the phrases that narration, hang reports and deadlock reports share."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.arch.arch import Arch
from meshwright.arch.tensors import UnitKind
from meshwright.plan.action import Action, Op, What
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program


def units_in_words(arch: Arch, units: Sequence[int]) -> str:
    """(0, 1, 2, 3) -> "embedding, layers 0-2": runs of blocks by the number of their layer, from 0."""
    parts: list[str] = []
    blocks: list[int] = []
    for unit in (*units, -1):
        block = unit > 0 and arch.unit_kind(unit) is UnitKind.BLOCK
        if blocks and not (block and unit - 1 == blocks[-1] + 1):
            parts.append(f"layer {blocks[0]}" if len(blocks) == 1 else f"layers {blocks[0]}-{blocks[-1]}")
            blocks = []
        if block:
            blocks.append(unit - 1)
        elif unit >= 0:
            parts.append(arch.unit_kind(unit).value)
    return ", ".join(parts)


def in_words(plan: Plan, program: Program, action: Action) -> str:
    """A noun phrase: "sum of bucket 12, layers 20-21"."""
    match action.op:
        case Op.WAIT:
            return f"wait for the {in_words(plan, program, program.actions[action.of])}"
        case Op.COUNT:
            return "count of trained tokens"
        case Op.NORM:
            return "sum of gradient norm and flags"
        case Op.SUM if action.what is What.LOSS:
            return f"sum of the loss over {action.group}"
        case Op.SEND:
            return f"send of the {_carried(action)} to stage {action.peer}"
        case Op.RECEIVE:
            return f"receive of the {_carried(action)} from stage {action.peer}"
        case Op.FORWARD | Op.RECOMPUTE | Op.BACKWARD | Op.WEIGHT:
            name = "input backward" if action.split else _COMPUTES[action.op]
            return f"{name} of micro-batch {action.micro}, {units_in_words(plan.arch, (action.unit,))}"
        case Op.SUM | Op.GATHER | Op.RELEASE | Op.UPDATE | Op.PUBLISH:
            bucket = program.buckets[action.bucket]
            return f"{action.op.value} of bucket {action.bucket}, {units_in_words(plan.arch, bucket.units)}"


def _carried(action: Action) -> str:
    return f"{action.what.value if action.what else 'value'} of micro-batch {action.micro}"


_COMPUTES = {
    Op.FORWARD: "forward",
    Op.RECOMPUTE: "recomputation",
    Op.BACKWARD: "backward",
    Op.WEIGHT: "weight products",
}
