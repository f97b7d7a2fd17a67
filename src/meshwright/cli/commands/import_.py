"""``meshwright import``: a Hugging Face folder as a checkpoint."""

from __future__ import annotations

import argparse

from meshwright.cli.checkpoints import told
from meshwright.cli.output import print_json

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "import"
HELP = "turn a Hugging Face folder (config.json, safetensors) into a checkpoint"
EXAMPLES = """\
meshwright import ./SmolLM2-135M smollm
meshwright generate smollm --prompt "The capital of France is"
meshwright train model.hf=./SmolLM2-135M model.weights=load      trains from it without an import"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take both folders."""
    parser.add_argument("folder", metavar="HF_DIR", help="folder with config.json and safetensors files")
    parser.add_argument("out", metavar="OUT", help="checkpoint folder to write; must not exist")


def run(arguments: argparse.Namespace) -> int:
    """0 done; 1 a file is damaged."""
    return told(lambda: _import(arguments))


def _import(arguments: argparse.Namespace) -> int:
    from meshwright.checkpoint.huggingface.convert import import_checkpoint

    manifest = import_checkpoint(arguments.folder, arguments.out)
    if arguments.json:
        tensors, size = len(manifest.tensors), manifest.num_bytes
        print_json(
            {"folder": arguments.out, "family": manifest.plan["arch"]["family"], "tensors": tensors, "bytes": size}
        )
    else:
        family, count = manifest.plan["arch"]["family"], len(manifest.tensors)
        print(f"{arguments.out}: a {family} of {count} tensors, {manifest.num_bytes:,} bytes")
    return 0
