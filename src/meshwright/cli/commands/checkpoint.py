"""``meshwright checkpoint show|check|reshard``: look at a checkpoint, prove it whole, rewrite it for another layout."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from meshwright.cli.checkpoints import found, told
from meshwright.cli.output import print_json, print_styled
from meshwright.config.errors import RequestError

if TYPE_CHECKING:
    from meshwright.checkpoint.manifest import Manifest
    from meshwright.checkpoint.storage import Storage

__all__ = ["EXAMPLES", "HELP", "NAME", "add_arguments", "run"]

NAME = "checkpoint"
HELP = "show a checkpoint, check every byte of it, rewrite it for another layout"
EXAMPLES = """\
meshwright checkpoint show runs/demo                       the newest of a run
meshwright checkpoint check runs/demo/checkpoints/step-00000060
meshwright checkpoint reshard runs/demo demo-tp2 mesh.tp=2 mesh.dp=1
meshwright train checkpoint.resume=demo-tp2"""

_WORDS = {"show": "DIR", "check": "DIR", "reshard": "DIR OUT mesh.tp=.. parallel.zero=.."}
_STYLES = {r"(?m)^whole\b": "green", r"(?m)^damaged\b.*$|NOT COMPLETE.*$": "bold red", r"(?m)^name +.*$": "bold"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what to do, the checkpoint, and what that needs."""
    parser.add_argument("action", choices=tuple(_WORDS), help="show, check or reshard")
    parser.add_argument(
        "words", nargs="+", metavar="DIR [OUT section.key=value ...]", help="the checkpoint; reshard: out"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 done; 1 the checkpoint is damaged."""
    words: list[str] = arguments.words
    paths = [word for word in words if "=" not in word]
    wanted = 2 if arguments.action == "reshard" else 1
    if len(paths) != wanted or (wanted == 1 and len(words) > 1):
        usage = f"meshwright checkpoint {arguments.action} {_WORDS[arguments.action]}"
        raise RequestError(" ".join(words), f"{arguments.action} takes {_WORDS[arguments.action]}", (usage,))
    actions = {"show": _show, "check": _check, "reshard": _reshard}
    return told(lambda: actions[arguments.action](paths, [word for word in words if "=" in word], arguments.json))


def _show(paths: list[str], keys: list[str], as_json: bool) -> int:
    from meshwright.checkpoint.folder import load_manifest

    storage, path = found(paths[0])
    manifest = load_manifest(storage, path)
    gone = _gone(storage, path, manifest)
    value = _shown(storage.where(path), manifest, gone)
    if as_json:
        print_json(value)
    else:
        print_styled("\n".join(_lines(storage.where(path), manifest, value, gone)), _STYLES, sys.stdout)
    return 0 if value["complete"] else 1


def _check(paths: list[str], keys: list[str], as_json: bool) -> int:
    from meshwright.checkpoint.check import check_checkpoint

    storage, path = found(paths[0])
    begin = time.perf_counter()
    checked = check_checkpoint(storage, path)
    seconds = time.perf_counter() - begin
    if as_json:
        problems = [problem.fields() for problem in checked.problems]
        step = None if checked.manifest is None else checked.manifest.step
        print_json({"ok": not problems, "step": step, "problems": problems, "seconds": seconds})
    elif checked.problems:
        print_styled("\n".join(f"damaged  {problem}" for problem in checked.problems), _STYLES, sys.stdout)
    elif checked.manifest is not None:
        size, count = checked.manifest.num_bytes, len(checked.manifest.tensors)
        line = f"whole  {storage.where(path)}: {size:,} bytes, {count} tensors, every block and fingerprint as saved"
        print_styled(f"{line} ({seconds:.1f} s)", _STYLES, sys.stdout)
    return 1 if checked.problems else 0


def _reshard(paths: list[str], keys: list[str], as_json: bool) -> int:
    from meshwright.checkpoint.relayout import on_layout
    from meshwright.checkpoint.rewrite import reshard
    from meshwright.train.standalone import plan_of

    storage, path = found(paths[0])
    plan = on_layout(plan_of(storage, path), keys)
    begin = time.perf_counter()
    manifest = reshard(storage, path, paths[1], plan)
    seconds = time.perf_counter() - begin
    if as_json:
        from meshwright.checkpoint.storage import open_storage

        gone = _gone(open_storage(paths[1]), "", manifest)
        print_json({**_shown(paths[1], manifest, gone), "folder": paths[1], "seconds": seconds})
    else:
        print(f"{paths[1]}: step {manifest.step:,}, {manifest.num_bytes:,} bytes for {_mesh_text(paths[1], manifest)}")
    return 0


def _shown(where: str, manifest: Manifest, gone: str) -> dict[str, Any]:
    from meshwright.checkpoint.dtypes import name_of
    from meshwright.checkpoint.plans import layout_from
    from meshwright.layout.fingerprint import shown

    return {
        "step": manifest.step,
        "plan": f"{manifest.math}-{manifest.layout}",
        "mesh": layout_from(manifest.plan, where)[0],
        "complete": not gone,
        "bytes": manifest.num_bytes,
        "samples": manifest.samples,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": name_of(tensor.dtype),
                "fingerprint": shown(tensor.fingerprint),
                "pieces": len(tensor.pieces),
            }
            for tensor in manifest.tensors
        ],
    }


def _gone(storage: Storage, path: str, manifest: Manifest) -> str:
    """The first file that is not there with its size, and why; empty where all are. What they hold is for `check`."""
    from meshwright.checkpoint.errors import DamagedError
    from meshwright.checkpoint.source import checkpoint_source, open_file

    source = checkpoint_source(storage, path, manifest)
    for file in source.files:
        try:
            open_file(source, file).close()
        except DamagedError as error:
            return str(error)
    return ""


def _lines(where: str, manifest: Manifest, value: dict[str, Any], gone: str) -> list[str]:
    rows = [("name", "shape", "dtype", "fingerprint", "pieces")]
    for tensor in value["tensors"]:
        shape = " x ".join(map(str, tensor["shape"])) or "-"
        rows.append((tensor["name"], shape, tensor["dtype"], tensor["fingerprint"], str(tensor["pieces"])))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    state = f"NOT COMPLETE: {gone}" if gone else "complete"
    return [
        f"{where}: step {manifest.step:,}, {manifest.samples:,} samples, {state}",
        f"plan {value['plan']}, saved on {_mesh_text(where, manifest)}",
        f"{manifest.num_bytes:,} bytes in {len(manifest.files)} files, {len(manifest.tensors)} tensors",
        "",
        *table,
    ]


def _mesh_text(where: str, manifest: Manifest) -> str:
    from meshwright.checkpoint.plans import layout_from

    degrees, zero = layout_from(manifest.plan, where)
    axes = [f"{name} {degrees[name]}" for name in ("dp", "tp", "pp", "cp", "ep") if degrees[name] > 1]
    return (" x ".join(axes) or "one process") + (f", ZeRO {zero}" if zero else "")
