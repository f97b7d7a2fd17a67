"""``meshwright export``: a checkpoint of any layout as a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys

from meshwright.cli import request
from meshwright.cli.checkpoints import found, told
from meshwright.cli.output import print_json

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "export"
HELP = "write a checkpoint of any layout as a Hugging Face folder"
EXAMPLES = """\
meshwright export runs/demo demo-hf
meshwright export runs/tuned tuned-hf --dtype bfloat16 --like ./SmolLM2-135M"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint, the folder, and how to write it."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="step folder, `latest`, or run folder (its newest)")
    parser.add_argument("out", metavar="HF_DIR", help="folder to write; must not exist")
    kinds = ("float64", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=kinds, help="type of the weights (without: the master's)")
    parser.add_argument(
        "--like", metavar="DIR", help="take tokenizer, generation settings and token ids from this folder"
    )
    parser.add_argument(
        "--shard-bytes", type=request.positive, metavar="N", help="largest weight file (without: 5,000,000,000)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 done; 1 the checkpoint is damaged."""
    return told(lambda: _export(arguments))


def _export(arguments: argparse.Namespace) -> int:
    from meshwright.checkpoint.dtypes import NAMES
    from meshwright.checkpoint.huggingface.convert import export_checkpoint
    from meshwright.checkpoint.huggingface.write import SHARD_BYTES

    storage, path = found(arguments.checkpoint)
    done = export_checkpoint(
        storage,
        path,
        arguments.out,
        dtype=NAMES[arguments.dtype] if arguments.dtype else None,
        like=arguments.like,
        shard_bytes=arguments.shard_bytes or SHARD_BYTES,
    )
    if done.left_out:
        print(
            f"left out: biases of {len(done.left_out)} routers, for this family has no place for them; "
            "without them some tokens go to other experts",
            file=sys.stderr,
        )
    if arguments.json:
        value = {"folder": arguments.out, "tensors": done.tensors, "bytes": done.num_bytes, "files": list(done.files)}
        print_json(value | ({"left_out": list(done.left_out)} if done.left_out else {}))
    else:
        print(f"{arguments.out}: {done.tensors} tensors, {done.num_bytes:,} bytes in {len(done.files)} files")
    return 0
