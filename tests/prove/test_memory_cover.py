"""The memory fold beside the allocator's events in a dry run, over a pairwise cover of whatever changes memory."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.arch.resolve import arch_from_model
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run
from meshwright.parallel.dry_run import dry_run
from meshwright.parallel.support import check_supported
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.testing.models import m0_bytes
from meshwright.testing.pairwise import Row, pairwise

TOLERANCE, AIM = 0.02, 0.01
AXES: dict[str, list[Any]] = {
    "family": ["llama", "gpt2", "qwen3", "mistral"],
    "tied": [False, True],
    "dropout": [0.0, 0.25],
    "precision": ["float32", "bfloat16", "float64"],
    "recompute": ["none", "full", "selective"],
    "accumulation": [3, 1],
    "zero": [0, 1, 2, 3],
    "pipe": ["none", "1f1b", "interleaved", "zb-h1", "zb-v"],
    "tp": [1, 2],
    "sequence": [True, False],
    "ring": [False, True],
    "dp": [2, 1],
    "offload": ["none", "optimizer", "params"],
    "documents": ["packed", "masked"],
    "size": ["tiny", "wide", "long", "vocabulary"],
}
SIZES: dict[str, tuple[int, int, dict[str, int]]] = {
    "tiny": (2, 16, {}),
    "wide": (4, 32, {"hidden": 128, "head_dim": 32, "ffn": 320, "vocab": 515}),
    "long": (4, 96, {"ffn": 160}),
    "vocabulary": (2, 32, {"hidden": 64, "head_dim": 16, "ffn": 128, "vocab": 4100}),
}
"""(sequences of a micro-batch, their length, fields of the model): gradients, states, activations, or the table and
logits are the most."""
OF_FAMILY = {
    "gpt2": {"kv_heads": 4, "max_positions": 96},
    "mistral": {"sliding_window": 9},
    "mixtral": {"experts": 4, "experts_per_token": 2},
    "qwen3_moe": {"experts": 8, "experts_per_token": 3, "expert_ffn": 48, "shared_experts": 1},
}


def plan_of(row: Row) -> Plan:
    """Raises RequestError or NotImplementedError where the combination does not run."""
    micro, length, sizes = SIZES[row["size"]]
    piped = row["pipe"] != "none"
    model = {"layers": 4, "family": row["family"], "tie_embeddings": row["tied"], "dropout": row["dropout"], **sizes}
    run = build_run(
        m0_bytes(
            model=model | OF_FAMILY.get(row["family"], {}),
            data={"sequence_length": length, "documents": row["documents"]},
            mesh={"dp": row["dp"], "tp": row["tp"], "pp": 1 + piped, "ep": row.get("ep", 1)},
            parallel={
                "zero": row["zero"],
                "schedule": row["pipe"] if piped else "1f1b",
                "chunks": 2 if row["pipe"] in ("interleaved", "zb-v") else 1,
                "recompute": row["recompute"],
                "offload": row["offload"],
                "sequence": row["sequence"],
                "asynchronous_tensor": row["ring"],
            },
            batch={"global": micro * row["dp"] * row.get("ep", 1) * row["accumulation"], "micro": micro},
            precision={"compute": row["precision"]},
        )
    )
    plan = resolve(run, arch_from_model(run.model))
    check_supported(plan)
    return plan


def legal(row: Row) -> bool:
    if (row["sequence"] or row["ring"]) and row["tp"] == 1:
        return False
    try:
        plan_of(row)
    except (RequestError, NotImplementedError):
        return False
    return True


EXPERTS: dict[str, list[Any]] = {
    "family": ["mixtral", "qwen3_moe"],
    "tied": [False],
    "dropout": [0.0, 0.25],
    "precision": ["float32", "bfloat16", "float64"],
    "recompute": ["none", "full", "selective"],
    "accumulation": [3, 1],
    "zero": [0, 1, 2, 3],
    "pipe": ["none", "1f1b", "zb-h1", "zb-v"],
    "tp": [1, 2],
    "sequence": [True, False],
    "ring": [False],
    "dp": [2, 1],
    "ep": [2, 4, 1],
    "offload": ["none", "optimizer", "params"],
    "documents": ["packed", "masked"],
    "size": ["tiny", "wide", "long", "vocabulary"],
}
"""The same of models with experts, on an expert axis of each size."""


@pytest.mark.prove
@pytest.mark.parametrize("axes", [AXES, EXPERTS], ids=["dense", "experts"])
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:parallel.asynchronous_tensor gains nothing on CPUs")
def test_the_predicted_peak_is_the_allocators(axes: dict[str, list[Any]]) -> None:
    ratios: dict[str, float] = {}
    for row in pairwise(axes, legal):
        plan = plan_of(row)
        for rank in {0, plan.degrees.ranks - 1}:
            dry = dry_run(plan, rank)
            assert dry.states_equal, row
            assert dry.traffic_equal, row
            ratios[f"rank {rank} of {row}"] = dry.peak_ratio
    off = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE}
    near = sum(abs(ratio - 1) <= AIM for ratio in ratios.values())
    print(f"{len(ratios)} peaks: {min(ratios.values()):.3f} to {max(ratios.values()):.3f}, {near} within {AIM:.0%}")
    assert not off
    assert near >= 0.9 * len(ratios), ratios
