"""Published runs as requests: the words one would type to price a row, with everything the row leaves unsaid as data.

The model never reads where a run comes from. What a stack was (kernels, host, release) is an explicit input; this
file states it for each publication, from the publication's own text. Facts of the rows carry their source.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_CLUSTERS = {
    "A100-80GB-SXM": "a100-80gb-sxm",
    "A100-40GB-SXM": "a100-40gb-sxm",
    "H100-80GB-SXM": "h100-sxm",
    "H100-96GB-HBM2e(500W,2.4TB/s)": "h100-sxm",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "B200-SXM": "b200-sxm",
    "B300-SXM": "b300-sxm",
    "V100-32GB-SXM3(DGX-2)": "v100-32gb-sxm",
}

_STACKS = {  # beginning of the id: attention, elementwise, host
    "narayanan21": ("unfused", "fused", "legacy"),
    "korthikanti22": ("unfused", "fused", "legacy"),
    "megatron20": ("unfused", "fused", "legacy"),
    "bloom": ("unfused", "fused", "legacy"),
    "nanotron": ("flash2", "eager", "legacy"),
    "titan": ("flash2", "fused", "modern"),
    "mpt": ("triton", "eager", "modern"),
    "bridge": ("flash3", "fused", "modern"),
    "nemo2407": ("flash3", "fused", "modern"),
    "moezoo": ("flash3", "fused", "modern"),
}

_DROPOUT = ("narayanan21", "korthikanti22", "megatron20")
"""The default of their scripts, whose masks the count of activations of arXiv:2205.05198 holds; others have none."""


@cache
def rows(tier: str = "core") -> tuple[Row, ...]:
    """The rows of one tier."""
    text = (Path(__file__).parent / "published.jsonl").read_text()
    return tuple(row for row in map(json.loads, text.splitlines()) if row["tier"] == tier)


def source(row: Row) -> str:
    """The publication a row belongs to."""
    name = str(row["id"]).split("-")[0]
    return {"megatron20": "megatron 2020", "bloom": "bloom"}.get(name, name)


def words(row: Row, recompute: str | None = None, share: float = 1.0) -> list[str]:
    """`meshwright estimate` and these words price the row. `recompute` fills what a row does not state."""
    out = [*_model(row), *_mesh(row), *_precision(row), *_software(row), *_fabric(row)]
    said = row["recompute"] or recompute or "none"
    kind = "selective" if said.startswith("selective") else said
    if said == "selective(op SAC)":  # torchtitan: every other product is kept, everything else runs again
        kind, share = "full", 0.6
    out.append(f"parallel.recompute={kind}")
    if share < 1:
        out.append(f"cluster.software.share={share}")
    return ["--cluster", _CLUSTERS[row["gpu"]], "--gpus", str(row["gpus"]), *out]


def _model(row: Row) -> Iterator[str]:
    model = row["model"]
    sliding = str(model["name"]).startswith("gpt-oss")
    experts = model.get("experts")
    latent = model.get("attention") == "MLA"
    family = "bloom" if str(model["name"]).startswith("BLOOM") else "gpt2"
    if model["gated_mlp"]:
        family = "deepseek_v3" if latent else "qwen3_moe" if experts else "llama"
    if latent:
        yield "model.preset=deepseek-v3"
        yield f"data.sequence_length={model['seq']}"
        return
    yield f"model.family={family}"
    yield f"model.layers={model['layers']}"
    yield f"model.hidden={model['hidden']}"
    yield f"model.heads={model['heads']}"
    yield f"model.kv_heads={model['kv_heads']}"
    if model.get("head_dim"):
        yield f"model.head_dim={model['head_dim']}"
    yield f"model.ffn={model['ffn_hidden']}"
    yield f"model.vocab={model['vocab']}"
    yield f"data.sequence_length={model['seq']}"
    if family == "gpt2":
        yield f"model.max_positions={model['seq']}"
    if str(row["id"]).startswith(_DROPOUT):
        yield "model.dropout=0.1"
    if family == "llama" and model.get("tied"):
        yield "model.tie_embeddings=true"
    if experts:
        yield f"model.experts={experts}"
        yield f"model.experts_per_token={model['top_k']}"
        yield f"model.expert_ffn={model['moe_ffn_hidden']}"
    if sliding:
        yield "model.qk_norm=false"


def _mesh(row: Row) -> Iterator[str]:
    layout = row["layout"]
    ep = min(layout["ep"], layout["dp"])  # ours is a factor of its own: their dp holds it
    yield f"mesh.dp={layout['dp'] // ep}"
    for axis in ("tp", "pp", "cp"):
        yield f"mesh.{axis}={layout[axis]}"
    yield f"mesh.ep={ep}"
    yield f"parallel.sequence={str(bool(layout['sp'])).lower()}"
    yield f"parallel.zero={layout['zero_stage']}"
    if layout["vpp"] > 1:
        yield "parallel.schedule=interleaved"
        yield f"parallel.chunks={layout['vpp']}"
    if "asyncTP" in row["id"]:
        yield "parallel.asynchronous_tensor=true"
    micro = row["micro_batch"]
    if micro is None:  # torchtitan's default at that time: as many micro-batches as stages
        micro = max(1, row["global_batch"] // (layout["dp"] * layout["pp"]))
    yield f"batch.micro={micro}"
    yield f"batch.global={row['global_batch'] or micro * layout['dp'] * layout['pp']}"
    if row["id"].startswith("nanotron"):
        return  # balances by the cost of blocks and head, as "balanced" does
    stages = stage_map(row["model"]["layers"], layout["pp"], layout["vpp"])
    if stages:
        yield f"parallel.stages={stages}"


def stage_map(layers: int, pp: int, chunks: int) -> list[int] | None:
    """The stacks' own map: even; or the embedding and the head in the place of a block; None where that leaves none."""
    parts = pp * chunks
    if pp == 1:
        return None
    if layers % parts == 0:
        return [layers // parts] * parts
    if (layers + 2) % parts == 0:
        share = (layers + 2) // parts
        return [share - 1, *[share] * (parts - 2), share - 1] if share > 1 else None
    least, more = divmod(layers, parts)
    return [least + 1] * more + [least] * (parts - more) if least else None


def _precision(row: Row) -> Iterator[str]:
    said = str(row["precision"]).lower()
    if "fp8" in said or "float8" in said or "fp4" in said:
        yield "precision.compute=float8"
        if "fp4" in said:
            yield "cluster.software.products=float4"
    else:
        yield f"precision.compute={'float16' if said == 'fp16' else 'bfloat16'}"
    if said == "fp16":
        yield "precision.reduce=float16"
    elif "pure" in said:
        yield "precision.reduce=bfloat16"
    yield "precision.master=float32"


def _software(row: Row) -> Iterator[str]:
    name = str(row["id"]).split("-")[0]
    for key, value in zip(("attention", "elementwise", "host"), _STACKS[name], strict=True):
        yield f"cluster.software.{key}={value}"
    if name == "bridge":
        yield f'cluster.software.release="{row["id"].split("-")[1]}"'


def _fabric(row: Row) -> Iterator[str]:
    gpu, links = row["gpu"], row["interconnect"]
    if gpu.startswith("H100-96GB"):  # its own text: 500 W, 96 GB, 2.4 TB/s
        yield "cluster.device.memory_bytes=102e9"
        yield "cluster.device.memory_bytes_per_s=2.4e12"
        yield "cluster.device.power_w=500"
    if gpu.startswith("V100"):
        yield "cluster.node.devices=16"
    if links.get("note", "").startswith("4x Omni-Path"):
        # One ring over 4 x 8 GPUs reaches 5 GB/s through one of the node's four adapters (bigscience
        # experiments/bandwidth): a device's share of the node lies between 0.63 and 2.5 GB/s. 0.12 of nominal is used.
        yield "cluster.network.bytes_per_s=6.25e9"
        yield "cluster.network.measured_bytes_per_s=0.75e9"
    elif links.get("ib_gbps_per_gpu"):
        yield f"cluster.network.bytes_per_s={links['ib_gbps_per_gpu'] / 8}e9"
