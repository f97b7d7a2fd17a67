"""``meshwright generate``: text from a checkpoint."""

from __future__ import annotations

import argparse
import math
import sys
import time

from meshwright.cli import request
from meshwright.cli.checkpoints import found, told
from meshwright.cli.output import print_error, print_json
from meshwright.config.errors import RequestError

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "generate"
HELP = "text from a checkpoint of any layout"
EXAMPLES = """\
meshwright generate runs/demo --prompt "def "
meshwright generate smollm --prompt "The capital of France is" --temperature 0 --tokens 20"""


_LARGEST_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint, the prompt, and how tokens are drawn."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="step folder, `latest`, or run folder (its newest)")
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="what the text begins with; - reads it from stdin"
    )
    parser.add_argument("--tokens", type=request.positive, default=200, metavar="N", help="tokens at most (200)")
    parser.add_argument("--temperature", type=_number, default=0.8, metavar="T", help="0: the likeliest token (0.8)")
    parser.add_argument(
        "--top-k", type=request.natural, default=0, metavar="K", help="of the K likeliest; 0: of all (0)"
    )
    parser.add_argument("--top-p", type=_share, default=1.0, metavar="P", help="of the fewest that reach P (1.0)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="of the draw (0)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help='"bytes", a tokenizer.json, or its folder (without: its own)'
    )


def run(arguments: argparse.Namespace) -> int:
    """Print prompt and text as it comes; 0, or 1 where the checkpoint is damaged."""
    return told(lambda: _generate(arguments))


def _generate(arguments: argparse.Namespace) -> int:
    from meshwright.arch.families import check_runs
    from meshwright.comm.mesh import device_of
    from meshwright.data.tokenizer.open import open_tokenizer
    from meshwright.data.tokenizer.tokenizer import encode_text
    from meshwright.train.generate import generate
    from meshwright.train.nonfinite import NonfiniteError
    from meshwright.train.standalone import decoder_of, plan_of, tokenizer_of

    storage, path = found(arguments.checkpoint)
    plan = plan_of(storage, path)
    check_runs(plan.arch)
    tokenizer = open_tokenizer(arguments.tokenizer or tokenizer_of(storage, path, plan))
    text = _prompt(arguments.prompt)
    prompt = encode_text(tokenizer, text) or [tokenizer.end_of_document]
    if max(prompt) >= plan.arch.vocab:
        raise RequestError(
            f"token {max(prompt)}", f"the model has {plan.arch.vocab}", ("--tokenizer, the model's own",)
        )
    context = plan.arch.max_positions or max(plan.data.sequence_length, 1)
    model = decoder_of(storage, path, plan, device_of("auto"))
    begin = time.perf_counter()
    tokens: list[int] = []
    drawn = generate(
        model,
        prompt,
        arguments.tokens,
        context=min(context, len(prompt) + arguments.tokens),
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=tokenizer.end_of_document,
    )
    if not arguments.json:
        sys.stdout.write(text)
    shown = ""
    try:
        for token in drawn:
            tokens.append(token)
            if not arguments.json:
                shown = _show(tokenizer.decode(tokens), shown)
    except NonfiniteError as error:
        sys.stdout.write("" if arguments.json else "\n")
        print_error(str(error))
        return 1
    seconds = time.perf_counter() - begin
    if arguments.json:
        value = {"prompt": text, "text": tokenizer.decode(tokens), "tokens": tokens, "seconds": seconds}
        print_json({**value, "tokens_per_second": len(tokens) / seconds if seconds else 0.0})
    else:
        sys.stdout.write(tokenizer.decode(tokens)[len(shown) :] + "\n")
    return 0


def _prompt(given: str) -> str:
    """The prompt, from standard input where it is "-". Raises RequestError where it is no text."""
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()
    except UnicodeError:
        raise RequestError(f"--prompt {given!a}", "is not UTF-8", ("text",)) from None
    return text


def _show(text: str, shown: str) -> str:
    """Write what is new of `text`; a character whose bytes have not all come yet waits."""
    whole = text.rstrip("\ufffd")
    if whole.startswith(shown):
        sys.stdout.write(whole[len(shown) :])
        sys.stdout.flush()
        return whole
    return shown


def _seed(text: str) -> int:
    value = request.natural(text)
    if value > _LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LARGEST_SEED}")
    return value


def _number(text: str) -> float:
    value = _read(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return value


def _share(text: str) -> float:
    value = _read(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share above 0, at most 1")
    return value


def _read(text: str) -> float:
    """Not a number where it is none: that lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan
