"""What a rank needs beside its own pieces: at most 64 MiB at save, load, export and offline reshard, measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
BOUND = 64 * MIB

# Runs in a process of its own: VmHWM is the largest resident size since it was last reset.
_PROGRAM = """
import gc, re, sys, torch
from dataclasses import replace
from pathlib import Path
from meshwright.arch.arch import Arch
from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.held import masters
from meshwright.checkpoint.huggingface.convert import export_checkpoint
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.relayout import on_layout
from meshwright.checkpoint.rewrite import reshard
from meshwright.checkpoint.saver import Progress, Saver
from meshwright.checkpoint.state import total_bytes
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Precision
from tests.ranks.checkpoint.layouts import LAYOUTS

MIB = 1 << 20
root = Path(sys.argv[1])
arch = Arch("llama", 1, 1024, 8, 4, 128, 2816, 16384, tie_embeddings=True)
base = LAYOUTS[0].plan
plan = replace(base, arch=arch, precision=Precision(), pipeline=replace(base.pipeline, stages=(1,)))

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def extra(action):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return (status("VmHWM") - before) / MIB

engine = Engine(plan, Mesh(1).start())
for store in engine.stores:
    store.whole.add_(0.0); [s.add_(0.0) for run in store.runs for s in run.state]   # every page is there
own = total_bytes(plan) / MIB
print("own", own)
print("tensor", max(piece.rectangle.numel * 4 for piece in masters(engine)) / MIB)
Saver(engine, root / "warm", asynchronous=False, side=Side()).save(Progress(1, 1))     # imports, threads
print("save", extra(lambda: Saver(engine, root / "run", asynchronous=False, side=Side()).save(Progress(1, 1))))
def in_background():
    saver = Saver(engine, root / "run", asynchronous=True, side=Side())
    saver.save(Progress(2, 2)); saver.wait()
print("asynchronous", extra(in_background) - own)
gc.collect()
print("load", extra(lambda: load(engine, root / "run", Side())))
storage, path = find_checkpoint(root / "run")
cut = on_layout(plan, ["mesh.dp=4", "mesh.tp=2", "parallel.zero=3", "batch.micro=1"])
print("reshard", extra(lambda: reshard(storage, path, root / "cut", cut)))
print("check", extra(lambda: check_checkpoint(*find_checkpoint(root / "cut"))))
print("export", extra(lambda: export_checkpoint(*find_checkpoint(root / "cut"), root / "hf")))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's measure of peak memory")
@pytest.mark.timeout(300)
def test_extra_memory_is_bounded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    own, tensor = figures.pop("own"), figures.pop("tensor")
    assert own > 300, "the state must be far larger than the bound"
    assert tensor * MIB >= BOUND, "a whole tensor in memory, beside what is needed anyhow, must break the bound"
    assert len(figures) == 6
    assert all(value * MIB <= BOUND for value in figures.values()), figures
    print(own, figures)
