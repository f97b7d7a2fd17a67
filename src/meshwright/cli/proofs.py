"""What ``verify`` shows besides the ladder: a dry run beside its prediction, the loss on masks of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError
from meshwright.observe.figures import bytes_text, table_lines
from meshwright.plan.folds.memory import Category
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.hash import plain
from meshwright.plan.plan import Plan

__all__ = ["Proof", "dry", "labels"]

_TOLERANCE = 0.05
_LABELS = ("labels (sequences, tokens), -100 where a token is not trained",)
_STATES = (Category.PARAMETERS, Category.OPTIMIZER, Category.MASTER)


@dataclass(frozen=True, slots=True)
class Proof:
    ok: bool
    lines: list[str]
    json: Mapping[str, Any]


def dry(plan: Plan, rank: int, device: DeviceKind) -> Proof:
    """One training step of `rank` with fake tensors. GPUs are assumed to talk by NCCL, CPUs directly."""
    if rank >= plan.degrees.ranks:
        raise RequestError(
            f"--rank {rank}", f"the mesh has {plan.degrees.ranks} ranks", (f"0 to {plan.degrees.ranks - 1}",)
        )
    from meshwright.parallel.dry_run import dry_run

    transport = Transport.DIRECT if device is DeviceKind.CPU else Transport.NCCL
    done = dry_run(plan, rank, transport=transport)
    near = abs(done.peak_ratio - 1) <= _TOLERANCE
    ok = done.traffic_equal and done.states_equal and near
    expected = set(done.predicted)
    headers = ["group", "operation", "phase", "calls", "sent", "wire", ""]
    rows = [
        [row.group.value, row.operation.value, row.phase.value, str(row.calls), bytes_text(row.sent_bytes),
         bytes_text(row.wire_bytes), "equal" if row in expected else "DIFFERS"]
        for row in done.measured
    ]  # fmt: skip
    lines = [
        f"rank {rank} of {plan.degrees.ranks}, one step, {transport.value}",
        "",
        *table_lines(headers, rows, left=3),
    ]
    lines += [f"predicted, but not done: {row}" for row in expected.difference(done.measured)]
    memory = [
        [each.value, bytes_text(done.expected.states[each]), bytes_text(done.timeline.states[each])] for each in _STATES
    ]
    memory.append(["peak", bytes_text(done.expected.peak_bytes), bytes_text(done.timeline.peak_bytes)])
    lines += ["", *table_lines(["memory", "predicted", "dry run"], memory), ""]
    lines.append(f"ledger and memory {'equal' if ok else 'DIFFERS'}; peak predicted to {done.peak_ratio - 1:+.2%}")
    figures = {
        "ok": ok, "rank": rank, "ranks": plan.degrees.ranks, "traffic_equal": done.traffic_equal,
        "states_equal": done.states_equal, "traffic": [plain(row) for row in done.measured],
        "memory": {"predicted": done.expected.peak_bytes, "peak": done.timeline.peak_bytes},
    }  # fmt: skip
    return Proof(ok, lines, figures)


def labels(plan: Plan, file: str) -> Proof:
    """The loss normalisation of `plan` on the labels in `file`."""
    import numpy as np

    try:
        given = np.load(Path(file))
    except OSError as error:
        raise RequestError(f"--labels {file}", f"cannot be read: {error.strerror}", _LABELS) from None
    except (ValueError, EOFError, MemoryError):  # numpy's own words recommend to unpickle it
        given = None
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu":
        raise RequestError(f"--labels {file}", "is no .npy file of whole numbers", _LABELS)
    from meshwright.verify.normalisation import check_normalisation

    found = check_normalisation(plan, given.astype(np.int64))
    figures = {
        "ok": found.ok, "telling": found.telling, "loss": found.loss, "mean_of_ranks": found.mean_of_ranks,
        "mean_of_micro_batches": found.mean_of_micro_batches, "trained": found.trained,
    }  # fmt: skip
    return Proof(found.ok, [str(found)], figures)
