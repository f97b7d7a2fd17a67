"""Runs in other trainers' words and back: equal, listed as lost, or refused by name."""

import contextlib
import json
import tomllib
from itertools import product

import pytest
import yaml

from meshwright.arch.resolve import arch_from_model
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run, change_run, dump_run, load_run
from meshwright.price.foreign.convert import convert
from meshwright.price.foreign.dialect import Format

OURS = Format.MESHWRIGHT
MODEL = ("model.preset=llama3-70b", "data.sequence_length=8192", "batch.global=512", "batch.micro=1",
         "precision.compute=bfloat16")  # fmt: skip
LAYOUTS = {
    Format.MEGATRON: ("mesh.dp=8", "mesh.tp=8", "mesh.pp=4", "mesh.cp=2", "parallel.zero=1",
                      "parallel.schedule=interleaved", "parallel.chunks=5", "parallel.recompute=full"),
    Format.TORCHTITAN: ("model.preset=llama3.1-70b", "mesh.dp=32", "mesh.tp=8", "parallel.zero=3",
                        "parallel.zero_shard_within=8", "parallel.recompute=full", "parallel.compile=true"),
    Format.DEEPSPEED: ("mesh.dp=64", "parallel.zero=3", "parallel.offload=optimizer"),
    Format.ACCELERATE: ("mesh.dp=16", "mesh.tp=4", "parallel.sequence=false", "parallel.zero=3",
                        "parallel.zero_shard_within=8", "parallel.recompute=full"),
}  # fmt: skip


def text_of(*words: str) -> str:
    return dump_run(load_run(None, [*MODEL, *words]))


@pytest.mark.parametrize("format_", list(LAYOUTS))
def test_round_trip_keeps_the_layout_and_lists_the_rest(format_: Format) -> None:
    run = load_run(None, [*MODEL, *LAYOUTS[format_]])
    there = convert(dump_run(run), OURS, format_)
    kept = () if format_ in (Format.MEGATRON, Format.TORCHTITAN) else ("model.preset=llama3-70b",)
    sizes = ("batch.global=512", "batch.micro=1") if format_ is Format.ACCELERATE else ()
    back = build_run(tomllib.loads(convert(there.text, format_, OURS, (*kept, *sizes)).text))
    for name in ("dp", "tp", "pp", "cp", "ep", "order"):
        assert getattr(back.mesh, name) == getattr(run.mesh, name)
    for name in ("zero", "zero_shard_within", "recompute", "schedule", "chunks", "offload", "context", "compile"):
        assert getattr(back.parallel, name) == getattr(run.parallel, name), name
    assert back.batch == run.batch
    assert back.precision.compute is run.precision.compute
    differing = [section for section, table in run.tables().items() if table != back.tables()[section]]
    told = " ".join(there.lost)
    for section in differing:
        if section not in ("name", "model", "parallel"):
            assert section in told, (section, there.lost)
    assert any("loss" in note for note in there.notes)


def test_megatron_keeps_the_model_and_the_optimizer() -> None:
    run = load_run(None, [*MODEL, "mesh.dp=2", "mesh.tp=4", "optimizer.betas=[0.9,0.98]", "optimizer.schedule=linear"])
    there = convert(dump_run(run), OURS, Format.MEGATRON)
    back = build_run(tomllib.loads(convert(there.text, Format.MEGATRON, OURS).text))
    assert arch_from_model(back.model) == arch_from_model(run.model)
    assert back.optimizer == run.optimizer
    assert there.lost == ()


def test_files_load_in_plain_parsers() -> None:
    """In the parsers that the other projects use for their files."""
    made = {format_: convert(text_of(*LAYOUTS[format_]), OURS, format_).text for format_ in LAYOUTS}
    assert json.loads(made[Format.DEEPSPEED])["zero_optimization"]["stage"] == 3
    assert tomllib.loads(made[Format.TORCHTITAN])["parallelism"]["data_parallel_replicate_degree"] == 4
    loaded = yaml.safe_load(made[Format.ACCELERATE])
    assert loaded["parallelism_config"]["parallelism_config_dp_shard_size"] == 8
    assert loaded["num_processes"] == 64


@pytest.mark.parametrize(
    ("format_", "words", "named"),
    [
        (Format.MEGATRON, ("mesh.pp=2", "parallel.schedule=zb-h1"), "parallel.schedule"),
        (Format.MEGATRON, ("mesh.tp=2", "mesh.dp=2", "mesh.order=[tp,pp,dp,ep,cp]"), "mesh.order"),
        (Format.TORCHTITAN, ("mesh.dp=4", "parallel.zero=1"), "parallel.zero"),
        (Format.TORCHTITAN, ("mesh.dp=4", "mesh.cp=2", "parallel.context=ulysses"), "parallel.context"),
        (Format.DEEPSPEED, ("mesh.dp=2", "mesh.pp=2"), "mesh.pp"),
        (Format.DEEPSPEED, ("mesh.dp=2", "mesh.cp=2"), "parallel.context"),
        (Format.ACCELERATE, ("mesh.dp=2", "mesh.pp=2"), "mesh.pp"),
        (Format.ACCELERATE, ("mesh.dp=4", "parallel.zero=2"), "parallel.zero"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused_by_name(format_: Format, words: tuple[str, ...], named: str) -> None:
    with pytest.raises(RequestError, match=named.replace(".", r"\.")):
        convert(text_of(*words), OURS, format_)


def test_experts_folded_over_context_are_refused() -> None:
    """DP 1, CP 2, EP 2: legal in Megatron, whose EP is no factor of the world."""
    text = "# ranks 2\n--num-layers 2 --hidden-size 64 --num-attention-heads 4 --context-parallel-size 2 " \
           "--expert-model-parallel-size 2"  # fmt: skip
    with pytest.raises(RequestError, match="expert-model-parallel-size 2"):
        convert(text, Format.MEGATRON, OURS)


def test_megatron_experts_take_their_place_beside_data() -> None:
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu "
        "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
    )
    text = (
        f"{words} --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --vocab-size 96 --kv-channels 16"
    )
    done = convert(text, Format.MEGATRON, OURS, ranks=16)
    assert (done.run.mesh.dp, done.run.mesh.ep) == (4, 4)
    assert any("each micro-batch's mean" in note for note in done.notes)


def test_titans_default_keeps_stages_gathered() -> None:
    text = '[model]\nname="llama3"\nflavor="8B"\n[training]\nglobal_batch_size=64\n[parallelism]\n' \
           "pipeline_parallel_degree=2\ndata_parallel_shard_degree=4\n"  # fmt: skip
    run = convert(text, Format.TORCHTITAN, OURS).run
    assert run.parallel.reshard_after_forward is False
    assert run.parallel.zero == 3
    assert run.model.preset == "llama3.1-8b"


def test_deepspeed_finds_the_ranks_in_its_batch_arithmetic() -> None:
    text = json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
                       "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})  # fmt: skip
    run = convert(text, Format.DEEPSPEED, OURS).run
    assert (run.mesh.dp, run.parallel.zero, run.batch.micro) == (8, 2, 2)


def test_yaml_of_accelerate_is_read() -> None:
    text = "# written by accelerate config\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n" \
           "  fsdp_activation_checkpointing: true\nmixed_precision: 'bf16'\nnum_processes: 8\n"  # fmt: skip
    run = convert(text, Format.ACCELERATE, OURS).run
    assert (run.mesh.dp, run.parallel.zero, run.parallel.recompute.value) == (8, 3, "full")


def test_from_one_stranger_to_another() -> None:
    text = convert(text_of(*LAYOUTS[Format.DEEPSPEED][:2]), OURS, Format.DEEPSPEED).text
    done = convert(text, Format.DEEPSPEED, Format.ACCELERATE, ("model.preset=llama3-70b",))
    assert "parallelism_config_dp_shard_size: 64" in done.text
    assert change_run(done.run, ()) == done.run


@pytest.mark.parametrize(
    ("format_", "text", "told"),
    [
        (Format.MEGATRON, "--num-layers abc", "wants a number"),
        (Format.MEGATRON, "--num-layers 4", "--hidden-size"),
        (Format.MEGATRON, "--tensor-model-parallel-size 0", "at least 1"),
        (Format.MEGATRON, "--tensor-model-parallel-size", "wants a number"),
        (Format.MEGATRON, "--cp-comm-type fast", "p2p"),
        (Format.MEGATRON, "--adam-beta1 x", "wants a number"),
        (Format.MEGATRON, "--num-distributed-optimizer-instances x", "wants a number"),
        (Format.MEGATRON, "--data-path 'open", "shell"),
        (Format.DEEPSPEED, "[1, 2]", "an object is wanted"),
        (Format.DEEPSPEED, '{"zero_optimization": 3}', "wants a table"),
        (Format.DEEPSPEED, '{"zero_optimization": {"offload_param": "cpu"}}', "wants a table"),
        (Format.DEEPSPEED, '{"train_batch_size": 0}', "at least 1"),
        (Format.DEEPSPEED, '{"train_batch_size": "8"}', "at least 1"),
        (Format.DEEPSPEED, '{"optimizer": {"params": {"lr": 1}}, "data_types": {"grad_accum_dtype": "x"}}', "fp32"),
        (Format.ACCELERATE, "fsdp_config: 7", "wants a table"),
        (Format.ACCELERATE, "num_processes: many", "whole number"),
        (Format.ACCELERATE, "names: [1", "name: value"),
        (Format.TORCHTITAN, '[parallelism]\ntensor_parallel_degree = "x"', "whole number"),
        (Format.TORCHTITAN, "[training]\nlocal_batch_size = 0", "at least 1"),
    ],
)
def test_a_wrong_file_is_refused_by_name(format_: Format, text: str, told: str) -> None:
    """Some of these were an AttributeError or a KeyError of the reader, and exit code 1."""
    with pytest.raises(RequestError, match=told):
        convert(text, format_, OURS, ranks=4)


@pytest.mark.parametrize("format_", [Format.MEGATRON, Format.TORCHTITAN, Format.DEEPSPEED, Format.ACCELERATE])
def test_every_cut_of_shards_and_every_type_is_written_or_refused(format_: Format) -> None:
    """Groups smaller than cp were a ZeroDivisionError of two writers, sums in float64 a KeyError of a third and a value
    that torchtitan's own parser refuses."""
    written = 0
    for cp, zero, within, dtype in product((1, 2, 4), (0, 1, 3), (0, 1, 2, 4), ("float32", "bfloat16", "float64")):
        words = ("mesh.dp=4", f"mesh.cp={cp}", f"parallel.zero={zero}", f"parallel.zero_shard_within={within}",
                 "precision.compute=bfloat16", f"precision.reduce={dtype}", "data.sequence_length=64")  # fmt: skip
        with contextlib.suppress(RequestError):
            done = convert(text_of(*words), OURS, format_)
            assert any("precision.reduce" in lost for lost in done.lost) or dtype != "float64"
            written += 1
    assert written > 5


def test_ranks_that_the_file_contradicts_are_refused() -> None:
    text = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}'
    assert convert(text, Format.DEEPSPEED, OURS, ranks=4).run.mesh.dp == 4
    with pytest.raises(RequestError, match="3 ranks"):
        convert(text, Format.DEEPSPEED, OURS, ranks=3)
