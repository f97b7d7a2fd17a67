"""Text that a model writes when its run has ended: how the run's own held-out text might go on."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from meshwright.arch.arithmetic import parameters
from meshwright.config.errors import RequestError
from meshwright.data import Dataset
from meshwright.model.decoder import Decoder
from meshwright.train.generate import generate
from meshwright.train.job import Job
from meshwright.train.nonfinite import NonfiniteError

__all__ = ["may_sample", "opening", "sample"]

_LARGEST_PARAMETERS = 500_000_000
_TEMPERATURE = 0.8
_FIRST_WORDS = re.compile(r"[^\s\ufffd]+(?:[^\S\n]+[^\s\ufffd]+){0,3}")  # up to four of a line; no broken character


def may_sample(job: Job) -> bool:
    """Whether text is wanted, and the whole model small enough to be put on one rank for it."""
    return job.sample_tokens > 0 and parameters(job.plan.arch) <= _LARGEST_PARAMETERS


def sample(model: Decoder, job: Job, dataset: Dataset) -> Iterator[str]:
    """What the model makes of the first words of the held-out text; nothing where these cannot be read."""
    plan, begun = job.plan, opening(dataset)
    prompt = dataset.encode(begun) if begun else []
    if not prompt or max(prompt) >= plan.arch.vocab:  # token files need no more than what they hold
        return
    context, count = plan.data.sequence_length, job.sample_tokens
    try:
        tokens = list(generate(model, prompt, count, context=context, temperature=_TEMPERATURE, seed=plan.seed))
    except NonfiniteError as error:  # the run is done and saved: this is no reason to fail it
        yield from ("", f"no sample: {error}")
        return
    text = dataset.decode([*prompt, *tokens])
    yield ""
    yield f"a sample ({len(tokens)} tokens after {begun!r} of the held-out text, temperature {_TEMPERATURE}):"
    yield from (f"  | {_printable(line)}" for line in text.splitlines())


def opening(dataset: Dataset) -> str:
    """The first words of the first whole line of the held-out text; "" where nothing is held out, or nobody knows what
    its tokens mean."""
    if not dataset.eval.num_samples:
        return ""
    try:
        text = dataset.decode(dataset.eval.read(np.zeros(1, dtype=np.int64)).inputs[0].tolist())
    except RequestError:  # tokens of an unknown tokenizer
        return ""
    whole_lines = text.partition("\n")[2]  # a sample begins anywhere, in the middle of a word too
    found = _FIRST_WORDS.search(whole_lines) or _FIRST_WORDS.search(text)
    return found.group() if found else ""


def _printable(line: str) -> str:
    """A model may write any byte; a terminal must not obey it."""
    return "".join(mark if mark.isprintable() else "·" for mark in line.expandtabs())
