"""The run folder: what stands in it, and whether a run may have it.

    runs/<name>/  run.toml       the resolved run             metrics.jsonl   a line a step, and one an evaluation
                  plan.json      the plan, both hashes        data.jsonl      the samples of each step
                  ledger.json    predicted and measured       report.html     all of it as one page

                  checkpoints/   see `checkpoint.folder`      latest          names the newest of them

Where train.output is an address, the last two lie there, and the rest in runs/<name> of the machine of rank 0.

A folder belongs to one run. An empty one is taken; one whose run is finished is left alone and said so; one with a
checkpoint goes on (`train.start`); any other is refused, for its figures would be mixed or lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, TextIO

from meshwright.config.choices import Resume
from meshwright.config.errors import RequestError
from meshwright.plan.hash import plain
from meshwright.plan.plan import Plan
from meshwright.train.job import Job

__all__ = [
    "REPORT",
    "FolderState",
    "Journal",
    "check_folder",
    "check_output",
    "folder_state",
    "is_new",
    "plan_json",
    "write_json",
]

PLAN, RUN, METRICS, DATA, LEDGER = "plan.json", "run.toml", "metrics.jsonl", "data.jsonl", "ledger.json"
REPORT = "report.html"


class FolderState(IntEnum):
    """What a run finds under its name."""

    FREE = 0
    FINISHED = 1


def is_new(job: Job) -> bool:
    """Whether nothing stands under the run's name yet."""
    return not job.folder.exists() or (job.folder.is_dir() and not any(job.folder.iterdir()))


def check_output(job: Job) -> None:
    """Make the folder that holds run folders. Raises RequestError where it cannot be made."""
    output = job.folder.parent
    try:
        job.cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made: {error.strerror or error}"
        raise RequestError(f'train.output = "{output}"', rule, ('"runs", the default', "another folder")) from None


def check_folder(job: Job) -> None:
    """Raises RequestError where the folder is certainly another's: it holds no checkpoints, which others judge."""
    if job.saving.address or job.saving.resume is not Resume.AUTO:
        return
    if not any((job.folder / each).exists() for each in ("checkpoints", "latest")):
        folder_state(job)


def folder_state(job: Job) -> FolderState:
    """Raises RequestError where the folder holds something else than this very run, finished."""
    folder = job.folder
    if is_new(job):
        return FolderState.FREE
    other = (f'name = "{_next_free(folder)}"', 'checkpoint.resume = "none"', "removing the folder")
    if not folder.is_dir():
        raise RequestError(str(folder), "is a file; the run folder would take its place", other)
    found = _read(folder / PLAN)
    if found is None:
        raise RequestError(str(folder), "is not empty and holds no run of this program", other)
    if found.get("math") != job.plan.math:
        raise RequestError(
            str(folder),
            f"holds another run: its math hash is {found.get('math')}, this run's is {job.plan.math}",
            other,
        )
    done = _steps_done(folder / METRICS)
    if done < job.steps:
        raise RequestError(
            str(folder), f"holds {done} of {job.steps} steps of this run and no checkpoint to go on from", other
        )
    return FolderState.FINISHED


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, with both hashes."""
    fields = plain(plan)
    assert isinstance(fields, dict)
    return {"math": plan.math, "layout": plan.layout, "plan": fields}


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all; figures that are not finite become null."""
    draft = file.with_name(f".{file.name}.part")
    draft.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")
    draft.replace(file)


class Journal:
    """The two growing files of a run; lines are flushed as they come. Rank 0 alone has one."""

    def __init__(self, metrics: TextIO, data: TextIO) -> None:
        self._metrics, self._data = metrics, data

    @classmethod
    @contextmanager
    def open(cls, job: Job, done: int = 0) -> Iterator[Journal]:
        """Make the folder and open its files; where the run goes on after `done` steps, what they hold of later ones
        is cut away. Raises RequestError where that is not possible."""
        folder = job.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RUN).write_text(job.run_file)
            write_json(folder / PLAN, plan_json(job.plan))
            mode: Literal["a", "w", "x"] = "a" if done else "w" if job.saving.resume is Resume.NONE else "x"
            for name in (METRICS, DATA) if done else ():
                _cut(folder / name, done)
            metrics, data = (folder / METRICS).open(mode, buffering=1), (folder / DATA).open(mode, buffering=1)
        except OSError as error:
            raise RequestError(str(folder), f"cannot be written: {error.strerror}", ("train.output = ...",)) from None
        with metrics, data:
            yield cls(metrics, data)

    def step(self, samples: list[int], figures: Mapping[str, Any]) -> None:
        """One optimizer step: its samples, and its line of figures."""
        self._line(self._data, {"step": figures["step"], "samples": samples})
        self._line(self._metrics, figures)

    def evaluation(self, figures: Mapping[str, Any]) -> None:
        """One evaluation, at the weights after `step`."""
        self._line(self._metrics, figures)

    @staticmethod
    def _line(file: TextIO, value: Mapping[str, Any]) -> None:
        file.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _cut(file: Path, done: int) -> None:
    """Keep the lines of steps before `done`; a last line that was torn goes too."""
    if not file.exists():
        return
    kept = []
    with file.open() as lines:
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] < done:
                    kept.append(line)
    draft = file.with_name(f".{file.name}.part")
    draft.write_text("".join(kept))
    draft.replace(file)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _next_free(folder: Path) -> str:
    return next(
        name for number in range(2, 100_000) if not (folder.parent / (name := f"{folder.name}-{number}")).exists()
    )


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        value = json.loads(file.read_text())
        return value if isinstance(value, dict) else None
    return None


def _steps_done(metrics: Path) -> int:
    """Completed steps, by the last whole line that tells of one."""
    done = 0
    with suppress(OSError), metrics.open() as lines:
        for line in lines:
            with suppress(ValueError):
                figures = json.loads(line)
                done = figures["step"] + 1 if "loss" in figures else done
    return done
