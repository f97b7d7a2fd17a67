"""torchtitan, DeepSpeed and Accelerate: what is unsaid is what it is there, older names, what contradicts itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.config.errors import RequestError
from meshwright.config.load import dump_run, load_run
from meshwright.price.foreign.convert import Conversion, convert
from meshwright.price.foreign.dialect import Format

OURS = Format.MESHWRIGHT


def titan(text: str, ranks: int | None = 8) -> Conversion:
    return convert(text, Format.TORCHTITAN, OURS, (), ranks)


def deepspeed(ranks: int | None = None, **given: Any) -> Conversion:
    return convert(json.dumps(given), Format.DEEPSPEED, OURS, (), ranks)


def accelerate(text: str, ranks: int | None = None) -> Conversion:
    return convert(text, Format.ACCELERATE, OURS, (), ranks)


def written(format_: Format, *words: str) -> Conversion:
    fixed = ("model.preset=llama3.1-8b", "precision.compute=bfloat16", "batch.micro=1")
    return convert(dump_run(load_run(None, [*fixed, *words])), OURS, format_)


def test_titan_unsaid() -> None:
    """Steps, rate, warm-up, length, batch and recomputation were this project's."""
    run = titan('[model]\nname = "llama3"\nflavor = "8B"\n').run
    optimizer = run.optimizer
    assert (run.train.steps, run.data.sequence_length, run.batch.micro, run.batch.global_) == (10_000, 2048, 8, 64)
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule.value) == (8e-4, 200, "linear")
    assert (optimizer.weight_decay, optimizer.betas, optimizer.min_learning_rate) == (0.1, (0.9, 0.95), 0.0)
    assert (run.parallel.recompute.value, run.parallel.zero, run.mesh.dp) == ("selective", 3, 8)
    assert any("debugmodel" in note for note in titan("[training]\nsteps = 5\n").notes)


def test_titans_older_names() -> None:
    """Degrees that stood in [training] and [experimental] were one."""
    run = titan(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 4\ntensor_parallel_degree = 2\n'
        "data_parallel_degree = -1\nwarmup_steps = 7\ncompile = true\nseed = 3\n[experimental]\n"
        "pipeline_parallel_degree = 2\npipeline_parallel_microbatches = 2\n",
        16,
    ).run
    assert (run.mesh.tp, run.mesh.pp, run.mesh.dp) == (2, 2, 4)
    assert (run.batch.micro, run.batch.global_, run.optimizer.warmup_steps) == (2, 16, 7)
    assert (run.parallel.compile, run.seed) == (True, 3)
    with pytest.raises(RequestError, match=r"training\.batch_size and training\.local_batch_size"):
        titan("[training]\nbatch_size = 4\nlocal_batch_size = 8\n")


@pytest.mark.parametrize(("rotate", "context"), [("", "allgather"), ("allgather", "allgather"), ("alltoall", "ring")])
def test_titans_context_is_gathered_unless_it_turns(rotate: str, context: str) -> None:
    line = f'context_parallel_rotate_method = "{rotate}"\n' if rotate else ""
    run = titan(f"[parallelism]\ncontext_parallel_degree = 2\n{line}").run
    assert run.parallel.context.value == context
    there = written(Format.TORCHTITAN, "mesh.cp=2", "mesh.dp=4", "parallel.zero=3", f"parallel.context={context}")
    assert titan(there.text).run.parallel.context.value == context


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (("mesh.pp=4",), None),
        (("mesh.pp=4", "parallel.stages=[8,9,8,7]"), (8, 9, 8, 7)),
        (("mesh.pp=4", "parallel.stages=[8,9,9,6]"), (8, 9, 9, 6)),
        (("mesh.pp=2", "parallel.schedule=interleaved", "parallel.chunks=4"), None),
        (("mesh.pp=2", "parallel.schedule=zb-v", "parallel.chunks=2"), None),
    ],
)
def test_titans_stages(words: tuple[str, ...], stages: tuple[int, ...] | None) -> None:
    there = written(Format.TORCHTITAN, "mesh.dp=2", "parallel.zero=3", "batch.global=32", *words)
    ranks = 2 * int(words[0][-1])
    back = titan(there.text, ranks).run.parallel
    assert there.lost == ()
    assert stages is None or back.stages == stages
    assert stages != (8, 9, 8, 7) or "module_fqns" not in there.text
    assert sum(map(int, back.stages)) == 32
    again = convert(dump_run(titan(there.text, ranks).run), OURS, Format.TORCHTITAN)
    assert again.text == there.text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[lr_scheduler]\ndecay_type = "sqrt"\n', "decay_type = sqrt"),
        ('[optimizer]\nname = "Adam"\n', "optimizer.name = Adam"),
        ("[parallelism]\npipeline_parallel_degree = -1\n", "pipeline_parallel_degree: -1"),
        (
            '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_split_points = ["layers.1"]\n',
            "split_points",
        ),
        ("[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [[]]\n", "module_fqns"),
        ('[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = "x"\n', "rotate_method = x"),
    ],
)
def test_what_titan_has_and_ours_has_not_is_refused(text: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        titan(text)


@pytest.mark.parametrize("words", [("optimizer.kind=sgd", "optimizer.weight_decay=0"), ("precision.compute=float16",),
                                   ("precision.compute=float64",)])  # fmt: skip
def test_what_titan_cannot_run_is_not_written(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="torchtitan cannot express it"):
        written(Format.TORCHTITAN, "mesh.dp=2", "parallel.zero=3", *words)


def test_titan_sums_in_float32_and_keeps_experts_even_by_a_bias() -> None:
    there = written(Format.TORCHTITAN, "mesh.dp=2", "parallel.zero=3", "precision.reduce=bfloat16")
    assert "precision.reduce = bfloat16" in there.lost
    assert titan('[model]\nname = "qwen3"\nflavor = "30B-A3B"\n').run.moe.balance.value == "bias"
    assert titan('[model]\nname = "llama3"\nflavor = "8B"\nconverters = ["float8"]\n').run.precision.compute == "float8"


ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}


def test_deepspeeds_optimizer_unsaid() -> None:
    """Betas and decay were this project's."""
    found = deepspeed(train_batch_size=8, train_micro_batch_size_per_gpu=1, optimizer=ADAM).run.optimizer
    assert (found.betas, found.weight_decay, found.learning_rate, found.clip_norm) == ((0.9, 0.999), 0.0, 1e-4, 0.0)


@pytest.mark.parametrize(
    ("kind", "params", "peak", "least"),
    [
        ("WarmupLR", {"warmup_max_lr": 3e-5}, 3e-5, 0.0),
        ("WarmupLR", {}, 1e-3, 0.0),
        ("WarmupDecayLR", {"warmup_max_lr": 3e-5, "total_num_steps": 9}, 3e-5, 0.0),
        ("WarmupCosineLR", {"total_num_steps": 9}, 1e-4, 1e-8),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 0.1}, 1e-4, 1e-5),
    ],
)
def test_deepspeeds_peak_is_its_schedulers(kind: str, params: dict[str, Any], peak: float, least: float) -> None:
    """It was the optimizer's, which counts for nothing beside warmup_max_lr."""
    done = deepspeed(train_batch_size=8, train_micro_batch_size_per_gpu=1, optimizer=ADAM,
                     scheduler={"type": kind, "params": params})  # fmt: skip
    found = done.run.optimizer
    assert (found.learning_rate, found.warmup_steps) == (peak, 1000)
    assert found.min_learning_rate == pytest.approx(least)
    assert any("counts for nothing" in note for note in done.notes) == (peak != 1e-4)
    assert any("logarithmic" in note for note in done.notes)


@pytest.mark.parametrize(
    ("sizes", "ranks", "found"),
    [
        ((64, 2, 4), None, (64, 2, 8)),
        ((64, 2, 4), 8, (64, 2, 8)),
        ((64, None, 4), 8, (64, 2, 8)),
        ((64, 2, None), 8, (64, 2, 8)),
        ((None, 2, 4), 8, (64, 2, 8)),
        ((None, 2, None), 8, (16, 2, 8)),
        ((64, None, None), 8, (64, 8, 8)),
    ],
)
def test_deepspeeds_batch_arithmetic(
    sizes: tuple[int | None, ...], ranks: int | None, found: tuple[int, int, int]
) -> None:
    """Ranks counted for nothing: what follows from them was refused, or stayed this project's."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    given = {name: size for name, size in zip(names, sizes, strict=True) if size}
    run = deepspeed(ranks, **given).run
    assert (run.batch.global_, run.batch.micro, run.mesh.dp) == found


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((64, 2, 4), 4), ((64, 3, None), 8), ((4, None, 1), 8), ((64, 3, 4), None)]
)
def test_sizes_that_contradict_each_other_are_refused(sizes: tuple[int | None, ...], ranks: int | None) -> None:
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    with pytest.raises(RequestError, match=f"train_batch_size = {sizes[0]}"):
        deepspeed(ranks, **{name: size for name, size in zip(names, sizes, strict=True) if size})


@pytest.mark.parametrize(
    ("given", "reduce"),
    [
        ({"bf16": {"enabled": True}}, "float32"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "bfloat16"),
        ({"fp16": {"enabled": True}}, "float16"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
         "float32"),
    ],
)  # fmt: skip
def test_deepspeeds_gradients_are_of_the_models_dtype(given: dict[str, Any], reduce: str) -> None:
    assert deepspeed(2, train_micro_batch_size_per_gpu=1, **given).run.precision.reduce.value == reduce


def test_deepspeeds_inner_names_are_told() -> None:
    done = deepspeed(
        2, train_micro_batch_size_per_gpu=1, bf16={"enabled": True}, communication_data_type="fp32",
        zero_optimization={"stage": 2, "zenflow": {}, "zero_quantized_weights": True, "overlap_comm": True},
        optimizer={"type": "Adam", "params": {"lr": 1e-4, "freeze_step": 3}},
    )  # fmt: skip
    left = next(note for note in done.notes if note.startswith("not read"))
    assert left == "not read: optimizer.params.freeze_step, zero_optimization.zenflow, " \
                   "zero_optimization.zero_quantized_weights"  # fmt: skip
    assert any("sent as float32" in note for note in done.notes)


def test_deepspeeds_axes() -> None:
    experts = {"enabled": True, "autoep_size": 4}
    run = deepspeed(16, train_micro_batch_size_per_gpu=1, sequence_parallel_size=2, expert_parallel=experts).run
    assert (run.mesh.dp, run.mesh.ep, run.mesh.cp, run.batch.global_) == (2, 4, 2, 8)
    with pytest.raises(RequestError, match="autoep_size = 3"):
        deepspeed(8, train_micro_batch_size_per_gpu=1, expert_parallel={"enabled": True, "autoep_size": 3})
    disk = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}}
    parallel = deepspeed(2, train_micro_batch_size_per_gpu=1, zero_optimization=disk).run.parallel
    assert (parallel.offload.value, parallel.offload_to) == ("params", "/fast")
    there = written(Format.DEEPSPEED, "mesh.dp=2", "parallel.zero=3", "parallel.offload=params",
                    "parallel.offload_to=/fast")  # fmt: skip
    assert '"nvme_path": "/fast"' in there.text


@pytest.mark.parametrize(
    "zero", [{"stage": 4}, {"stage": 3, "offload_param": {"device": "tape"}},
             {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}],
)  # fmt: skip
def test_what_deepspeed_and_ours_have_not_is_refused(zero: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"stage: 4|tape|ratio: 0\.3"):
        deepspeed(2, train_micro_batch_size_per_gpu=1, zero_optimization=zero)


@pytest.mark.parametrize(
    ("format_", "words", "named"),
    [
        (Format.TORCHTITAN, ("mesh.ep=2", "parallel.zero=1"), r"parallel\.zero = 1"),
        (Format.TORCHTITAN, ("mesh.ep=2",), r"mesh\.ep = 2 with parallel\.zero = 0"),
        (Format.TORCHTITAN, ("mesh.ep=2", "parallel.zero=3", "parallel.zero_shard_within=1"), r"mesh\.ep = 2 with"),
        (Format.TORCHTITAN, ("mesh.pp=2", "parallel.zero=3", "parallel.schedule=zb-h1"), r"parallel\.schedule = "),
        (Format.DEEPSPEED, ("mesh.pp=2",), r"mesh\.pp = 2"),
        (Format.ACCELERATE, ("mesh.ep=2", "parallel.zero=3"), r"mesh\.ep = 2"),
    ],
)
def test_what_a_format_has_no_word_for_is_refused_by_ours(format_: Format, words: tuple[str, ...], named: str) -> None:
    """It was told by what the written file would have been refused for."""
    run = load_run(None, ["model.preset=mixtral-8x7b", "mesh.dp=2", "batch.micro=1", *words])
    with pytest.raises(RequestError, match=f"{named}.*cannot express it"):
        convert(dump_run(run), OURS, format_, (), run.mesh.pp * run.mesh.ep * 2)


@pytest.mark.parametrize("format_", [Format.TORCHTITAN, Format.ACCELERATE])
def test_groups_that_cut_the_context_axis_are_refused(format_: Format) -> None:
    """They made 0 shards of it."""
    with pytest.raises(RequestError, match=r"zero_shard_within = 2: must be a multiple of mesh\.cp = 4"):
        written(format_, "mesh.dp=2", "mesh.cp=4", "parallel.zero=3", "parallel.zero_shard_within=2")
    with pytest.raises(RequestError, match="zero_shard_within = 16: must divide the 8 replicas"):
        written(format_, "mesh.dp=8", "parallel.zero=3", "parallel.zero_shard_within=16")


@pytest.mark.parametrize("format_", list(Format)[1:])
def test_stages_that_are_not_the_models_are_refused(format_: Format) -> None:
    words = "mesh.dp=2", "mesh.pp=2", "parallel.stages=[20,20]", "batch.global=16"
    with pytest.raises(RequestError, match=r"\[20, 20\]: must be 2 numbers|mesh\.pp = 2"):
        written(format_, *words)


def test_titans_experts_are_cut_as_ours_over_the_tensor_axis() -> None:
    run = load_run(None, ["model.preset=qwen3-30b-a3b", "mesh.dp=2", "mesh.ep=2", "mesh.tp=2", "parallel.zero=3",
                          "batch.micro=1", "moe.balance=bias"])  # fmt: skip
    there = convert(dump_run(run), OURS, Format.TORCHTITAN)
    assert "expert_tensor_parallel_degree = 2" in there.text
    back = titan(there.text).run
    assert (back.mesh.ep, back.mesh.tp, back.moe.balance.value) == (2, 2, "bias")


def test_what_is_refused_tells_what_the_format_has_in_its_place() -> None:
    with pytest.raises(RequestError, match=r"parallel\.sequence = true.*parallel\.sequence=false"):
        written(Format.DEEPSPEED, "mesh.tp=2", "mesh.dp=2")


SHARDED = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
SIZES = "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_cp_size: 2\n"


def test_accelerates_processes_may_be_the_launchers() -> None:
    """A file without them was one rank, and sharded nothing."""
    run = accelerate(SHARDED, 8).run
    assert (run.mesh.dp, run.parallel.zero, run.precision.reduce.value) == (8, 3, "bfloat16")
    with pytest.raises(RequestError, match="--ranks N"):
        accelerate(SHARDED)
    assert accelerate(SHARDED + SIZES).run.mesh.cp == 2


@pytest.mark.parametrize(
    ("text", "ranks", "rule"),
    [
        (f"{SHARDED}num_processes: 16\n{SIZES}", None, "num_processes: 16"),
        (f"{SHARDED}{SIZES}", 4, "4 ranks"),
        (f"{SHARDED}num_processes: 16\n", 8, "contradicts --ranks 8"),
        ("distributed_type: 'NO'\nnum_processes: 4\n", None, "num_processes: 4"),
        ("distributed_type: TPU\nnum_processes: 4\n", None, "distributed_type: TPU"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: z.json\n", None,
         "convert z.json --from deepspeed"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 7\n", None, "zero_stage: 7"),
        (f"distributed_type: DEEPSPEED\nnum_processes: 8\n{SIZES}", None, "beside distributed_type: DEEPSPEED"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 6\nmegatron_lm_config:\n  megatron_lm_tp_degree: 4\n", None,
         "num_processes: 6"),
    ],
)  # fmt: skip
def test_accelerates_contradictions_are_refused(text: str, ranks: int | None, rule: str) -> None:
    with pytest.raises(RequestError, match=rule):
        accelerate(text, ranks)


def test_what_accelerate_hands_on_is_read() -> None:
    run = accelerate(
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
        "  offload_optimizer_device: cpu\n  gradient_clipping: 0.5\n  gradient_accumulation_steps: 4\n"
    ).run
    assert (run.mesh.dp, run.parallel.zero, run.parallel.offload.value) == (8, 3, "optimizer")
    assert (run.optimizer.clip_norm, run.precision.reduce.value) == (0.5, "bfloat16")
    done = accelerate(
        "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n"
        "  megatron_lm_pp_degree: 2\n  megatron_lm_sequence_parallelism: true\n  megatron_lm_recompute_activations: "
        "true\n  megatron_lm_use_distributed_optimizer: true\n  megatron_lm_other: 1\n"
    )
    mesh, parallel = done.run.mesh, done.run.parallel
    assert (mesh.dp, mesh.tp, mesh.pp, parallel.zero, parallel.sequence) == (2, 2, 2, 1, True)
    assert parallel.recompute.value == "selective"
    assert "not read: megatron_lm_config.megatron_lm_other" in done.notes


@pytest.mark.parametrize(
    "words",
    [
        ("mesh.dp=4", "mesh.cp=2", "parallel.zero=3", "parallel.context=allgather"),
        ("mesh.dp=4", "mesh.tp=2", "parallel.sequence=false"),
        ("mesh.dp=8", "parallel.zero=3", "parallel.reshard_after_forward=false"),
    ],
)
def test_accelerate_there_and_back_is_the_same_twice(words: tuple[str, ...]) -> None:
    there = written(Format.ACCELERATE, *words)
    back = accelerate(there.text, 8).run
    again = convert(dump_run(back), OURS, Format.ACCELERATE)
    assert again.text == there.text
    assert (back.mesh.dp, back.mesh.tp, back.mesh.cp) == tuple(
        load_run(None, list(words)).tables()["mesh"][name] for name in ("dp", "tp", "cp"))  # fmt: skip
    with pytest.raises(RequestError, match="accelerate cannot express it"):
        written(Format.ACCELERATE, *words, "precision.compute=float64")


def test_what_deepspeed_leaves_to_another_program_stays_ours() -> None:
    """It was told that ours stays, and was DeepSpeed's."""
    done = deepspeed(
        2, train_micro_batch_size_per_gpu=1, gradient_clipping="auto",
        optimizer={"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(("warmup_num_steps", "total_num_steps"), "auto")},
    )  # fmt: skip
    ours = load_run(None, ["optimizer.schedule=linear"])
    assert (done.run.optimizer, done.run.train.steps) == (ours.optimizer, ours.train.steps)


@pytest.mark.parametrize("format_", [Format.MEGATRON, Format.TORCHTITAN, Format.DEEPSPEED])
def test_a_batch_that_ranks_do_not_divide_is_told_by_ours(format_: Format) -> None:
    """It was an accumulation of 0 in the file that was written."""
    with pytest.raises(RequestError, match=r"batch\.global = 16 .*32 batch ranks.*batch\.global=32"):
        written(format_, "mesh.dp=32", "parallel.zero=0", "batch.global=16")


@pytest.mark.parametrize("format_", [Format.TORCHTITAN, Format.DEEPSPEED])
def test_least_rates_come_back_to_the_digit(format_: Format) -> None:
    """A share of the peak times the peak was another float, and told as lost."""
    for peak in (3e-3, 1.7e-4, 6e-5, 2.2e-4, 9.1e-6):
        for part in (0.1, 0.07, 1 / 3, 0.011):
            rates = f"optimizer.learning_rate={peak!r}", f"optimizer.min_learning_rate={peak * part!r}"
            assert not any("rate" in each for each in written(format_, "mesh.dp=1", *rates).lost)
