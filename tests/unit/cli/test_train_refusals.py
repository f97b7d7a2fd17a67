"""What `train` finds wrong with the weights it shall start from, before any rank is started."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 257,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "code", "message"),
    [(None, 2, "holds neither model.safetensors nor"), (b"x" * 16, 1, "says its header has")],
)
def test_weights_that_cannot_be_loaded_start_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    weights: bytes | None,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("meshwright.launch.local.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    run = [f"model.hf={tmp_path}", "model.weights=load", f"train.output={tmp_path}", "train.steps=1"]
    assert main(["train", *run]) == code
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
