"""show, check, reshard, import, export, evaluate and generate on a tiny model of transformers, through `cli.main`."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.cli.main import main

transformers = pytest.importorskip("transformers")

Captured = pytest.CaptureFixture[str]
TEXT = "\n".join(f"def f{i}(x): return x * {i}" for i in range(80))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf: as transformers writes it; saved: imported; cut: resharded to four ranks."""
    place = tmp_path_factory.mktemp("commands")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=257, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(place / "hf", max_shard_size="20KB")
    (place / "text.txt").write_text(TEXT)
    assert main(["import", f"{place}/hf", f"{place}/saved"]) == 0
    layout = ["mesh.dp=2", "mesh.tp=2", "parallel.zero=3"]
    assert main(["checkpoint", "reshard", f"{place}/saved", f"{place}/cut", *layout]) == 0
    return place


def value_of(capsys: Captured, *words: object, code: int = 0) -> dict[str, Any]:
    """The one JSON object on standard output."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


def test_show(place: Path, capsys: Captured) -> None:
    one, cut = (value_of(capsys, "checkpoint", "show", place / name) for name in ("saved", "cut"))
    assert one.keys() >= {"step", "plan", "mesh", "complete", "bytes", "tensors"}
    assert one["tensors"][0].keys() == {"name", "shape", "dtype", "fingerprint", "pieces"}
    assert [one["mesh"], cut["mesh"]] == [
        {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
        {"dp": 2, "tp": 2, "pp": 1, "cp": 1, "ep": 1},
    ]
    assert [[t["name"], t["shape"], t["fingerprint"]] for t in one["tensors"]] == [
        [t["name"], t["shape"], t["fingerprint"]] for t in cut["tensors"]
    ]
    assert max(t["pieces"] for t in one["tensors"]) == 1 < max(t["pieces"] for t in cut["tensors"])
    assert main(["checkpoint", "show", f"{place}/cut"]) == 0
    assert "saved on dp 2 x tp 2, ZeRO 3" in capsys.readouterr().out


def test_check(place: Path, tmp_path: Path, capsys: Captured) -> None:
    value = value_of(capsys, "checkpoint", "check", place / "cut")
    assert (value["ok"], value["step"], value["problems"]) == (True, 0, [])
    whole = value_of(capsys, "checkpoint", "reshard", place / "cut", tmp_path / "back", "mesh.dp=1", "mesh.tp=1")
    assert whole["folder"] == str(tmp_path / "back")
    file = tmp_path / "back" / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    [problem] = value_of(capsys, "checkpoint", "check", tmp_path / "back", code=1)["problems"]
    assert problem.keys() == {"file", "problem", "tensor", "expected", "actual"}
    assert problem["file"] == str(file)
    assert main(["checkpoint", "check", str(tmp_path / "back")]) == 1
    assert capsys.readouterr().out.startswith("damaged  ")
    for words in (["export", str(tmp_path / "back"), str(tmp_path / "hf")], ["evaluate", str(tmp_path / "back")]):
        assert main([*words, *([f"data.source={place}/text.txt"] if words[0] == "evaluate" else [])]) == 1
        assert "data-00000.safetensors: bytes" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_export_gives_back_what_was_imported(place: Path, tmp_path: Path, capsys: Captured) -> None:
    value = value_of(capsys, "export", place / "cut", tmp_path / "hf", "--shard-bytes", 20_000)
    assert value.keys() == {"folder", "tensors", "bytes", "files"}
    assert len(value["files"]) > 1
    before, after = (
        {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
        for folder in (place / "hf", tmp_path / "hf")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(before) == value["tensors"]


def test_evaluate_is_equal_on_every_layout(place: Path, capsys: Captured) -> None:
    keys = (f"data.source={place}/text.txt", "data.sequence_length=32")
    values = [value_of(capsys, "evaluate", place / name, *keys) for name in ("saved", "cut")]
    assert values[0] == values[1]
    assert values[0].keys() == {"loss", "perplexity", "tokens", "split", "source"}
    assert abs(values[0]["loss"] - math.log(257)) < 0.1
    assert values[0]["perplexity"] == pytest.approx(math.exp(values[0]["loss"]))


def test_generate_as_transformers_does(place: Path, capsys: Captured) -> None:
    value = value_of(capsys, "generate", place / "cut", "--prompt", "def", "--temperature", 0, "--tokens", 6)
    assert value.keys() == {"prompt", "text", "tokens", "seconds", "tokens_per_second"}
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "hf").eval()
    tokens = list(b"def")
    for _ in range(len(value["tokens"])):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert value["tokens"] == tokens[3:]
    drawn = ["--prompt", "def", "--tokens", "6", "--seed", "4", "--top-k", "9", "--top-p", "0.9"]
    assert (
        value_of(capsys, "generate", place / "saved", *drawn)["tokens"]
        == (value_of(capsys, "generate", place / "cut", *drawn)["tokens"])
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("checkpoint show {0}/nowhere", "nowhere: is no checkpoint"),
        ("checkpoint look {0}/saved", "invalid choice: 'look'"),
        ("checkpoint show {0}/saved {0}/cut", "show takes DIR"),
        ("checkpoint reshard {0}/saved", "reshard takes DIR OUT"),
        ("checkpoint reshard {0}/saved {0}/new mesh.tp=3", "mesh.tp = 3: must divide the 4 query heads"),
        ("checkpoint reshard {0}/saved {0}/new model.hidden=32", "model.hidden: cannot be changed here"),
        ("checkpoint reshard {0}/saved {0}/cut", "cut: exists and is not empty; nothing is overwritten"),
        ("import {0}/nowhere {0}/new", "neither a config.json nor a folder that holds one"),
        ("import {0}/hf {0}/saved", "saved: exists and is not empty; nothing is overwritten"),
        ("export {0}/nowhere {0}/new", "nowhere: is no checkpoint"),
        ("export {0}/saved {0}/hf", "hf: exists and is not empty; nothing is overwritten"),
        ("export {0}/saved {0}/new --dtype int8", "invalid choice: 'int8'"),
        ("export {0}/saved {0}/new --like {0}/nowhere", "nowhere: is no folder"),
        ("evaluate {0}/saved data.source={0}/none.txt", "there is no such file or folder"),
        ("evaluate {0}/saved mesh.cp=3", "mesh.cp = 3: cp must divide the sequence length of"),
        ("evaluate {0}/saved optimizer.kind=sgd", "optimizer.kind: cannot be changed here"),
        ("generate {0}/saved", "required: --prompt"),
        ("generate {0}/saved --prompt x --temperature warm", "warm is no number from 0 on"),
        ("generate {0}/saved --prompt x --top-p 0", "0 is no share above 0, at most 1"),
        ("generate {0}/saved --prompt x --seed 9999999999999999999999", "is more than 9223372036854775807"),
        ("generate {0}/saved --prompt \udcff", "--prompt '\\udcff': is not UTF-8"),
        ("import {0}/hf {0}/text.txt", "text.txt: is no folder"),
        ("import {0}/hf {0}/text.txt/below", "below: {0}/text.txt is no folder"),
        ("checkpoint reshard {0}/saved {0}/text.txt", "text.txt: is no folder"),
        ("export {0}/saved {0}/text.txt", "text.txt: is no folder"),
        ("generate {0}/saved --prompt x --tokenizer {0}/none.json", "there is no such file"),
    ],
)
def test_a_wrong_request_is_one_message_and_writes_nothing(
    words: str, told: str, place: Path, capsys: Captured
) -> None:
    before = sorted(place.iterdir())
    assert main(words.format(place).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert told.format(place) in err
    assert sorted(place.iterdir()) == before


def test_weights_that_are_no_numbers_are_told_and_exit_1(place: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(place / "hf", tmp_path / "hf")
    file = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    save_file({name: each.fill_(math.nan) for name, each in load_file(file).items()}, file)
    assert main(["import", f"{tmp_path}/hf", f"{tmp_path}/saved"]) == 0
    for temperature in ("0", "1"):
        assert main(["generate", f"{tmp_path}/saved", "--prompt", "x", "--temperature", temperature]) == 1
        assert "error: the model's logits are not finite" in capsys.readouterr().err
    value = value_of(
        capsys, "evaluate", tmp_path / "saved", f"data.source={place}/text.txt", "data.sequence_length=32", code=1
    )
    assert (value["loss"], value["perplexity"]) == (None, None)


def test_a_model_is_read_with_the_tokenizer_it_came_with(place: Path, tmp_path: Path, capsys: Captured) -> None:
    """Byte ids mean nothing to another model: `evaluate` took them without a word, and so did both after a reshard."""
    shutil.copytree(place / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(_WORDS))
    assert main(["import", f"{tmp_path}/hf", f"{tmp_path}/saved"]) == 0
    assert main(["checkpoint", "reshard", f"{tmp_path}/saved", f"{tmp_path}/cut", "mesh.tp=2"]) == 0
    (tmp_path / "words.txt").write_text("the cat " * 40)
    for name in ("saved", "cut"):
        keys = (f"data.source={tmp_path}/words.txt", "data.sequence_length=16")
        assert value_of(capsys, "evaluate", tmp_path / name, *keys)["tokens"] == 80
        value = value_of(capsys, "generate", tmp_path / name, "--prompt", "the cat", "--tokens", 3)
        assert set(value["text"].split()) <= {"the", "cat"}
        assert (tmp_path / name / "huggingface" / "tokenizer.json").is_file()


def test_imported_weights_without_a_tokenizer_are_no_byte_model(tmp_path: Path, capsys: Captured) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert main(["import", f"{tmp_path}/hf", f"{tmp_path}/saved"]) == 0
    for words in (["generate", f"{tmp_path}/saved", "--prompt", "x"], ["evaluate", f"{tmp_path}/saved"]):
        assert main(words) == 2
        assert "saved: was imported without a tokenizer.json; what works: --tokenizer FILE" in capsys.readouterr().err
    assert main(["generate", f"{tmp_path}/saved", "--prompt", "x", "--tokens", "2", "--tokenizer", "bytes"]) == 0


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    """`checkpoint show | head` ended with "error: input/output: Broken pipe"."""
    words = [sys.executable, "-m", "meshwright", "checkpoint", "show", str(place / "cut")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        assert shown.stderr is not None
        shown.stdout.close()
        assert shown.stderr.read() == ""


_WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"the": 0, "cat": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}
"""A tokenizer of two words."""
