"""``meshwright evaluate``: loss and perplexity of a checkpoint on a data source."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.checkpoints import found, told
from meshwright.cli.launcher import REFUSALS
from meshwright.cli.output import print_error, print_json

if TYPE_CHECKING:
    from meshwright.train.evaluate import EvalResult

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "evaluate"
HELP = "loss and perplexity of a checkpoint on a data source"
EXAMPLES = """\
meshwright evaluate runs/demo                              the held-out split of its training data
meshwright evaluate runs/demo data.source=book.txt         all of another text
meshwright evaluate runs/demo mesh.dp=2                    on two ranks"""

_SPLITS = {"eval": ("eval",), "train": ("train",), "all": ("train", "eval")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint, other data, another layout."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="step folder, `latest`, or run folder (its newest)")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="keys of [data], [mesh] and [parallel]")
    parser.add_argument(
        "--split", choices=tuple(_SPLITS), help="which samples (without: eval, and all of a data.source given here)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 done; 1 the checkpoint is damaged, or a rank failed."""
    return told(lambda: _evaluate(arguments))


def _evaluate(arguments: argparse.Namespace) -> int:
    from meshwright.checkpoint.errors import CheckpointError
    from meshwright.checkpoint.relayout import on_layout
    from meshwright.launch.environment import Launcher, Place
    from meshwright.launch.local import exit_code, run_ranks
    from meshwright.launch.status import RankStatus
    from meshwright.train.job import CACHE
    from meshwright.train.machine import check_machine
    from meshwright.train.standalone import Evaluating, evaluate_rank, plan_of, splits_of, tokenizer_of

    storage, path = found(arguments.checkpoint)
    saved = plan_of(storage, path)
    if not any(key.startswith("data.tokenizer=") for key in arguments.keys):
        saved = replace(saved, data=replace(saved.data, tokenizer=tokenizer_of(storage, path, saved)))
    plan = on_layout(saved, arguments.keys, to_run=True)
    another = any(key.startswith("data.source=") for key in arguments.keys)
    split = arguments.split or ("all" if another else "eval")
    asked = Evaluating(plan, storage.address, path, Path("runs") / CACHE, _SPLITS[split])
    ranks = plan.degrees.ranks
    check_machine(asked.device, ranks)
    results: list[Any] = []
    if ranks == 1:
        place = Place(0, 1, 0, "", 0, Launcher.LOCAL)
        results.append(evaluate_rank(place, RankStatus(), asked, _progress))
    else:
        splits_of(asked)  # what is wrong with the data is told before ranks are started
        mistakes = (CheckpointError,)  # a damaged checkpoint is told in one line
        code = exit_code(
            lambda: results.extend(run_ranks(evaluate_rank, ranks, asked, mistakes=mistakes, refusals=REFUSALS))
        )
        if code:
            return code
    return _show(results[0], plan.data.source, split, arguments.json)


def _show(result: EvalResult, source: str, split: str, as_json: bool) -> int:
    """Print the loss; 1 where it is no number."""
    loss, tokens = result.loss, result.trained_tokens
    finite = math.isfinite(loss)
    perplexity = math.exp(min(loss, 700.0))
    if as_json:
        value = {"loss": loss, "perplexity": perplexity} if finite else {"loss": None, "perplexity": None}
        print_json({**value, "tokens": tokens, "split": split, "source": source})
    elif finite:
        print(f"loss {loss:.6f} nats, perplexity {perplexity:.3f}, over {tokens:,} tokens ({source}, split {split})")
    if not finite:
        print_error(f"the loss is {loss}: look at the model's weights, they may hold NaN")
    return 0 if finite else 1


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{of} batches", end="\n" if done == of else "", file=sys.stderr, flush=True)
