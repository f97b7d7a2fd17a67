"""The explain command tells the plan without starting anything and without torch."""

import json
import subprocess
import sys

import pytest

from meshwright.cli.main import main


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_the_plan_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "mesh.dp=2")
    for section in ("plan:", "model:", "batch:", "mesh:", "buckets of rank 0:", "sent by rank 0 in a step:"):
        assert section in text.splitlines()
    assert "16 = 4 sequences a micro-batch x 2 micro-batches x 2 batch ranks" in text
    assert "3,083,008 parameters" in text


def test_one_of_each_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """It was 1 ranks, 1 micro-batches and 1 batch rank."""
    text = told(capsys, "mesh.dp=1", "batch.global=1", "batch.micro=1", "model.preset=demo")
    assert "1 sequence = 256 tokens an optimizer step" in text
    assert "1 = 1 sequence a micro-batch x 1 micro-batch x 1 batch rank" in text
    assert "1 rank, outermost first" in text
    text = told(capsys, "mesh.dp=1", "mesh.pp=2", "batch.global=1", "batch.micro=1", "--schedule")
    assert "1f1b, 1 micro-batch, bubble" in text


def test_axes_of_attention_and_experts_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Which way keys and values go, and where tokens do, stood nowhere."""
    moe = [
        "model.family=mixtral",
        "model.layers=2",
        "model.hidden=32",
        "model.heads=4",
        "model.ffn=48",
        "model.vocab=257",
    ]
    moe += ["model.experts=8", "model.experts_per_token=2", "moe.z_loss=0.001"]
    text = told(capsys, *moe, "mesh.dp=1", "mesh.cp=4", "parallel.context_inner=2")
    assert "context ring over ulysses groups of 2" in text
    assert "8 experts of 48, 2 a token; balance auxiliary, auxiliary loss 0.01, z loss 0.001" in text
    text = told(capsys, "mesh.dp=2")
    assert "context " not in text
    assert "expert" not in text.partition("mesh:")[0]


def test_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "mesh.dp=4", "--rank", "3")
    assert text.startswith("rank 3 of 4: dp 3 of 4\n")
    assert "group dense: ranks 0, 1, 2, 3" in text
    assert "layers.3.mlp.down.weight" in text
    assert "all_reduce" in text


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "mesh.dp=2", "--program")
    assert "backward of micro-batch 1, layer 0" in text
    assert "program of rank 0, evaluation:" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(told(capsys, "mesh.dp=fill", "--ranks", "4", "--json"))
    assert (plan["ranks"], plan["accumulation"], plan["parameters"]) == (4, 1, 3_083_008)
    rank = json.loads(told(capsys, "mesh.dp=2", "--rank", "1", "--json"))
    assert rank["coordinates"]["dp"] == 1
    assert rank["groups"]["dense"] == [0, 1]
    assert sum(row["calls"] for row in rank["traffic"]) == 9
    held = {piece["tensor"]: piece["stop"] for piece in rank["pieces"]}
    assert held["embedding.weight"] == [257, 256]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "2"], "--rank 2: the mesh has 2 ranks; what works: 0 to 1"),
        (["--ranks", "3"], "3 ranks were started"),
        (["mesh.dp=3"], "must be a multiple of micro x dp 3"),
        (["mesh.dp=fill"], "--ranks N"),
        (
            ["mesh.tp=2", "parallel.asynchronous_tensor=true", "parallel.sequence=false"],
            "an all-reduce needs its whole product; what works: parallel.sequence = true",
        ),
        (["--ranks", "0"], "0 is no number of at least 1"),
        (["batch.global=9223372036854775807"], "must be a multiple of"),
        (["batch.global=4611686018427387904"], "micro-batches a rank are more than a step of 4 blocks takes, 1048576"),
        (["model.layers=9223372036854775807"], "must be at most 65536"),
        (["name=.cache"], "must be the name of one folder"),
    ],
)
def test_a_wrong_request(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


_QUIET = """
import sys
from meshwright.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
raise SystemExit(code)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["explain", "--rank", "1"], 0),
        (["explain", "model.vocab=100"], 2),
        (["explain", "model.vocab=100", "data.source=elsewhere/tokens.bin"], 0),
        (["train", "batch.global=15"], 2),
        (["train", "mesh.dp=3"], 2),
        (["train", "data.source=nothing.txt"], 2),
        (["train", "data.sequence_length=100000000"], 2),
        (["train", "data.tokenizer=nothing.json"], 2),
        (["train", "model.vocab=100"], 2),
        (["train", "mesh.dp=100000", "batch.global=100000", "batch.micro=1"], 2),
    ],
)
def test_torch_is_left_alone_until_something_runs(words: list[str], code: int, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _QUIET, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.source=there/is/nothing.txt", "there is no such file"),
        ("model.vocab=100", "is less than the tokenizer's 257 tokens"),
    ],
)
def test_data_that_do_not_suit_are_refused_before_a_rank_starts(key, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", key]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert not list(tmp_path.glob("runs/demo"))
