"""What the price model is worth: published runs, agreement with the simulated program, speed. Writes docs/pricing.md.

    python -m benchmarks.price                 print every table
    python -m benchmarks.price --write         replace the tables in docs/pricing.md
    python -m benchmarks.price --points 1000   random layouts for the agreement (slow: about 0.1 s each)
    python -m benchmarks.price --only speed    one table; agreement and speed are kept in benchmarks/results/price.json
    python -m benchmarks.price --json FILE     tables and figures there, and nothing kept

Run in the repository's root. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.price.constants import CONSTANTS, Kind
from meshwright.price.estimate import estimate
from meshwright.price.layouts import Layouts, layouts
from meshwright.price.simulate import simulated
from tests.unit.price import fitting, published
from tests.unit.price.ask import ask
from tests.unit.price.test_agreement import points
from tests.unit.price.test_published import memory_error

RESULTS = Path(__file__).parent / "results" / "price.json"
DOCS = Path(__file__).parents[1] / "docs" / "pricing.md"

REAL = (
    ("GPT-3 175B", "a100-80gb-sxm", ("model.preset=gpt3-175b", "data.sequence_length=2048", "mesh.tp=8", "mesh.pp=64",
     "mesh.dp=96", "batch.micro=1", "batch.global=3072", "parallel.recompute=full", "precision.compute=float16",
     "precision.reduce=float16")),
    ("Llama 70B, ZeRO-1", "h100-sxm", ("model.preset=llama3-70b", "data.sequence_length=8192", "mesh.tp=8", "mesh.pp=8",
     "mesh.dp=64", "batch.micro=1", "batch.global=2048", "parallel.zero=1", "precision.compute=bfloat16")),
    ("Llama 7B, ZeRO-1", "h100-sxm", ("model.preset=llama2-7b", "data.sequence_length=4096", "mesh.dp=128",
     "batch.micro=1", "batch.global=1024", "parallel.zero=1", "precision.compute=bfloat16")),
    ("Llama 3 405B, 16,384 devices", "h100-sxm", ("model.preset=llama3.1-405b", "data.sequence_length=8192",
     "mesh.tp=8", "mesh.pp=16", "mesh.dp=128", "batch.micro=1", "batch.global=2048", "parallel.zero=2",
     "precision.compute=bfloat16", "parallel.recompute=selective", "parallel.schedule=interleaved",
     "parallel.chunks=8")),
    ("BLOOM 176B", "a100-80gb-sxm", ("model.preset=bloom-176b", "data.sequence_length=2048", "mesh.tp=4",
     "mesh.pp=12",
     "mesh.dp=8", "batch.micro=2", "batch.global=2048", "parallel.zero=1", "parallel.recompute=full",
     "parallel.sequence=false", "precision.compute=bfloat16", f"parallel.stages={[5] + [6] * 10 + [5]}",
     "cluster.software.attention=unfused", "cluster.software.host=legacy", "cluster.network.bytes_per_s=6.25e9",
     "cluster.network.measured_bytes_per_s=0.75e9")),
    ("Nemotron-4 340B", "h100-sxm", ("model.family=llama", "model.layers=96", "model.hidden=18432", "model.heads=96",
     "model.kv_heads=8", "model.ffn=49152", "model.vocab=256000", "data.sequence_length=4096", "mesh.tp=8",
     "mesh.pp=12", "mesh.dp=64", "batch.micro=1", "batch.global=2304", "parallel.zero=1", "precision.compute=bfloat16",
     "parallel.schedule=interleaved", "parallel.chunks=8")),
)  # fmt: skip
"""Layouts as their authors describe them; batch sizes and types where they state them."""


PRIORITY = "real-time" if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR) else "usual"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def spread(errors: np.ndarray) -> str:
    size = np.abs(errors)
    return f"{100 * np.median(size):.1f} / {100 * np.quantile(size, 0.9):.1f}"


def runs() -> Iterator[str]:
    """Step times by publication."""
    left, base = fitting.left_out(), np.exp(fitting.slopes()[0]) - 1
    sources = np.array([published.source(one.row) for one in fitting.cases()])
    experts = np.array([bool(one.row["model"].get("experts")) for one in fitting.cases()])
    out = np.empty_like(base)
    for name, errors in left.items():
        out[sources == name] = errors
    groups = {name: sources == name for name in left}
    groups |= {"**all**": base == base, "**dense**": ~experts, "**with experts**": experts}
    rows = [
        (name, str(np.sum(which)), spread(out[which]), f"{100 * np.median(out[which]):+.1f}", spread(base[which]))
        for name, which in groups.items()
    ]
    yield from table(("publication", "runs", "left out", "signed", "shipped"), rows)
    within = np.mean(np.abs(out[~experts]) <= 0.2)
    yield ""
    yield f"{100 * within:.0f} % of dense runs lie within 20 % when left out."
    other = [fitting.case(row) for row in published.rows("bulk") if row["model"].get("attention") != "hybrid linear"]
    unseen = np.exp(fitting.errors([one for one in other if one.row["measured"].get("iter_time_s")])) - 1
    yield f"Of {len(unseen)} further runs in the same file, in no fit: {spread(unseen)} %."


def memory() -> Iterator[str]:
    """Memory by publication and kind."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in published.rows():
        if row["measured"].get("memory_gb"):
            kind = "device (nvidia-smi)" if "nvidia-smi" in row["measured"]["memory_kind"] else "reserved (torch)"
            found.setdefault((published.source(row), kind), []).append(memory_error(fitting.case(row)))
    rows = [(name, kind, str(len(errors)), spread(np.array(errors)), f"{100 * np.median(errors):+.1f}")
            for (name, kind), errors in found.items()]  # fmt: skip
    every = np.array([error for errors in found.values() for error in errors])
    rows.append(("**all**", "", str(len(every)), f"**{spread(every)}**", f"{100 * np.median(every):+.1f}"))
    yield from table(("publication", "kind", "runs", "error", "signed"), rows)


def constants() -> Iterator[str]:
    """The fitted ones, and how many of the others there are."""
    fitted = [each for each in CONSTANTS.values() if each.kind is Kind.FITTED]
    priors = fitting.PRIORS
    known = {name: f"{value:g} ± {100 * width:.0f} %" for name, (value, width) in priors.items()}
    rows = [
        (f"`{each.name}`", f"{each.value:g}", known[each.name], each.source.replace(", docs/pricing.md", ""))
        for each in fitted
    ]
    yield from table(("constant", "fitted", "known before", "from"), rows)
    count = {kind: sum(each.kind is kind for each in CONSTANTS.values()) for kind in Kind}
    yield ""
    yield f"Besides: {count[Kind.MEASURED]} measured by others, {count[Kind.PRIOR]} orders of magnitude."


def real() -> Iterator[str]:
    """Well-known runs."""
    rows = []
    for name, cluster, words in REAL:
        price = ask(*words, cluster=cluster)
        time, memory = price.to_json()["time"], price.memory
        degrees = price.plan.degrees
        mesh = " ".join(f"{axis.value}{degrees.on(axis)}" for axis in degrees.order if degrees.on(axis) > 1)
        low, high = price.to_json()["range"]
        rows.append((name, f"{degrees.ranks} {price.cluster.device.name}", mesh, f"{price.step_seconds:.2f}",
                     f"{low:.1f}-{high:.1f}", f"{100 * time['mfu']:.0f} %", f"{time['model_tflops_per_gpu']:.0f}",
                     f"{100 * time['bubble'] / price.step_seconds:.0f} %", f"{memory['reserved'] / 1e9:.0f}",
                     "yes" if price.fits else "no"))  # fmt: skip
    yield from table(("run", "devices", "mesh", "step, s", "range, s", "MFU", "TFLOP/s a device", "bubble",
                      "reserved, GB", "fits"), rows)  # fmt: skip


def agreement(count: int, figures: dict[str, Any]) -> Iterator[str]:
    """Closed forms against the simulated program on random layouts: where they are used, and everywhere."""
    rows, kept = [], {}
    for zeros in ((0, 1), (2, 3)):
        found, used = [], []
        for words in points(count // 2, zeros, seed=1):
            price = ask(*words)
            exact = simulated(price.plan, price.cluster).step_seconds
            found.append(abs(float(price.estimates.times.step[0]) / exact - 1))
            used.append(price.simulated_because is None)
        every, inside = np.array(found), np.array(found)[np.array(used)]
        name = f"ZeRO-{zeros[0]}, {zeros[1]}"
        for told, some in ((f"{name}, closed form used", inside), (f"{name}, all", every)):
            rows.append((told, str(len(some)), f"{100 * np.median(some):.2f} %",
                         f"{100 * np.mean(some <= 0.01):.1f} %", f"{100 * max(some):.1f} %"))  # fmt: skip
            kept[told] = {"layouts": len(some), "within_1_percent": float(np.mean(some <= 0.01)), "worst": max(some)}
    figures["agreement"] = kept
    yield from table(("", "layouts", "median", "within 1 %", "worst"), rows)


def keep(figures: dict[str, Any]) -> None:
    """Beside the other results."""
    every = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(every | figures, indent=1) + "\n")


def speed(figures: dict[str, Any]) -> Iterator[str]:
    """Layouts a second on one core, best of three, processor time."""
    target = ask("model.preset=gpt3-175b", "data.sequence_length=2048", "mesh.dp=1", "batch.global=8", "batch.micro=1",
                 "precision.compute=bfloat16", cluster="h100-sxm").target  # fmt: skip
    many = million()
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        estimate(target, many)
        seconds.append(time.process_time() - begin)
    figures["speed"] = {
        "layouts": len(many), "processor_seconds": min(seconds), "cores": 1, "best_of": len(seconds),
        "layouts_per_second": round(len(many) / min(seconds)), "priority": PRIORITY,
    }  # fmt: skip
    yield f"1,000,000 layouts of 4,096 devices: {min(seconds):.2f} s, {len(many) / min(seconds):,.0f} a second."


def million() -> Layouts:
    draw, count = np.random.default_rng(0), 1_000_000
    tp, pp, cp = 2.0 ** draw.integers(0, 4, count), 2.0 ** draw.integers(0, 6, count), 2.0 ** draw.integers(0, 3, count)
    dp, micro = 4096 / (tp * pp * cp), 2.0 ** draw.integers(0, 4, count)
    sequences = dp * micro * 2.0 ** draw.integers(0, 5, count)
    return layouts(
        96, dp=dp, tp=tp, pp=pp, cp=cp, micro=micro, sequences=sequences, zero=draw.integers(0, 4, count),
        recompute=draw.integers(0, 3, count), sequence=tp > 1,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/pricing.md")
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="runs memory constants real agreement speed")
    parser.add_argument("--points", type=int, default=200, metavar="N", help="random layouts for the agreement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tables and figures there, and keep nothing")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    tables: dict[str, str] = {}
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "runs": runs, "memory": memory, "constants": constants, "real": real,
        "agreement": lambda: agreement(arguments.points, figures), "speed": lambda: speed(figures),
    }  # fmt: skip
    for name, part in parts.items():
        if arguments.only and name not in arguments.only:
            continue
        lines = tables[name] = "\n".join(part())
        print(f"{name}\n{lines}\n", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"tables": tables, "figures": figures}, indent=1) + "\n")
        elif name in figures:
            keep(figures)
        if arguments.write:
            text, block = DOCS.read_text(), _block(name)
            DOCS.write_text(block.sub(lambda match, lines=lines: f"{match[1]}{lines}{match[3]}", text))


def told(name: str) -> str:
    """A table as docs/pricing.md has it."""
    found = _block(name).search(DOCS.read_text())
    assert found is not None, name
    return found[2]


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)


if __name__ == "__main__":
    main()
