"""From a stream of tokens to samples: which tokens sample i reads, and which samples train.

tokens   0 1 2 .. S | S+1 .. 2S | .. | nS-S+1 .. nS | dropped        sample i reads i*S .. i*S+S, inputs and labels
sample      0       |     1     | .. |     n-1      |                overlap by one token, so each is a label once
                        train        |    eval
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.errors import RequestError

MAX_TOKENS = 1 << 62


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """How a stream of tokens is cut; exact integers of any size."""

    num_train: int
    num_eval: int
    dropped_tokens: int
    """Tokens at the end that fill no sample."""


def plan_samples(num_tokens: int, sequence_length: int, eval_fraction: float) -> SamplePlan:
    """Samples of a stream; the last share of them evaluates, whole samples, so no label is in both.

    A share above 0 is at least one sample where there are two. Raises RequestError where no sample can be made.
    """
    if num_tokens > MAX_TOKENS:
        raise RequestError(f"{num_tokens} tokens", "a stream holds at most 2^62")
    num_samples = max(num_tokens - 1, 0) // sequence_length
    if num_samples == 0:
        rule = f"the data has {num_tokens} tokens, a sample needs sequence_length + 1"
        works = [num_tokens - 1] if num_tokens > 1 else []
        raise RequestError(f"data.sequence_length = {sequence_length}", rule, works)
    num_eval = min(round(num_samples * eval_fraction), num_samples - 1)
    if eval_fraction > 0 and num_samples > 1:
        num_eval = max(num_eval, 1)
    dropped = num_tokens - 1 - num_samples * sequence_length
    return SamplePlan(num_samples - num_eval, num_eval, dropped)
