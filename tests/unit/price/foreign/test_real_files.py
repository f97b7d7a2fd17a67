"""Files as people have them: launch scripts, what `accelerate config` writes, job files that leave ranks unsaid."""

import json

import pytest

from meshwright.config.errors import RequestError
from meshwright.config.load import dump_run, load_run
from meshwright.config.schema import RunConfig
from meshwright.price.foreign.convert import Conversion, convert
from meshwright.price.foreign.dialect import Format

OURS = Format.MESHWRIGHT

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048 # learned
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-samples 1536000
    --bf16
    --grad-reduce-in-bf16
    --lr 6.0e-5
    --lr-warmup-fraction .01
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
EVAL_ARGS+=(--eval-iters 10)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]}
"""

ACCELERATE = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: {strategy}
  fsdp_version: 1
  fsdp_min_num_params: 0
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
tpu_env: []
gpu_ids: [0, 1]
commands:
- python
- train.py
use_cpu: false
"""

TITAN = """[model]
name = "llama3"
flavor = "405B"
[training]
local_batch_size = 2
seq_len = 8192
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = {replicas}
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[checkpoint]
enable = {saves}
interval = 500
"""


def read(text: str, format_: Format, ranks: int | None = None) -> tuple[RunConfig, Conversion]:
    done = convert(text, format_, OURS, (), ranks)
    return done.run, done


def test_a_launch_script_is_arguments_between_words_of_a_shell() -> None:
    run, done = read(SCRIPT, Format.MEGATRON, 256)
    assert (run.model.layers, run.mesh.tp, run.mesh.pp, run.mesh.dp) == (96, 8, 16, 2)
    assert (run.train.steps, run.optimizer.warmup_steps) == (1000, 10)
    assert run.precision.reduce.value == "bfloat16"
    assert not any("mesh.dp" in note for note in done.notes)
    assert any("model.vocab" in note for note in done.notes)


def test_a_value_in_a_variable_is_named() -> None:
    with pytest.raises(RequestError, match=r"--tensor-model-parallel-size \$TP"):
        read("--tensor-model-parallel-size $TP ${MORE[@]}", Format.MEGATRON)


def test_what_megatron_is_not_told_is_what_megatron_takes() -> None:
    """Least rate, warm-up, decay and betas were this project's: of a rate below ours the file was refused."""
    optimizer = read("--lr 1e-4 --global-batch-size 8", Format.MEGATRON)[0].optimizer
    assert (optimizer.min_learning_rate, optimizer.warmup_steps, optimizer.weight_decay) == (0.0, 0, 0.01)
    assert (optimizer.schedule.value, optimizer.betas) == ("linear", (0.9, 0.999))


@pytest.mark.parametrize(
    ("words", "told"),
    [("", "--weight-decay 0.01 and --sgd-momentum 0.9"), ("--lr 1e-2", "--weight-decay 0.01 and --sgd-momentum 0.9"),
     ("--lr 1e-2 --sgd-momentum 0.5 --weight-decay 0", "--sgd-momentum 0.5"), ("--lr 1 --sgd-momentum 0", "--weight-d"),
     ("--weight-decay 0 --sgd-momentum 0", "")],
)  # fmt: skip
def test_megatrons_sgd_is_ours_but_for_its_defaults(words: str, told: str) -> None:
    """Its default decay was set, and the file refused for a key that nobody wrote."""
    run, done = read(f"--optimizer sgd --global-batch-size 8 {words}", Format.MEGATRON)
    assert (run.optimizer.kind.value, run.optimizer.weight_decay) == ("sgd", 0.0)
    notes = [note for note in done.notes if "sgd" in note]
    assert len(notes) == bool(told)
    assert all(told in note and "not read" not in note for note in notes)


def test_our_sgd_comes_back_from_megatron_as_plain_as_it_was() -> None:
    """Without a word Megatron's has a momentum."""
    there = convert(dump_run(load_run(None, ["model.preset=llama3-8b", "optimizer.kind=sgd"])), OURS, Format.MEGATRON)
    assert "--sgd-momentum 0" in there.text
    assert not any("sgd" in note for note in read(there.text, Format.MEGATRON)[1].notes)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e3", "0", "1" * 400])
def test_steps_of_a_share_are_whole(number: str) -> None:
    """Of infinite steps the share was an OverflowError."""
    for name, more in (("lr-decay-iters", "--train-iters 8"), ("train-iters", "")):
        with pytest.raises(RequestError, match=rf"--{name}: .* wants a whole number"):
            read(f"{more} --{name} {number} --lr-warmup-fraction 0.1", Format.MEGATRON)


def test_numbers_that_no_float_holds_are_refused() -> None:
    with pytest.raises(RequestError, match="betas"):
        read(f"--lr 1 --adam-beta1 {'1' * 400}", Format.MEGATRON)


@pytest.mark.parametrize("words", ["--train-samples 8", "--global-batch-size 8 --train-samples x",
                                   "--train-iters 8 --lr-warmup-fraction 2"])  # fmt: skip
def test_samples_that_make_no_steps_are_refused(words: str) -> None:
    with pytest.raises(RequestError, match=r"--train-samples|--lr-warmup-fraction"):
        read(words, Format.MEGATRON)


@pytest.mark.parametrize("words", [("precision.compute=bfloat16", "precision.reduce=bfloat16"),
                                   ("precision.compute=float8",)])  # fmt: skip
def test_precision_comes_back_from_megatron(words: tuple[str, ...]) -> None:
    run = load_run(None, ["model.preset=llama3-8b", "mesh.dp=2", *words])
    there = convert(dump_run(run), OURS, Format.MEGATRON)
    assert read(there.text, Format.MEGATRON)[0].precision == run.precision
    assert not any("precision" in each for each in there.lost)


@pytest.mark.parametrize(
    ("strategy", "zero", "within", "reshard"),
    [
        ("FULL_SHARD", 3, 0, True), ("1", 3, 0, True), ("SHARD_GRAD_OP", 3, 0, False), ("2", 3, 0, False),
        ("NO_SHARD", 0, 0, True), ("HYBRID_SHARD", 3, 8, True), ("HYBRID_SHARD_ZERO2", 3, 8, False),
    ],
)  # fmt: skip
def test_what_accelerate_config_writes_is_read(strategy: str, zero: int, within: int, reshard: bool) -> None:
    """Lists ended in a refusal, and every strategy was FULL_SHARD."""
    run, done = read(ACCELERATE.format(strategy=strategy), Format.ACCELERATE, 16)
    assert (run.mesh.dp, run.parallel.zero, run.parallel.zero_shard_within) == (16, zero, within)
    assert run.parallel.reshard_after_forward is reshard
    assert [note for note in done.notes if note.startswith("not read")] == ["not read: fsdp_config.fsdp_min_num_params"]


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(RequestError, match="fsdp_sharding_strategy: SOME"):
        read(ACCELERATE.format(strategy="SOME"), Format.ACCELERATE)


FLAGS = """distributed_type: FSDP
mixed_precision: {mixed}
num_processes: 8
num_machines:{null}
fsdp_config:
  fsdp_reshard_after_forward: {flag}
  fsdp_offload_params: {flag}
  fsdp_activation_checkpointing: {flag}
  fsdp_sharding_strategy:{null}
parallelism_config:{null}
"""


@pytest.mark.parametrize(
    ("mixed", "compute", "null"),
    [
        ("no", "float32", " null"),
        ("'no'", "float32", ""),
        ("~", "float32", " NULL # none"),
        ("'bf16'", "bfloat16", " ~"),
    ],
)
@pytest.mark.parametrize("word", ["true", "yes", "On", "'true'", "1", "false", "no", "OFF", '"no"', "0"])
def test_flags_are_those_of_yaml(word: str, null: str, mixed: str, compute: str) -> None:
    """`no` was a word, so parameters were elsewhere with it; null was one too."""
    run = read(FLAGS.format(flag=word, null=null, mixed=mixed), Format.ACCELERATE)[0]
    flag = word.lower().strip("\"'") in ("true", "yes", "on", "1")
    assert run.parallel.reshard_after_forward is flag
    assert (run.parallel.offload.value, run.parallel.recompute.value) == (("params", "full") if flag else ("none",) * 2)
    assert (run.precision.compute.value, run.parallel.zero, run.mesh.dp) == (compute, 3, 8)


@pytest.mark.parametrize("line", ["fsdp_offload_params: some", "fsdp_activation_checkpointing: 'none'",
                                  "fsdp_reshard_after_forward: maybe", "fsdp_sharding_strategy: no"])  # fmt: skip
def test_what_is_no_flag_is_refused_by_its_own_key(line: str) -> None:
    key = line.split(":")[0]
    with pytest.raises(RequestError, match=rf"{key}: ") as refused:
        read(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  {line}\n", Format.ACCELERATE)
    assert all(other == key or other not in str(refused.value) for other in (
        "fsdp_sharding_strategy", "fsdp_reshard_after_forward"))  # fmt: skip


@pytest.mark.parametrize(("replicas", "dp", "within"), [(1, 16, 0), (2, 16, 8)])
def test_titans_ranks_are_what_the_launcher_has(replicas: int, dp: int, within: int) -> None:
    run, done = read(TITAN.format(replicas=replicas, saves="true"), Format.TORCHTITAN, 128)
    assert (run.mesh.dp, run.batch.global_, run.parallel.zero_shard_within) == (dp, 2 * dp, within)
    assert run.checkpoint.every == 500
    assert "not read: training.dataset" in done.notes


def test_titan_saves_where_it_is_told_to() -> None:
    assert read(TITAN.format(replicas=1, saves="false"), Format.TORCHTITAN, 128)[0].checkpoint.every == 0
    there = convert(dump_run(load_run(None, ["model.preset=llama3.1-8b", "parallel.zero=3", "checkpoint.every=7"])),
                    OURS, Format.TORCHTITAN)  # fmt: skip
    assert "enable = true" in there.text
    assert read(there.text, Format.TORCHTITAN)[0].checkpoint.every == 7


def test_titans_ranks_that_do_not_divide_or_are_unsaid_are_refused() -> None:
    with pytest.raises(RequestError, match="100 ranks"):
        read(TITAN.format(replicas=1, saves="true"), Format.TORCHTITAN, 100)
    with pytest.raises(RequestError, match="--ranks N"):
        read(TITAN.format(replicas=1, saves="true"), Format.TORCHTITAN)


@pytest.mark.parametrize(
    ("scheduler", "schedule", "warmup"),
    [({}, "constant", 0), ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "constant", 0),
     ({"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, "linear", 1000)],
)  # fmt: skip
def test_deepspeeds_schedules_end_where_theirs_do(scheduler: dict[str, object], schedule: str, warmup: int) -> None:
    """Unsaid, a scheduler of theirs warms up over 1000 steps."""
    text = json.dumps({"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": "auto"}},
                       "scheduler": scheduler})  # fmt: skip
    run, done = read(text, Format.DEEPSPEED, 2)
    assert (run.optimizer.schedule.value, run.optimizer.warmup_steps) == (schedule, warmup)
    assert (run.optimizer.min_learning_rate, run.optimizer.clip_norm) == (0.0, 0.0)
    assert any("optimizer.params.betas" in note for note in done.notes)


def test_deepspeeds_automatic_sizes_are_named() -> None:
    with pytest.raises(RequestError, match='gradient_accumulation_steps = "auto"'):
        read('{"train_batch_size": 8, "gradient_accumulation_steps": "auto"}', Format.DEEPSPEED)


@pytest.mark.parametrize("text", ["", 'name = "x"\n', "{}", "name: x\n", "# ranks 8\n"])
@pytest.mark.parametrize("format_", [each for each in Format if each is not OURS])
def test_a_file_of_another_format_is_not_read_as_nothing(format_: Format, text: str) -> None:
    """A TOML file as Megatron's arguments was this project's demonstration run, and exit code 0."""
    with pytest.raises(RequestError):
        read(text, format_, 8)
