"""Data as a run meets it: what is told, what is refused before any rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.launch.status import RankStatus
from meshwright.train.loop import train_joined
from tests.ranks.train.jobs import TEXT, steps, tiny_job


def test_bad_lines_are_told_and_the_rest_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B78: line, reason and count of what is left out; the run goes on with what is good."""
    good = [json.dumps({"text": TEXT}), json.dumps({"prompt": "x" * 200, "completion": "y" * 200})]
    file = tmp_path / "mixed.jsonl"
    file.write_bytes("\n".join([good[0], "{broken", '{"text": ""}', '{"body": 1}', good[1]]).encode() + b'\n{"\xff"}\n')
    job = tiny_job(
        tmp_path, 1, data={"source": str(tmp_path / "*.jsonl"), "eval_fraction": 0.0}, train={"steps": 2},
    )  # fmt: skip
    train_joined(RankStatus(), job)
    told = capsys.readouterr().out
    assert "2 documents" in told
    assert "1 empty texts left out, 3 bad records left out" in told
    for line, reason in ((2, "not JSON"), (4, "has no field"), (6, "not UTF-8")):
        assert f"left out: {file}:{line}: {reason}" in told
    assert len(steps(job)) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.source=WIDE", "model.vocab=60000"], "wide.bin: is read as uint16 (data.dtype), but looks like uint32"),
        (["data.source=NARROW", "data.dtype=uint32", "model.vocab=60000"], "looks like uint16"),
        (["data.source=NARROW", "model.vocab=300"], "narrow.bin holds 50000 as token 2; what works: model.vocab = 5"),
        (["data.source=nothing/*.txt"], "matches no file"),
        (["data.source=CORPUS", "model.vocab=100"], "the tokenizer's 257 tokens; what works: model.vocab = 257"),
        (["model.preset=deepseek-v3"], "can be priced, not run: latent attention"),
        (["data.source=CORPUS", "data.tokenizer=nowhere"], "nowhere"),
        (["survive.on_nonfinite=rollback"], "going back to a checkpoint is not built yet"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_before_any_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    files = {"CORPUS": tmp_path / "corpus.txt", "WIDE": tmp_path / "wide.bin", "NARROW": tmp_path / "narrow.bin"}
    files["CORPUS"].write_text(TEXT)
    tokens = np.array([1, 299, 50_000, 17, 3] * 4096)
    tokens.astype("<u4").tofile(files["WIDE"])
    tokens.astype("<u2").tofile(files["NARROW"])
    for name, file in files.items():
        words = [word.replace(name, str(file)) for word in words]
    code = main(["train", f"train.output={tmp_path / 'runs'}", *words])
    found = capsys.readouterr()
    assert code == 2, found.err
    assert told in found.err
    assert "Traceback" not in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_a_vocabulary_far_above_the_data_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_joined(RankStatus(), tiny_job(tmp_path, 1, model={"vocab": 1000}, train={"steps": 1, "eval_every": 0}))
    assert "warning: the data has 257 of the model's 1,000 tokens" in capsys.readouterr().out
