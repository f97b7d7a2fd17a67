"""How a run begins: from its newest checkpoint, from imported weights, or from counter-based numbers.

folder                          checkpoint.resume = "auto"                              "none"
absent, empty                   afresh                                                  afresh
this run, finished              said so, nothing is done                                afresh, the old set aside
this run, with a checkpoint     goes on from it                                         afresh, the old set aside
this run, without one           refused: figures would be mixed or lost                 afresh
another run                     refused, every difference named                         afresh, the old set aside
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.checkpoint.errors import AddressError, CheckpointError
from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.huggingface.read import open_hf
from meshwright.checkpoint.loader import agreed, load_weights
from meshwright.checkpoint.resume import look, resume
from meshwright.comm.agree import Side
from meshwright.config.choices import Resume, Weights
from meshwright.config.errors import RequestError
from meshwright.parallel.engine import Engine
from meshwright.train.feed import open_corpus
from meshwright.train.folder import FolderState, folder_state
from meshwright.train.job import Job

__all__ = ["Begin", "begin", "is_already_done", "is_finished"]


@dataclass(frozen=True, slots=True)
class Begin:
    """The first step to take, and the samples consumed before it."""

    step: int = 0
    samples: int = 0


def is_finished(job: Job, corpus: str = "") -> bool:
    """Whether the run stands in its folder already, finished. Raises RequestError where it cannot be started there.

    Reads manifests only; to be called before any rank is started.
    """
    saving, folder = job.saving, _folder(job)
    if saving.resume is Resume.NONE:
        return False
    try:
        found = look(folder, job.plan, saving.resume, corpus=corpus, accept_changes=saving.accept_changes)
    except CheckpointError as error:
        raise RequestError(f'checkpoint.resume = "{saving.resume}"', str(error), ("none", "another name")) from None
    if found is None:
        return folder_state(job) is FolderState.FINISHED
    return found.manifest.step >= job.steps


def is_already_done(job: Job, corpus: str = "") -> bool:
    """Whether this run, of these very data, stands in its folder finished: nothing is to be done.

    Opens the data where `corpus`, their digest, is not known yet; what is finished needs them no more, so data that are
    gone are no matter. Raises RequestError where the run cannot be started there: it is of another text, say.
    """
    if not is_finished(job, corpus):
        return False
    if corpus:
        return True
    try:
        corpus = open_corpus(job).digest
    except RequestError:
        return True
    return is_finished(job, corpus)


def begin(engine: Engine, job: Job, side: Side, corpus: str, told: Callable[[str], None]) -> Begin:
    """Fill the engine and say where the run goes on. Collective."""
    saving = job.saving
    manifest = resume(
        engine,
        _folder(job),
        saving.resume,
        side,
        corpus=corpus,
        accept_changes=saving.accept_changes,
        told=told,
    )
    if manifest is not None:
        return Begin(manifest.step, manifest.samples)
    start = job.plan.start
    if start.source is Weights.LOAD:
        opened = agreed(side, lambda: open_hf(start.folder))
        load_weights(engine, opened.source, side)
        told(f"weights of {start.folder}: {len(opened.source.stored)} tensors")
    return Begin()


def _folder(job: Job) -> Folder:
    asked, works = f'train.output = "{job.checkpoints}"', ("a folder", "s3://bucket/runs")
    try:
        folder = Folder(job.checkpoints)
    except AddressError as error:
        raise RequestError(asked, error.rule, works) from None
    if not folder.storage.shared:
        raise RequestError(asked, "is memory of one process, and gone when it ends", works)
    return folder
