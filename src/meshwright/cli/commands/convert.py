"""``meshwright convert``: configurations of other trainers in and out, each difference in meaning stated."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshwright.cli import request
from meshwright.cli.output import print_json
from meshwright.config.errors import RequestError

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "convert"
HELP = "turn a configuration into another trainer's, and say what means something else there"
EXAMPLES = """\
meshwright convert run.toml --from meshwright --to megatron > args.txt
meshwright convert args.txt --from megatron --to meshwright --ranks 64 > run.toml
meshwright convert ds.json --from deepspeed --to meshwright model.preset=llama3-8b --out run.toml
meshwright convert titan.toml --from torchtitan --to megatron --json"""

_FORMATS = ("meshwright", "megatron", "torchtitan", "deepspeed", "accelerate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the file, both formats, and what the file leaves unsaid."""
    parser.add_argument("file", metavar="FILE", help="the configuration (- reads standard input)")
    parser.add_argument("words", nargs="*", metavar="section.key=value", help="keys that the file leaves unsaid")
    parser.add_argument("--from", dest="source", required=True, choices=_FORMATS, help="the format of FILE")
    parser.add_argument("--to", dest="target", required=True, choices=_FORMATS, help="the format wanted")
    parser.add_argument("--ranks", type=request.positive, metavar="N", help="ranks, where the file does not say")
    parser.add_argument("--out", type=request.writable, metavar="FILE", help="written instead of standard output")


def run(arguments: argparse.Namespace) -> int:
    """Convert; the text on standard output, what it means on standard error; 0."""
    from meshwright.config.whole import write_whole
    from meshwright.price.foreign.convert import convert
    from meshwright.price.foreign.dialect import Format

    path = Path(arguments.file)
    try:
        text = sys.stdin.read() if arguments.file == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise RequestError(arguments.file, f"cannot be read: {reason}") from None
    done = convert(text, Format(arguments.source), Format(arguments.target), tuple(arguments.words), arguments.ranks)
    if arguments.out:
        write_whole(arguments.out, done.text)
    if arguments.json:
        print_json({"text": done.text, "notes": list(done.notes), "lost": list(done.lost)})
        return 0
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    for key in done.lost:
        print(f"lost: {key}", file=sys.stderr)
    if not arguments.out:
        sys.stdout.write(done.text)
    return 0
