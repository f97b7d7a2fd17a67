"""``meshwright train``: starts the ranks, or takes its place among a launcher's, and trains."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from meshwright.cli import request
from meshwright.cli.checkpoints import told
from meshwright.cli.ending import Ending
from meshwright.cli.launcher import REFUSALS, place_of_launcher, told_once
from meshwright.config.choices import Weights

if TYPE_CHECKING:
    from meshwright.launch.environment import Place
    from meshwright.train.job import Job

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "train"
HELP = "train a model and write its run folder"
EXAMPLES = """\
meshwright train                              the demonstration run, two ranks on this machine
meshwright train run.toml train.steps=1000
meshwright train mesh.dp=fill --ranks 4
torchrun --nproc-per-node 4 -m meshwright train run.toml mesh.dp=fill"""

_TERMINATED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run file, overrides, and the number of ranks."""
    request.run_file_arguments(parser)
    parser.add_argument("--ranks", type=request.positive, metavar="N", help='ranks to start; for mesh.dp = "fill"')


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 done, 1 a rank failed, 2 a rank refused the request, 130 and 143 after a signal."""
    return told(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    place = place_of_launcher()
    with told_once(place):
        plan_run, plan = request.planned(arguments, None if place is None else place.world)
        from meshwright.train.job import job_of

        job = job_of(plan_run, plan, quiet_stdout=arguments.json)
        if place is not None:
            _refuse_early(job)
    return _start(job) if place is None else _take_place(job, place)


def _start(job: Job) -> int:
    """Start the ranks on this machine. What is wrong with the request is found before."""
    from meshwright.launch.local import exit_code, run_ranks
    from meshwright.train.claim import claimed
    from meshwright.train.machine import check_devices, check_ranks
    from meshwright.train.room import check_machine_room

    ranks = job.plan.degrees.ranks
    check_ranks(ranks)
    ending = Ending(job)
    if job.folder.exists():
        with claimed(job):
            pass  # told before ranks start; rank 0 has it while it trains
    if _is_finished(job):
        ending.already()
        return 0
    check_devices(job.device, ranks)
    check_machine_room(job.plan, job.device)
    return exit_code(ending.of(lambda: run_ranks(_rank, ranks, job, mistakes=_mistakes(), refusals=REFUSALS)))


def _take_place(job: Job, place: Place) -> int:
    """Be one of a launcher's ranks."""
    from meshwright.launch.local import exit_code, run_here

    ending = Ending(job, silent=place.rank > 0)
    code = exit_code(ending.of(lambda: [run_here(_rank, place, job, mistakes=_mistakes(), refusals=REFUSALS)]))
    return _TERMINATED if ending.stopped else code


def _mistakes() -> tuple[type[BaseException], ...]:
    """What is told in one line and no refusal: damaged checkpoints, full disks."""
    from meshwright.checkpoint.errors import CheckpointError

    return (CheckpointError,)


def _rank(place: Place, status: Any, job: Job) -> Any:
    """What every rank runs."""
    from meshwright.train.loop import train

    return train(place, status, job)


def _is_finished(job: Job) -> bool:
    """Whether this very run stands in its folder already. Raises RequestError for what cannot be started."""
    from meshwright.train.feed import open_corpus

    corpus = _refuse_early(job)
    from meshwright.train.start import is_already_done

    if is_already_done(job, corpus):
        return True
    # what goes on: whether with these data, before ranks start
    return not corpus and is_already_done(job, open_corpus(job).digest)


def _refuse_early(job: Job) -> str:
    """The digest of a new run's data, "" of a run whose folder is there. Raises RequestError for what can be known to
    be wrong before ranks meet: the data and the weights of a new run, a folder of something else.

    Every rank of a launcher may ask: none has met the others yet, so none has written.
    """
    from meshwright.train.feed import open_corpus
    from meshwright.train.folder import check_folder, check_output, is_new

    if not is_new(job):
        check_folder(job)
        return ""
    check_output(job)
    if job.plan.start.source is Weights.LOAD:
        from meshwright.checkpoint.huggingface.read import open_hf

        open_hf(job.plan.start.folder)  # reads headers only
    return open_corpus(job).digest
