"""Megatron's words as Megatron means them: scripts, what is unsaid, the model, stages, sharding, recomputation."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.arch.arch import RopeScaling
from meshwright.arch.resolve import arch_from_model
from meshwright.config.errors import RequestError
from meshwright.config.load import dump_run, load_run
from meshwright.config.schema import RunConfig
from meshwright.price.foreign.arguments import arguments
from meshwright.price.foreign.convert import Conversion, convert
from meshwright.price.foreign.dialect import Format

OURS = Format.MESHWRIGHT
GPT = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 " \
      "--vocab-size 50304 --micro-batch-size 1 --global-batch-size 32 "  # fmt: skip
LLAMA = f"{GPT} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
EXPERTS = f"{LLAMA} --num-experts 8 "


def read(words: str, ranks: int | None = None) -> Conversion:
    return convert(words, Format.MEGATRON, OURS, (), ranks)


def notes(words: str, ranks: int | None = None) -> str:
    return "\n".join(read(words, ranks).notes)


def refused(words: str, ranks: int | None = None) -> str:
    with pytest.raises(RequestError) as error:
        read(words, ranks)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("N=24\nrun --num-layers $N", {"num-layers": "24"}),
        ('N="24"\nrun --num-layers ${N}', {"num-layers": "24"}),
        ("run --num-layers ${N:-24} --bf16", {"num-layers": "24", "bf16": ""}),
        ("run --num-layers $N --bf16", {"num-layers": "$N", "bf16": ""}),
        ("N=$(nproc)\nrun --num-layers $N", {"num-layers": "$N"}),
        ("A=4\nN=$(( ($A + 2) * 8 / 2 ))\nrun --num-layers $N", {"num-layers": "24"}),
        ("A=4\nrun --num-layers $(( ${A} * 6 )) --bf16", {"num-layers": "24", "bf16": ""}),
        ("N=$(($M * 8))\nrun --num-layers $N", {"num-layers": "$N"}),
        ("N=$((8 / 0))\nrun --num-layers $N", {"num-layers": "$N"}),
        ("N=1\nN=$1\nrun --num-layers $N", {"num-layers": "$N"}),
        ('A=" \\\n --num-layers 24 \\\n --bf16 \\\n "\nrun $A --fp16', {"num-layers": "24", "bf16": "", "fp16": ""}),
        ("N=24\nA=\" --num-layers $N --split '9 1' \"\nrun $A", {"num-layers": "24", "split": "9 1"}),
        ('A=(\n "--num-layers 24"\n "--bf16"\n)\nrun ${A[@]}', {"num-layers": "24", "bf16": ""}),
        ("A+=(--num-layers 24 --bf16)\nset +x", {"num-layers": "24", "bf16": ""}),
        ("run --num-layers 24\nexport X=1\necho done", {"num-layers": "24"}),
        ("run --num-layers \\\n 24 \\\n --bf16 | tee log", {"num-layers": "24", "bf16": "| tee log"}),
        ("--num-layers\n24\n--bf16", {"num-layers": "24", "bf16": ""}),
        ("--num-layers=24", {"num-layers": "24"}),
        ("A:\n  --num-layers: 24\n  --bf16: true\n  --fp16: false\nTYPE: regular", {"num-layers": "24", "bf16": ""}),
    ],
)
def test_words_of_a_script(script: str, given: dict[str, str]) -> None:
    """Variables were refused, quoted arguments read as nothing, and a command behind them as their value."""
    assert arguments(script).given == given


def test_what_is_said_twice_is_told() -> None:
    found = arguments("N=1\nif x; then\nN=2\nfi\nrun --num-layers $N --lr 1 --lr 2")
    assert found.given == {"num-layers": "2", "lr": "2"}
    assert [note.split()[0] for note in found.notes] == ["N", "--lr"]


@pytest.mark.parametrize(
    "words",
    [
        f"{EXPERTS} --moe-layer-freq ([0]*{'1' * 5000}+[1]*1)",
        f"{LLAMA} --num-layers 100000000 --pipeline-model-parallel-size 100000000",
        "X=ab\n" + "X=$X$X\n" * 60 + "run --num-layers $X",
        'A=" --a' + " '\"" * 50,
    ],
)
def test_what_grows_without_end_is_refused(words: str) -> None:
    assert refused(words)


def test_conditions_are_not_followed_and_told() -> None:
    found = arguments("A=(--bf16)\nif x; then\n  A+=(--checkpoint-activations --lr 1)\nfi\nrun --seed 3")
    assert list(found.given) == ["bf16", "checkpoint-activations", "lr", "seed"]
    assert [note.split(": ")[1] for note in found.notes] == ["--checkpoint-activations, --lr"]


def test_numbers_with_underscores_are_numbers() -> None:
    assert read("--global-batch-size 2_048 --train-samples 204_800 --lr 1e-4").run.train.steps == 100


def test_steps_in_tokens() -> None:
    """Megatron-DeepSpeed stops at tokens or samples, whichever comes first."""
    words = f"{GPT} --lr 1e-4 --train-tokens 3276800 --lr-warmup-tokens 327680"
    for more in ("", " --train-samples 1000000", " --train-samples 3200"):
        run = read(f"{words}{more}").run
        assert (run.train.steps, run.optimizer.warmup_steps) == (100, 10)
    assert "falls over 50 steps" in notes(f"{words} --lr-decay-tokens 1638400")


def test_one_expert_is_none() -> None:
    model = read(f"{GPT} --num-experts 1 --moe-expert-parallel-size 1 --moe-router-topk 1").run.model
    assert (model.family, model.experts) == ("gpt2", None)
    assert read(f"{EXPERTS} --moe-expert-parallel-size 4", 8).run.mesh.ep == 4


def test_a_model_is_what_megatron_makes_of_what_is_unsaid() -> None:
    """Dropout was 0, the rotary base a family's, the width of a gated MLP that of a plain one."""
    gpt, llama, experts = (read(words).run.model for words in (GPT, LLAMA, EXPERTS))
    assert (gpt.family, gpt.dropout, gpt.ffn, gpt.norm_eps, gpt.tie_embeddings) == ("gpt2", 0.1, 4096, 1e-5, True)
    assert (llama.family, llama.ffn, llama.rope_theta, llama.kv_heads) == ("llama", 2688, 10_000.0, 16)
    assert (experts.family, experts.experts_per_token, experts.expert_ffn) == ("mixtral", 2, 2688)
    assert (experts.rope_theta, read(EXPERTS).run.moe.auxiliary_loss) == (10_000.0, 0.0)
    assert read(f"{LLAMA} --qk-layernorm").run.model.norm_eps == 1e-5


@pytest.mark.parametrize(
    ("words", "family", "keys"),
    [
        (f"{GPT} --position-embedding-type alibi --embed-layernorm", "bloom", {}),
        (f"{LLAMA} --qk-layernorm --add-qkv-bias", "qwen3", {"qkv_bias": True, "qk_norm": None}),
        (f"{LLAMA} --add-qkv-bias", "qwen2", {"qkv_bias": None}),
        (f"{EXPERTS} --qk-layernorm", "qwen3_moe", {}),
        (f"{EXPERTS} --add-qkv-bias", "mixtral", {"qkv_bias": True}),
        (f"{GPT} --qk-layernorm", "gpt2", {"qk_norm": True}),
        (f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*23)", "mixtral", {"dense_layers": 1}),
        (f"{EXPERTS} --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 1024", "mixtral",
         {"shared_experts": 2}),
        (f"{GPT} --pad-vocab-size-to 51200", "gpt2", {"vocab": 51200}),
    ],
)  # fmt: skip
def test_families_by_their_words(words: str, family: str, keys: dict[str, Any]) -> None:
    model = read(words).run.model
    assert model.family == family
    assert {name: getattr(model, name) for name in keys} == keys


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"{GPT} --position-embedding-type rope", "--normalization LayerNorm --position-embedding-type rope"),
        (f"{GPT} --position-embedding-type alibi", "--position-embedding-type alibi"),
        (f"{GPT} --swiglu", "--swiglu"),
        (f"{GPT} --disable-bias-linear", "--disable-bias-linear"),
        (LLAMA.replace("--swiglu", ""), "--swiglu"),
        (f"{GPT} --num-experts 8", "--num-experts"),
        *((f"{LLAMA} {each}", each) for each in (
            "--multi-latent-attention", "--rotary-percent 0.5", "--mtp-num-layers 1", "--squared-relu",
            "--window-size 4095,0", "--moe-router-pre-softmax")),
        *((f"{EXPERTS} {each}", each) for each in (
            "--moe-layer-freq 2", "--moe-router-load-balancing-type sinkhorn", "--moe-router-score-function sigmoid",
            "--moe-shared-expert-intermediate-size 1000")),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_its_words(words: str, named: str) -> None:
    """ALiBi was learned positions, LayerNorm beside rope RMSNorm, a plain MLP a gated one: without a word."""
    assert named in refused(words)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    assert "heads" in refused(GPT.replace("--num-attention-heads 16", "--num-attention-heads 15"))


@pytest.mark.parametrize(
    ("words", "stages", "chunks"),
    [
        ("", (6, 6, 6, 6), 1),
        ("--num-layers-per-virtual-pipeline-stage 3", (3,) * 8, 2),
        ("--num-virtual-stages-per-pipeline-rank 3", (2,) * 12, 3),
        ("--decoder-first-pipeline-num-layers 3", (3, 7, 7, 7), 1),
        ("--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5", (7, 6, 6, 5), 1),
        ("--pipeline-model-parallel-layout Et*5|t*7|t*7|t*5L", (5, 7, 7, 5), 1),
    ],
)
def test_stages_are_cut_as_there(words: str, stages: tuple[int, ...], chunks: int) -> None:
    """Ours, balanced, counts embedding and head; Megatron gives every stage as many blocks."""
    run = read(f"{LLAMA} --pipeline-model-parallel-size 4 {words}", 8).run
    assert (run.parallel.stages, run.parallel.chunks) == (stages, chunks)
    counted = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    more = LLAMA.replace("--num-layers 24", "--num-layers 22")
    assert read(f"{more} --pipeline-model-parallel-size 4 {counted}").run.parallel.stages == (5, 6, 6, 5)


@pytest.mark.parametrize(
    "words", ["--pipeline-model-parallel-size 5", "--pipeline-model-parallel-size 48",
              "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
              "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4",
              "--pipeline-model-parallel-size 4 --pp-partition-method parameters"],
)  # fmt: skip
def test_stages_that_megatron_cannot_cut_are_refused(words: str) -> None:
    assert "megatron" in refused(f"{LLAMA} {words}")


@pytest.mark.parametrize(
    ("words", "parallel"),
    [
        ("--use-torch-fsdp2", {"zero": 3}),
        ("--use-megatron-fsdp", {"zero": 0}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": 2}),
        ("--zero-stage 2 --deepspeed", {"zero": 2}),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", {"zero": 1, "zero_shard_within": 4}),
        ("--recompute-activations", {"recompute": "selective"}),
        ("--checkpoint-activations", {"recompute": "full"}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 24", {"recompute": "full"}),
        ("--cpu-optimizer", {"offload": "optimizer"}),
        ("--ds-sequence-parallel-size 2", {"context": "ulysses"}),
    ],
)
def test_layout_words(words: str, parallel: dict[str, Any]) -> None:
    run = read(f"{LLAMA} {words}", 8).run
    assert {name: getattr(run.parallel, name) for name in parallel} == parallel
    assert run.mesh.dp == (4 if "ds-sequence" in words else 8)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "--data-parallel-sharding-strategy all"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "recompute-num-layers 4"),
        ("--recompute-granularity some", "--recompute-granularity some"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0.5"),
        ("--tensor-model-parallel-size 3", "8 ranks: megatron wants a multiple of TP x PP x CP = 3"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 3", "instances 3"),
        ("--lr 1 --lr-decay-style WSD", "--lr-decay-style WSD"),
        ("--optimizer muon", "--optimizer muon"),
        ("--tensor_model_parallel_size 2", "--tensor-model-parallel-size"),
    ],
)
def test_what_ours_cannot_do_is_refused_by_its_words(words: str, named: str) -> None:
    assert named in refused(f"{LLAMA} {words}", 8)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data-path x --tokenizer-type T --init-method-std 0.01", "--data-path, --init-method-std, --tokenizer-type"),
        ("--lr 1e-4 --train-iters 100 --lr-decay-iters 50", "falls over 50 steps"),
        ("--lr 1e-4 --train-samples 3200 --lr-decay-samples 1600", "falls over 50 steps"),
        ("--lr 1e-4 --lr-warmup-iters 5", "(s + 1) / warm-up"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "every 2th block"),
        ("--recompute-activations --recompute-modules moe_act", "moe_act"),
        ("--rampup-batch-size 8 8 100", "whole batch from the first step"),
        ("--make-vocab-size-divisible-by 512", "padded to a multiple of 512"),
        ("--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 384", "padded to a multiple of 768"),
    ],
)
def test_what_means_something_else_is_told(words: str, told: str) -> None:
    assert told in notes(f"{LLAMA} {words}")


def test_kernels_alone_are_passed_over() -> None:
    assert "not read" not in notes(f"{LLAMA} --attention-backend flash --overlap-grad-reduce --no-bias-gelu-fusion")


def test_a_batch_that_is_unsaid_is_one_micro_batch_a_replica() -> None:
    words = LLAMA.replace("--global-batch-size 32", "--micro-batch-size 2")
    assert read(words, 8).run.batch.global_ == 16
    assert "--global-batch-size is not given" in notes(words)


ROUND = (
    ("mesh.pp=4", "model.layers=30", "mesh.dp=2"),
    ("mesh.pp=2", "parallel.stages=[3,29]", "mesh.dp=2"),
    ("mesh.pp=2", "parallel.schedule=interleaved", "parallel.chunks=4", "mesh.dp=2"),
    ("mesh.dp=8", "parallel.zero=1", "parallel.zero_shard_within=2"),
    ("mesh.dp=2", "model.preset=llama3.1-8b", "optimizer.learning_rate=1.23456789e-5",
     "optimizer.min_learning_rate=1e-6"),
    ("mesh.dp=2", "model.preset=mixtral-8x7b", "moe.balance=bias"),
    ("mesh.dp=2", "model.preset=mixtral-8x7b", "moe.balance=none", "moe.z_loss=0.001"),
    ("mesh.dp=2", "model.preset=mixtral-8x7b", "moe.auxiliary_loss=0.02"),
    ("mesh.dp=2", "model.preset=qwen2.5-7b", "optimizer.betas=[0.9,0.9999999]"),
    ("mesh.dp=2", "model.preset=gpt2", "model.dropout=0.1"),
    ("mesh.dp=2", "mesh.cp=4", "parallel.context_inner=2", "parallel.recompute=full"),
)  # fmt: skip


@pytest.mark.parametrize("words", ROUND, ids=lambda words: words[-1])
def test_there_and_back_is_the_same_twice(words: tuple[str, ...]) -> None:
    def told(run: RunConfig) -> dict[str, object]:
        keys = {"batch", "optimizer", "precision", "mesh"}
        return {name: table for name, table in run.tables().items() if name in keys}

    run = load_run(None, ["model.preset=llama3-8b", "precision.compute=bfloat16", "batch.micro=1", *words])
    there = convert(dump_run(run), OURS, Format.MEGATRON)
    assert there.lost == ()
    back = read(there.text).run
    assert told(back) == told(run)
    assert arch_from_model(back.model) == arch_from_model(run.model)
    assert back.moe.balance == run.moe.balance
    again = convert(dump_run(back), OURS, Format.MEGATRON)
    assert again.text == there.text


def test_llamas_longer_context_is_kept() -> None:
    run = load_run(None, ["model.preset=llama3.1-8b", "mesh.dp=1"])
    rope = arch_from_model(read(convert(dump_run(run), OURS, Format.MEGATRON).text).run.model).rope
    assert rope is not None
    assert (rope.scaling, rope.factor, rope.original_positions) == (RopeScaling.LLAMA3, 8.0, 8192)
