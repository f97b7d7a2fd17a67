"""Every family that runs comes in from a published folder and goes out again bit for bit, through any layout."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.arch.parameters import tensors
from meshwright.checkpoint.errors import DamagedError
from meshwright.checkpoint.huggingface.convert import export_checkpoint, import_checkpoint
from meshwright.checkpoint.huggingface.names import hf_tensors
from meshwright.checkpoint.huggingface.read import open_hf
from meshwright.checkpoint.plans import plan_from
from meshwright.checkpoint.relayout import on_layout
from meshwright.checkpoint.rewrite import reshard
from meshwright.checkpoint.source import fill
from meshwright.checkpoint.storage import open_storage
from meshwright.cli.main import main
from meshwright.config.errors import RequestError
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import full
from meshwright.model import build_decoder
from tests.unit.model.test_transformers import FAMILIES, build_reference, config_of
from tests.unit.model.tiny import LLAMA, logits_of, rows_of, tokens_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::meshwright.arch.huggingface.read.ConfigWarning")
LENGTH = 32


def saved_folder(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random model of the family, saved by transformers."""
    model = build_reference(FAMILIES[name], dtype)
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return model


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def check_equal_folders(one: Path, other: Path) -> None:
    before, after = weights_of(one), weights_of(other)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype, name
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """HF -> checkpoint of one file -> tp 2 x pp 2 x dp 2, ZeRO 3 -> HF; transformers gives the same logits."""
    model = saved_folder(name, tmp_path / "in")
    manifest = import_checkpoint(tmp_path / "in", tmp_path / "one")
    plan = plan_from(manifest.plan, "plan")
    cut = on_layout(plan, ["mesh.dp=2", "mesh.pp=2", "mesh.tp=2", "parallel.zero=3"])
    resharded = reshard(open_storage(tmp_path / "one"), "", tmp_path / "cut", cut)
    assert len(resharded.files) > 2
    assert {t.name: t.fingerprint for t in resharded.tensors} == {t.name: t.fingerprint for t in manifest.tensors}
    export_checkpoint(open_storage(tmp_path / "cut"), "", tmp_path / "out", like=tmp_path / "in")
    check_equal_folders(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = tokens_of(FAMILIES[name].arch, 2, LENGTH)
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_imported_weights_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = saved_folder(name, tmp_path / "in")
    opened = open_hf(tmp_path / "in")
    decoder = build_decoder(opened.arch, device="cpu").eval()
    held = dict(decoder.named_parameters())
    with torch.no_grad():
        for parameter in held.values():
            parameter.fill_(torch.nan)
    fill(opened.source, {Piece(t.name, full(t.shape)): held[t.name].data for t in tensors(opened.arch)})
    tokens = tokens_of(opened.arch, 2, LENGTH)
    with torch.no_grad():
        theirs = model(input_ids=tokens).logits
    ours = logits_of(decoder, tokens, rows_of(opened.arch, 2, LENGTH, dtype=torch.float32))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_stored_type_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    saved_folder("qwen3", tmp_path / "in", dtype)
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    check_equal_folders(tmp_path / "in", tmp_path / "out")


def test_another_type_is_rounded_once(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out", dtype=torch.bfloat16)
    before, after = weights_of(tmp_path / "in"), weights_of(tmp_path / "out")
    assert all(torch.equal(before[name].to(torch.bfloat16), after[name]) for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_type_that_cannot_hold_the_values_is_refused(tmp_path: Path) -> None:
    """70,000 became infinite in float16, and the export said nothing."""
    model = saved_folder("llama", tmp_path / "in")
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] = 70_000.0
    model.save_pretrained(tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    storage = open_storage(tmp_path / "one")
    with pytest.raises(RequestError, match=r"--dtype float16: embedding\.weight has values beyond 65504, the"):
        export_checkpoint(storage, "", tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    export_checkpoint(storage, "", tmp_path / "out", dtype=torch.bfloat16)


def test_settings_from_nowhere_are_refused(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    for like, told in (("", "''"), (f"{tmp_path}/nowhere", f"{tmp_path}/nowhere")):
        with pytest.raises(RequestError, match=f"--like {told}: is no folder"):
            export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out", like=like)


def test_a_sharded_index_is_read_and_written(tmp_path: Path) -> None:
    model = saved_folder("llama", tmp_path / "in", max_shard_size="60KB")
    assert len(list((tmp_path / "in").glob("model-*.safetensors"))) > 2
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    done = export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out", shard_bytes=60_000)
    assert len(done.files) > 2
    assert done.num_bytes == sum(each.numel() * 4 for each in model.state_dict().values())
    check_equal_folders(tmp_path / "in", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_tied_weights_are_written_once_even_where_they_were_stored_twice(tmp_path: Path) -> None:
    saved_folder("llama tied, one key head", tmp_path / "in")
    held = weights_of(tmp_path / "in")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(held, tmp_path / "in" / "model.safetensors")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    written = weights_of(tmp_path / "out")
    assert "lm_head.weight" not in written
    assert not any("inv_freq" in name for name in written)


@pytest.mark.parametrize("change", [lambda head: head.index_fill(0, torch.tensor([-1]), 1.0),
                                    lambda head: head[:-1].clone(), lambda head: head.double()])  # fmt: skip
def test_a_tied_head_that_is_another_is_not_left_out(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """transformers loads both and ties neither; here the head was dropped without a word."""
    saved_folder("llama tied, one key head", tmp_path / "in")
    held = weights_of(tmp_path / "in")
    held["lm_head.weight"] = change(held["model.embed_tokens.weight"])
    save_file(held, tmp_path / "in" / "model.safetensors")
    with pytest.raises(RequestError, match=r"in: holds a lm_head\.weight that is not its embedding"):
        import_checkpoint(tmp_path / "in", tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_types_side_by_side_are_held_by_one_that_loses_nothing(tmp_path: Path) -> None:
    """Beside float16, bfloat16 was imported as float16: large values became infinite, small ones zero."""
    saved_folder("llama", tmp_path / "in")
    before = weights_of(tmp_path / "in")
    mixed = {name: (value * 1e30).bfloat16() if "mlp" in name else value.half() for name, value in before.items()}
    save_file(mixed, tmp_path / "in" / "model.safetensors")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    after = weights_of(tmp_path / "out")
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], mixed[name].float()) for name in mixed)


def test_names_without_the_prefix_of_the_base_model_are_known(tmp_path: Path) -> None:
    saved_folder("gpt2", tmp_path / "in")
    held = {name.removeprefix("transformer."): value for name, value in weights_of(tmp_path / "in").items()}
    held["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(held, tmp_path / "in" / "model.safetensors")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    assert "transformer.wte.weight" in weights_of(tmp_path / "out")


def test_layers_stay_in_their_place(tmp_path: Path) -> None:
    """Layer i is filled with i: cut into stages, even interleaved ones, it still holds i."""
    arch = replace(LLAMA, layers=4)
    folder = tmp_path / "in"
    config = config_of(FAMILIES["llama"])
    config.num_hidden_layers = 4
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for parameter in layer.parameters():
                parameter.fill_(number)
    model.save_pretrained(folder)
    plan = plan_from(import_checkpoint(folder, tmp_path / "one").plan, "plan")
    assert plan.arch.layers == arch.layers
    for name, keys in {
        "pp2": ["mesh.pp=2"],
        "pp4": ["mesh.pp=4"],
        "chunks": ["mesh.pp=2", "parallel.schedule=interleaved", "parallel.chunks=2"],
    }.items():
        reshard(open_storage(tmp_path / "one"), "", tmp_path / name, on_layout(plan, keys))
        export_checkpoint(open_storage(tmp_path / name), "", tmp_path / f"out-{name}")
        written = weights_of(tmp_path / f"out-{name}")
        for number in range(4):
            mine = [value for key, value in written.items() if key.startswith(f"model.layers.{number}.")]
            assert mine
            assert all(bool((value == number).all()) for value in mine), (name, number)


@pytest.mark.parametrize("family", ["MixtralConfig", "Qwen3MoeConfig"])
def test_experts_are_carried_one_by_one(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In and out, over expert and tensor ranks; one process speaks from the files of either."""
    sizes = {
        "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "num_experts_per_tok": 2,
    }  # fmt: skip
    more = {"num_local_experts": 4} if family == "MixtralConfig" else {"num_experts": 4, "moe_intermediate_size": 24}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**sizes, **more))
    model.save_pretrained(tmp_path / "in")
    manifest = import_checkpoint(tmp_path / "in", tmp_path / "one")
    cut = on_layout(plan_from(manifest.plan, "plan"), ["mesh.ep=2", "mesh.tp=2"])
    resharded = reshard(open_storage(tmp_path / "one"), "", tmp_path / "cut", cut)
    assert {t.name: t.fingerprint for t in resharded.tensors} == {t.name: t.fingerprint for t in manifest.tensors}
    export_checkpoint(open_storage(tmp_path / "cut"), "", tmp_path / "out")
    check_equal_folders(tmp_path / "in", tmp_path / "out")
    capsys.readouterr()
    said = []
    for folder in ("one", "cut"):
        words = ["generate", str(tmp_path / folder), "--prompt", "x", "--tokens", "3", "--tokenizer", "bytes"]
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith("x")
    assert said[0] == said[1]


def test_head_dim_and_token_ids_stay(tmp_path: Path) -> None:
    saved_folder("llama, wide heads", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "bos_token_id": 5, "eos_token_id": [6, 7]}))
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["head_dim"], written["bos_token_id"], written["eos_token_id"]) == (32, 5, [6, 7])


# ---------------------------------------------------------------------- what is refused


def test_pickles_are_named_and_never_opened(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    (tmp_path / "in" / "model.safetensors").unlink()
    _booby_trap(tmp_path / "in" / "pytorch_model.bin", tmp_path / "ran")
    with pytest.raises(RequestError, match=r"pytorch_model\.bin: is a pickle"):
        open_hf(tmp_path / "in")
    _booby_trap(tmp_path / "in" / "model.safetensors", tmp_path / "ran")
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        open_hf(tmp_path / "in")
    assert not (tmp_path / "ran").exists()


class _Trap:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def _booby_trap(file: Path, marker: Path) -> None:
    file.write_bytes(pickle.dumps(_Trap(marker)))


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    held = weights_of(tmp_path / "in")

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, tmp_path / "in" / "model.safetensors")
        with pytest.raises(RequestError, match=message):
            open_hf(tmp_path / "in")

    refused({k: v for k, v in held.items() if "norm" not in k}, r"has no model\.layers\.0\.input_layernorm\.weight")
    refused({**held, "model.layers.2.mlp.up_proj.weight": torch.ones(2)}, r"holds model\.layers\.2\.mlp\.up_proj")
    refused({**held, "lm_head.weight": torch.ones(104, 64)}, r"lm_head\.weight of shape \[104, 64\]")
    refused({**held, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, "quantised")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "a/../b.safetensors", "x.bin"])
def test_an_index_names_only_plain_files(name: str, tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DamagedError, match="only plain"):
        open_hf(tmp_path / "in")


def test_a_download_cache_is_read_through_its_links(tmp_path: Path) -> None:
    """models--org--name/snapshots/REVISION holds links to ../../blobs/DIGEST, side files and index included."""
    saved_folder("llama", tmp_path / "in", max_shard_size="60KB")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((tmp_path / "in").iterdir())):
        shutil.copy(file, blobs / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    import_checkpoint(snapshot, tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    check_equal_folders(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "model.safetensors.index.json"])
def test_no_link_leads_out_of_a_folder(name: str, tmp_path: Path) -> None:
    """A downloaded folder may hold links to any file of this machine, and what it holds is carried on."""
    saved_folder("llama", tmp_path / "in")
    file = tmp_path / "in" / name
    (tmp_path / "secret").write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(RequestError, match=f"{name}: is a link to .*secret, out of its folder, and is not followed"):
        import_checkpoint(tmp_path / "in", tmp_path / "one")
    assert not (tmp_path / "one").exists()
    (tmp_path / "secret").rename(tmp_path / "in" / "kept")
    file.unlink()
    if name != "model.safetensors.index.json":
        file.symlink_to("kept")
    import_checkpoint(tmp_path / "in", tmp_path / "one")


def test_a_config_of_any_name_is_imported_with_its_folder(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    (tmp_path / "in" / "config.json").rename(tmp_path / "in" / "small.json")
    import_checkpoint(tmp_path / "in" / "small.json", tmp_path / "one")
    export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")
    check_equal_folders(tmp_path / "in", tmp_path / "out")


def test_a_link_beside_imported_weights_is_not_carried_out(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    kept = tmp_path / "one" / "huggingface" / "tokenizer.json"
    kept.unlink()
    (tmp_path / "secret").write_text("secret")
    kept.symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedError, match=r"tokenizer\.json: is a link, and links are not followed"):
        export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    saved_folder("llama", tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "one")
    with pytest.raises(RequestError, match="not empty"):
        import_checkpoint(tmp_path / "in", tmp_path / "one")
    with pytest.raises(RequestError, match="not empty"):
        export_checkpoint(open_storage(tmp_path / "one"), "", tmp_path / "in")
    shutil.rmtree(tmp_path / "in")
    assert list(tmp_path.glob("*.tmp-*")) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_logical_element_is_named_once(name: str) -> None:
    arch = FAMILIES[name].arch
    pieces = {part.piece for tensor in hf_tensors(arch) for part in tensor.parts}
    assert {piece.tensor for piece in pieces} == {tensor.name for tensor in tensors(arch)}
    assert sum(len(tensor.parts) for tensor in hf_tensors(arch)) == len(pieces)
    assert sum(piece.rectangle.numel for piece in pieces) == sum(tensor.numel for tensor in tensors(arch))
