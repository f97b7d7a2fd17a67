"""The memory fold beside dry runs of layouts of real sizes, drawn at random: every option with every other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run
from meshwright.parallel.dry_run import dry_run
from meshwright.parallel.support import check_supported
from meshwright.plan.folds.traffic import Transport
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.price.folded import steady

TOLERANCE = 0.005
DRAWS, MOST_ACTIONS = 24, 120
ROUTED = ("mixtral", "qwen3_moe")
FAMILIES = ("llama", "gpt2", "qwen3", "mistral", *ROUTED)


def drawn(draw: random.Random, families: Sequence[str] = FAMILIES) -> list[str]:
    """The words of one run; of families with experts alone, on an expert axis too."""
    one = draw.choice
    family, pp, tp, dp = one(families), one([1, 2, 3, 4]), one([1, 2, 4, 8]), 2
    schedule = one(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]) if pp > 1 else "1f1b"
    chunks = {"interleaved": 2, "zb-v": 2}.get(schedule, 1)
    micro, sequence, hidden = one([1, 2, 4]), one([1024, 2048, 4096, 8192]), one([1024, 2048, 4096])
    micros = {"interleaved": pp, "zb-v": 2 * pp + 1}.get(schedule, one([1, pp, pp + 1]))
    values: dict[str, Any] = {
        "model.family": family, "model.layers": pp * chunks, "model.hidden": hidden, "model.heads": 32,
        "model.head_dim": one([64, 128]), "model.ffn": hidden * one([1, 3, 4]), "model.vocab": one([32000, 128256]),
        "model.tie_embeddings": one(["true", "false"]), "model.dropout": one([0.0, 0.0, 0.1]),
        "mesh.dp": dp, "mesh.tp": tp, "mesh.pp": pp, "parallel.zero": one([0, 1, 2, 3]),
        "parallel.schedule": schedule, "parallel.chunks": chunks,
        "parallel.recompute": one(["none", "selective", "full"]), "parallel.offload": one(["none", "optimizer"]),
        "parallel.sequence": one(["true", "false"]) if tp > 1 else "false",
        "data.sequence_length": sequence, "data.documents": one(["packed", "masked"]), "batch.micro": micro,
        "batch.global": dp * micro * micros, "precision.compute": one(["bfloat16", "float16", "float32"]),
    }  # fmt: skip
    values |= {"model.max_positions": sequence} if family == "gpt2" else {"model.kv_heads": one([8, 16, 32])}
    if family == "mistral":
        values["model.sliding_window"] = one([512, 4096])
    if family in ROUTED:
        values |= {"model.experts": 8, "model.experts_per_token": one([1, 2, 4]), "model.shared_experts": one([0, 1])}
    if family == "qwen3_moe":
        values["model.expert_ffn"] = hidden // 2
    if families is ROUTED:
        values["mesh.ep"] = one([2, 4, 8])
        values["batch.global"] *= values["mesh.ep"]
    return [f"{name}={value}" for name, value in values.items()]


def plans(seed: int, families: Sequence[str]) -> list[tuple[list[str], Plan]]:
    """As many that run, and are dry-run in seconds."""
    draw, found = random.Random(seed), []
    while len(found) < DRAWS:
        words = drawn(draw, families)
        try:
            run = load_run(None, words)
            plan = steady(resolve(run, arch_from_model(run.model)))
            check_supported(plan)
        except RequestError:
            continue
        if plan.arch.num_units * plan.accumulation <= MOST_ACTIONS:
            found.append((words, plan))
    return found


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("families", [FAMILIES, ROUTED], ids=["all", "experts on several ranks"])
def test_a_drawn_layout_takes_what_was_foretold(families: Sequence[str]) -> None:
    ratios: dict[str, float] = {}
    for words, plan in plans(10, families):
        for rank in sorted({0, plan.degrees.ranks - 1}):
            dry = dry_run(plan, rank, transport=Transport.NCCL)
            assert dry.states_equal, words
            assert dry.traffic_equal, words
            ratios[f"rank {rank} of {' '.join(words)}"] = dry.peak_ratio
    print(f"{len(ratios)} peaks: {min(ratios.values()):.4f} to {max(ratios.values()):.4f}")
    assert not {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE}
