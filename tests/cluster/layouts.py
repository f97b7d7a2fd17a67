"""Layouts of four ranks on two nodes of two: all that a small model can run, and which of them a commit draws."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product
from math import prod
from pathlib import Path
from typing import Any

from meshwright.arch.resolve import arch_from_model
from meshwright.config.load import build_run
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve

MODEL = {"family": "llama", "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 704, "vocab": 257}
LINK_BYTES_PER_S = 50e6  # a step of four ranks computes for 0.3 s and sends 5 to 80 MB over it
DRAWN, NEAR = 12, 0.15

Tables = dict[str, Any]

_AXES = "pp", "dp", "cp", "tp"


def tables(micro: int = 2, order: Sequence[str] = ("pp", "dp", "ep", "cp", "tp"), **keys: Any) -> Tables:
    """A run of the model; `keys` are degrees, or keys of [parallel]."""
    mesh = {axis: keys.pop(axis, 1) for axis in _AXES}
    return {
        "name": "two-nodes",
        "model": MODEL,
        "data": {"sequence_length": 256},
        "mesh": mesh | {"order": list(order)},
        "parallel": {"zero": 0} | keys,
        "batch": {"global": 8, "micro": micro},
        "train": {"steps": 8, "device": "cpu", "eval_every": 0},
        "checkpoint": {"resume": "none"},
    }


def plan_of(run: Tables) -> Plan:
    """Its plan. Raises RequestError for a layout that is none."""
    built = build_run(run)
    return resolve(built, arch_from_model(built.model))


def pool() -> list[Tables]:
    """Every mesh of four ranks, whichever axis reaches across, with the ways of each axis."""
    return [each for mesh in _meshes() for order in _orders(mesh) for each in _ways(mesh, order)]


def drawn(seed: str, seconds: Sequence[float]) -> list[int]:
    """Twelve of the pool by a seed, at least four pairs of them planned within 15 % of each other."""
    for attempt in range(1000):
        chosen = random.Random(f"{seed}-{attempt}").sample(range(len(seconds)), DRAWN)
        if near([seconds[index] for index in chosen]) >= 4:
            return chosen
    raise AssertionError("no draw has four near pairs")


def near(seconds: Sequence[float]) -> int:
    """How many pairs are within 15 % of each other."""
    return sum(max(pair) <= (1 + NEAR) * min(pair) for pair in combinations(seconds, 2))


def commit() -> str:
    """The hash that draws; where there is no repository, a constant."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no repository"


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau (1938): pairs in the same order less pairs in the other, over all."""
    pairs = list(combinations(range(len(first)), 2))
    signs = [(first[i] - first[j]) * (second[i] - second[j]) for i, j in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(pairs)


def _meshes() -> Iterator[dict[str, int]]:
    for degrees in product((1, 2, 4), repeat=len(_AXES)):
        if prod(degrees) == 4:
            yield dict(zip(_AXES, degrees, strict=True))


def _orders(mesh: dict[str, int]) -> Iterator[tuple[str, ...]]:
    active = [axis for axis in _AXES if mesh[axis] > 1]
    for order in permutations(active):
        yield (*order, *(axis for axis in ("pp", "dp", "ep", "cp", "tp") if axis not in active))


def _ways(mesh: dict[str, int], order: tuple[str, ...]) -> Iterator[Tables]:
    micros = (1,) if mesh["pp"] > 1 else (1, 2)
    schedules = ("1f1b", "gpipe") if mesh["pp"] > 1 else ("1f1b",)
    replicas = mesh["dp"] * mesh["cp"]
    zeros = (0, 1, 2, 3) if replicas > 1 and mesh["pp"] == 1 else (0, 1) if replicas > 1 else (0,)
    sequences = (True, False) if mesh["tp"] > 1 else (True,)
    contexts = ("ring", "allgather", "ulysses") if mesh["cp"] > 1 else ("ring",)
    for micro, schedule, zero, sequence, context in product(micros, schedules, zeros, sequences, contexts):
        yield tables(micro, order, **mesh, schedule=schedule, zero=zero, sequence=sequence, context=context)
