"""Megatron-LM arguments: `--name value` words, as in `megatron/training/arguments.py` (core 0.15)."""

from __future__ import annotations

from meshwright.price.foreign.arguments import argument_number, arguments
from meshwright.price.foreign.dialect import Dialect, Format, Keys, Reading, Source, check_spoken, refuse, unread
from meshwright.price.foreign.megatron_layout import LAYOUT_ARGUMENTS, layout_words, read_degrees, read_layout
from meshwright.price.foreign.megatron_model import MODEL_ARGUMENTS, model_words, read_model, whole_argument
from meshwright.price.foreign.megatron_training import TRAINING_ARGUMENTS, read_training, training_words

__all__ = ["DIALECT"]

_NUMBERS = {**MODEL_ARGUMENTS, **LAYOUT_ARGUMENTS, **TRAINING_ARGUMENTS}
_WHOLE = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
          "expert-model-parallel-size", "num-virtual-stages-per-pipeline-rank", "num-layers", "hidden-size",
          "num-attention-heads", "num-experts", "ffn-hidden-size", "moe-ffn-hidden-size", "kv-channels")  # fmt: skip
_READ = {
    "sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2",
    "zero-stage", "swiglu", "disable-bias-linear", "group-query-attention", "untie-embeddings-and-output-weights",
    "add-qkv-bias", "qk-layernorm", "embed-layernorm", "bf16", "fp16", "accumulate-allreduce-grads-in-fp32",
    "calculate-per-token-loss", "tp-comm-overlap", "optimizer-cpu-offload", "optimizer-offload-fraction",
    "cpu-optimizer", "use-tp-pp-dp-mapping", "position-embedding-type", "use-rotary-position-embeddings",
    "normalization", "num-query-groups", "max-position-embeddings", "lr-decay-style", "optimizer", "adam-beta1",
    "adam-beta2", "recompute-granularity", "recompute-activations", "recompute-method", "recompute-num-layers",
    "recompute-modules", "checkpoint-activations", "cp-comm-type", "hierarchical-context-parallel-sizes",
    "ds-sequence-parallel-size", "data-parallel-sharding-strategy", "expert-tensor-parallel-size",
    "num-layers-per-virtual-pipeline-stage", "num-distributed-optimizer-instances", "pipeline-model-parallel-layout",
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "train-samples", "lr-warmup-samples", "lr-warmup-fraction", "lr-decay-iters",
    "lr-decay-samples", "lr-warmup-init", "fp8-format", "grad-reduce-in-bf16", "sgd-momentum", "attention-dropout",
    "rampup-batch-size", "use-rope-scaling", "rope-scaling-factor", "rotary-percent", "make-vocab-size-divisible-by",
    "moe-router-load-balancing-type", "moe-router-enable-expert-bias", "moe-expert-capacity-factor",
    "moe-shared-expert-intermediate-size", "moe-layer-freq", "moe-router-score-function", "softmax-type",
    "moe-expert-parallel-size", "train-tokens", "lr-warmup-tokens", "lr-decay-tokens",
    "no-position-embedding", "pp-partition-method", "pad-vocab-size-to",
}  # fmt: skip
"""Read one by one, or refused where they mean anything."""

_SAME = {
    "overlap-grad-reduce", "overlap-param-gather", "overlap-param-gather-with-optimizer-step", "use-flash-attn",
    "use-mcore-models", "attention-backend", "no-masked-softmax-fusion", "transformer-impl", "distributed-backend",
    "attention-softmax-in-fp32", "moe-token-dispatcher-type", "moe-grouped-gemm", "moe-permute-fusion",
    "no-create-attention-mask-in-dataloader", "cross-entropy-loss-fusion", "no-gradient-accumulation-fusion",
    "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion", "no-rope-fusion",
}  # fmt: skip
"""Kernels and what overlaps: the same step."""


def _read(text: str, started: int | None = None) -> Reading:
    found = arguments(text)
    given, ranks = found.given, found.ranks or started or 0
    known = {*_NUMBERS, *_READ, *_SAME}
    spoken = [f"--{name}" for name in (*_NUMBERS, *sorted(known - set(_NUMBERS)))]
    check_spoken(Format.MEGATRON, (f"--{name}" for name in given), spoken)
    if wrong := sorted(name for name in given if "_" in name and name.replace("_", "-") in known):
        raise refuse(Format.MEGATRON, f"--{wrong[0]}", "has no such word", (f"--{wrong[0].replace('_', '-')}",))
    keys: Keys = {}
    notes = list(found.notes)
    for name, value in given.items():
        if name in _NUMBERS:
            keys[_NUMBERS[name]] = argument_number(name, value)
    for name in _WHOLE:
        whole_argument(given, name)
    read_model(given, keys, notes)
    read_degrees(given, keys, ranks, notes)
    read_layout(given, keys, notes)
    read_training(given, keys, notes)
    return Reading(keys, (*notes, *unread(f"--{name}" for name in set(given) - known)))


def _write(source: Source) -> str:
    lines = [f"# ranks {source.ranks}"]
    for words in (model_words(source.arch, source.run.data.sequence_length), layout_words(source),
                  training_words(source)):  # fmt: skip
        lines += [" ".join(each) for each in words]
    return "\n".join(lines) + "\n"


def _differences(source: Source) -> list[str]:
    out = ["loss: --calculate-per-token-loss makes Megatron divide by trained tokens, as ours does"]
    if source.degrees["ep"] > 1:
        out.append(
            f"experts: EP {source.degrees['ep']} is folded over their DP = dp x ep = "
            f"{source.degrees['dp'] * source.degrees['ep']}, --expert-tensor-parallel-size is tp"
        )
        if source.degrees["cp"] > 1:
            out.append("experts: EP groups are context neighbours there, ours stand beside cp: other links")
    if source.run.parallel.zero == 3:
        out.append("ZeRO-3: Megatron-FSDP gathers by its own units; reshard_after_forward is its own choice")
    if source.run.parallel.recompute.value == "selective":
        out.append("selective recomputation is of the attention core there; ours also repeats what is cheap")
    if source.arch.alibi or source.arch.embedding_norm:
        out.append("ALiBi and the norm behind the embedding are words of Megatron-DeepSpeed, not of Megatron-LM")
    if source.run.optimizer.warmup_steps:
        out.append("warm-up: step s (from 0) has s / warm-up of the peak there, (s + 1) / warm-up in ours")
    return out


DIALECT = Dialect(
    _read, _write, _differences,
    frozenset({"model", "mesh", "parallel", "batch", "optimizer", "precision", "train", "moe", "seed"}),
)  # fmt: skip
