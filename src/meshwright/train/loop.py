"""The training run on one rank.

    meet      join the others, make the mesh's groups; one folder, one plan, one corpus for all
    prepare   open the data, build the engine, fill it from a checkpoint or imported weights
    step      read this rank's slice -> program -> figures        0 (or where the checkpoint ends) .. steps - 1
    save      every `checkpoint.every` steps, when asked to stop, at the end
    evaluate  the held-out split, every `eval_every` steps and at the end
    close     the account, a sample of text, the last lines

All ranks take the same way through it: whatever decides (a gradient that is not finite, a request to stop) has been
summed over all of them before anybody looks.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

from meshwright.comm.agree import Side, refused_together
from meshwright.comm.gather import gather_integers
from meshwright.comm.mesh import Mesh, device_of
from meshwright.config.choices import OnNonfinite
from meshwright.data import Batch
from meshwright.launch.environment import Place
from meshwright.launch.join import join, leave
from meshwright.launch.status import RankStatus
from meshwright.observe.progress import Progress
from meshwright.parallel.engine import Engine, StepResult
from meshwright.plan.learning_rate import learning_rate
from meshwright.price.price import price
from meshwright.report.run_page import run_page
from meshwright.train import story
from meshwright.train.account import Account, LedgerError, ledger_json, peak_bytes, take_account
from meshwright.train.checks import check_batches, check_same_run
from meshwright.train.claim import claimed
from meshwright.train.device_peak import peak_here
from meshwright.train.evaluate import evaluate
from meshwright.train.feed import Feed, rank_feed
from meshwright.train.figures import Meter
from meshwright.train.folder import LEDGER, REPORT, Journal, write_json
from meshwright.train.job import Job
from meshwright.train.nonfinite import NonfiniteError, blame
from meshwright.train.outcome import Outcome
from meshwright.train.peak import PeakWatch
from meshwright.train.regret import REGRET_AFTER, regret_line, too_short_line
from meshwright.train.room import check_rank_room
from meshwright.train.sample import may_sample, sample
from meshwright.train.saves import Saves
from meshwright.train.start import begin, is_already_done
from meshwright.train.stop import StopRequest
from meshwright.train.stopwatch import Stopwatch
from meshwright.train.where import Phases, where
from meshwright.train.whole import whole_model

__all__ = ["train", "train_joined"]


def train(place: Place, status: RankStatus, job: Job) -> Outcome:
    """Train as the rank at `place`. Raises what went wrong; `status` says where by then."""
    status.at(None, "start-up")
    if place.world > 1:
        join(place, device_of(job.device).type)
    outcome = train_joined(status, job)
    leave()  # not after an error: a group left in mid-collective may abort in its destructor
    return outcome


def train_joined(status: RankStatus, job: Job) -> Outcome:
    """Train as a rank of the default process group; a job of one rank needs none."""
    mesh = Mesh.of(job.plan).start()
    leads = mesh.rank == 0
    with ExitStack() as stack:
        side = Side()
        stack.callback(side.close)
        refused_together(side, lambda: stack.enter_context(claimed(job)) if leads else None)
        finished = refused_together(side, lambda: leads and is_already_done(job))
        if gather_integers(mesh, [int(finished)])[0][0]:  # rank 0 looked, all know
            return Outcome(steps=job.steps, already=True)
        stop = stack.enter_context(StopRequest())
        status.at(None, "opening the data")
        feed = refused_together(side, lambda: rank_feed(job, mesh.rank))
        check_same_run(mesh, job.plan, feed.dataset.digest)
        refused_together(side, lambda: check_rank_room(job.plan, mesh.rank, device_of(job.device)))
        status.at(None, "building the model")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine = Engine(job.plan, mesh, device_of(job.device))
        progress = Progress(sys.stderr if job.quiet_stdout else sys.stdout, job.log_every, silent=not leads)
        progress.say(*story.beginning(job, feed.dataset, engine))
        progress.say(*(f"warning: {each.message}" for each in told))
        stack.enter_context(progress)
        status.at(None, "loading the checkpoint")
        start = begin(engine, job, side, feed.dataset.digest, progress.say)
        feed = replace(feed, first_step=start.step, consumed=start.samples)
        journal = refused_together(side, lambda: stack.enter_context(Journal.open(job, start.step)) if leads else None)
        saves = stack.enter_context(Saves(engine, job, side, feed.dataset.digest, progress.say))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            meter = Meter(job.plan, job.steps, peak_here(engine, story.priced_on(engine), side))
        progress.say(*dict.fromkeys(f"warning: {each.message}" for each in told))
        return _Loop(job, status, stop, engine, feed, journal, progress, saves, meter).run()


class _Loop:
    """The steps of a run and what lasts from one to the next: an outcome, an account, a meter. Nothing grows."""

    def __init__(
        self, job: Job, status: RankStatus, stop: StopRequest, engine: Engine, feed: Feed, journal: Journal | None,
        progress: Progress, saves: Saves, meter: Meter,
    ) -> None:  # fmt: skip
        self._job, self._status, self._stop, self._saves = job, status, stop, saves
        self._first = feed.first_step
        self._engine, self._feed, self._journal, self._progress = engine, feed, journal, progress
        self._meter = meter
        self._watch = Stopwatch(lambda: engine.mesh.ledger.waited)
        self._evaluates = job.eval_every > 0 and feed.evaluation_batches > 0
        self._evaluation_seconds = 0.0
        self._warned = False
        self._account: Account | None = None
        self._measured = False  # whether the account is of a step that was taken: a skipped one has no update
        self._outcome = Outcome()

    def run(self) -> Outcome:
        for step in range(self._first, self._job.steps):
            with self._placed(step):
                result = self._step(step)
                self._save(step, result.stop)
            if result.stop:
                self._outcome = replace(self._outcome, stopped=step + 1 < self._job.steps)
                break
            if self._due(step):
                with self._placed(step):
                    self._evaluate(step)
        with self._placed(None):
            return self._close()

    # ------------------------------------------------------------------ one step

    def _step(self, step: int) -> StepResult:
        begin = time.perf_counter()
        self._status.at(step, "reading the batch")
        batch = self._feed.batch(step)
        self._watch.read(time.perf_counter() - begin)
        if step == self._first:
            check_batches(self._engine.mesh, self._job.plan, batch)
        self._engine.mesh.ledger.clear()
        rate = learning_rate(self._job.plan.optimizer, step)
        observer = self._watch.over(Phases(self._status, step))
        with nullcontext() if self._measured else PeakWatch(self._engine.allocator) as peak:
            self._engine.observe(observer if peak is None else peak.over(observer))
            result = self._engine.step(batch, rate, self._stop.asked)
        seconds = time.perf_counter() - begin
        self._watch.end(peak is None, seconds)
        if peak is not None:
            self._take_account(peak.num_bytes, result)
        self._status.at(step, "writing figures")
        self._record(step, result, rate, seconds)
        if step - self._first == REGRET_AFTER and self._journal is not None:
            self._progress.say(self._regret())
        if result.overflowed:
            self._progress.say(f"step {step}: the loss scale was too large and is now {result.loss_scale:g}")
        elif not result.finite:
            self._refused(step, batch, rate)
        return result

    def _regret(self) -> str:
        spent, where_priced = story.spent(self._engine, self._watch), story.priced_on(self._engine)
        return regret_line(self._job.run_file, self._job.plan, where_priced, spent, self._meter.step_seconds)

    def _take_account(self, peak: int, result: StepResult) -> None:
        self._account = take_account(self._engine, peak)
        self._measured = result.finite and not result.overflowed
        if not self._measured:
            return
        self._progress.say(*story.first_step(self._account))
        if self._job.strict and not self._account.ok:
            raise LedgerError("what the plan predicts of a step differs from what was measured; track.strict is on")

    def _record(self, step: int, result: StepResult, rate: float, seconds: float) -> None:
        assert self._account is not None  # taken of the first step
        line = self._meter.line(step, result, rate, seconds, peak_bytes(self._engine, self._account))
        first = result.loss if step == self._first else self._outcome.first_loss
        self._outcome = replace(self._outcome, steps=step + 1, first_loss=first, last_loss=result.loss)
        if self._journal is not None:
            self._journal.step(self._feed.samples(step).tolist(), line)
        self._progress.step(self._meter.reading(line, self._evaluations_left(step) * self._evaluation_seconds))
        if not result.trained_tokens and not self._warned:
            self._warned = True
            self._progress.say(f"warning: step {step} has no trained token: loss 0, gradient 0; look at the labels")

    def _save(self, step: int, stopping: bool) -> None:
        done = step + 1
        self._status.at(step, "saving a checkpoint")
        self._saves.after(done, self._feed.consumed_before(done), stopping)

    def _refused(self, step: int, batch: Batch, rate: float) -> None:
        """A gradient was not finite and the engine left the weights alone: go on (skip), or name the culprit."""
        found = blame(self._engine, batch, rate)
        if self._job.on_nonfinite is OnNonfinite.SKIP:
            self._progress.say(f"warning: step {step} skipped, the weights are untouched: {found}")
            return
        self._status.at(step, "the check of gradients")
        culprit = next(iter(found.tensors), 0)
        because = "" if self._engine.mesh.rank == culprit else f"stopped because of rank {culprit}: "
        raise NonfiniteError(f"{because}{found}; the weights are those before step {step}")

    # ------------------------------------------------------------------ evaluation and the end

    def _due(self, step: int) -> bool:
        done = step + 1
        return self._evaluates and (done % self._job.eval_every == 0 or done == self._job.steps)

    def _evaluations_left(self, step: int) -> int:
        every, steps = self._job.eval_every, self._job.steps
        return -(-steps // every) - step // every if self._evaluates else 0

    def _evaluate(self, step: int) -> None:
        self._status.at(step, "evaluation")
        begin = time.perf_counter()
        found = evaluate(
            self._engine, self._feed, lambda done, of: self._progress.doing(f"step {step}  evaluation {done}/{of}")
        )
        self._evaluation_seconds = time.perf_counter() - begin
        self._outcome = replace(self._outcome, eval_loss=found.loss)
        if self._journal is not None:
            self._journal.evaluation(
                {
                    "step": step,
                    "eval_loss": found.loss,
                    "eval_tokens": found.trained_tokens,
                    "eval_seconds": self._evaluation_seconds,
                }
            )
        self._progress.say(story.evaluation(step, found, self._evaluation_seconds))

    def _close(self) -> Outcome:
        self._status.at(None, "closing")
        assert self._account is not None  # a job has at least one step
        self._outcome = replace(
            self._outcome, step_seconds=self._meter.step_seconds, traffic_equal=self._account.traffic_equal
        )
        own = price(self._job.plan, story.priced_on(self._engine)) if self._journal is not None else None
        priced = own.parts if own is not None and not own.is_uncalibrated else None
        spent = story.spent_parts(self._engine, self._watch)
        figures = ledger_json(self._engine, self._account, self._meter, spent, priced)
        if self._journal is not None and own is not None:
            write_json(self._job.folder / LEDGER, figures)
            told = self._job, self._account, self._outcome, figures, own, spent
            self._progress.say(*story.closing(*told, self._meter.convention))
            if self._watch.steps < REGRET_AFTER:
                self._progress.say(too_short_line(self._watch.steps))
            (self._job.folder / REPORT).write_text(run_page(self._job.folder))
        self._sample()
        return self._outcome

    def _sample(self) -> None:
        """A sample of text, where the model is small enough to stand on one rank and nobody asked to stop."""
        if self._outcome.stopped or not may_sample(self._job):
            return
        model = whole_model(self._engine)
        if model is not None:
            self._progress.say(*sample(model, self._job, self._feed.dataset))

    @contextmanager
    def _placed(self, step: int | None) -> Iterator[None]:
        """An error on its way out leaves behind what this rank was doing: the closing line tells it."""
        try:
            yield
        except BaseException:
            if doing := where(self._engine):
                self._status.at(step, doing)
            raise
