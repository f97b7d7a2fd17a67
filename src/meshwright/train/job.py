"""A job: everything a rank needs to train, decided before any rank is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.config.choices import DeviceKind, OnNonfinite, Resume
from meshwright.config.load import dump_run
from meshwright.config.schema import RunConfig
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import steps_of

__all__ = ["CACHE", "Job", "Saving", "job_of"]

CACHE = ".cache"
"""The folder of token caches, beside the run folders: runs on the same text share it."""


@dataclass(frozen=True, slots=True)
class Saving:
    """When checkpoints are written, how many stay, and from where the run goes on: the [checkpoint] table."""

    every: int = 0
    keep: int = 2
    asynchronous: bool = True
    resume: Resume | str = Resume.AUTO
    accept_changes: bool = False
    address: str = ""
    """Where checkpoints lie if not in the run folder: an fsspec address."""


@dataclass(frozen=True, slots=True)
class Job:
    """`steps` are optimizer steps; `folder` is the run folder; `run_file` the resolved run as TOML.

    `sample_tokens`: how much text the model writes at the end. `quiet_stdout`: what people read goes to standard error,
    for standard output carries JSON.
    """

    plan: Plan
    steps: int
    eval_every: int
    log_every: int
    folder: Path
    cache: Path
    device: DeviceKind
    on_nonfinite: OnNonfinite
    strict: bool
    run_file: str
    saving: Saving = Saving()
    sample_tokens: int = 1000
    quiet_stdout: bool = False

    @property
    def checkpoints(self) -> str:
        """The folder or address that holds checkpoints/ and latest."""
        return self.saving.address or str(self.folder)


def job_of(run: RunConfig, plan: Plan, *, quiet_stdout: bool = False) -> Job:
    """The job of a run whose plan was resolved.

    Where `train.output` is an address, checkpoints go there; files that grow by lines cannot, and stay in runs/<name>.
    """
    output, address = _places(run.train.output, run.name)
    return Job(
        plan=plan,
        steps=steps_of(run),
        eval_every=run.train.eval_every,
        log_every=run.train.log_every,
        folder=output / run.name,
        cache=output / CACHE,
        device=run.train.device,
        on_nonfinite=run.survive.on_nonfinite,
        strict=run.track.strict,
        run_file=dump_run(run),
        saving=Saving(
            every=run.checkpoint.every,
            keep=run.checkpoint.keep,
            asynchronous=run.checkpoint.asynchronous,
            resume=run.checkpoint.resume,
            accept_changes=run.checkpoint.accept_changes,
            address=address,
        ),
        quiet_stdout=quiet_stdout,
    )


def _places(output: str, name: str) -> tuple[Path, str]:
    """The folder of run folders, and the address of the run's checkpoints where it is another place."""
    local = output.removeprefix("file://")
    return (Path("runs"), f"{output.rstrip('/')}/{name}") if "://" in local else (Path(local), "")
