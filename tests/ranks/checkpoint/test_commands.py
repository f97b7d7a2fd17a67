"""What users see of damage and of addresses, through `cli.main`: two ranks train, everything else reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.checkpoint.folder import Folder
from meshwright.cli.main import main

pytest.importorskip("fsspec")

Captured = pytest.CaptureFixture[str]
STEP = "checkpoints/step-00000004"


def words(place: Path, name: str, *more: str) -> list[str]:
    usual = [
        f"name={name}", f"data.source={place}/text.txt", "data.sequence_length=32", "model.preset=demo",
        "model.layers=2", "mesh.dp=2", "parallel.zero=1", "batch.global=4", "batch.micro=2", "train.steps=4",
        "train.eval_every=0", "train.device=cpu", "checkpoint.every=2",
    ]  # fmt: skip
    given = {word.partition("=")[0] for word in more}
    return ["train", *(word for word in usual if word.partition("=")[0] not in given), *more]


def trained(words: list[str], where: Path) -> str:
    """What a user in that folder sees: ranks write to the terminal of the command that started them."""
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words], cwd=where, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks, checkpoints after two and four."""
    place = tmp_path_factory.mktemp("commands")
    (place / "text.txt").write_text("".join(f"def f{n}(x): return x * {n}\n" for n in range(900)))
    assert main(words(place, "run", f"train.output={place}/runs")) == 0
    return place


@pytest.fixture
def damaged(place: Path, tmp_path: Path) -> Path:
    """A copy of which the newest checkpoint has one bit of a weight flipped; the older one is whole."""
    shutil.copytree(place, tmp_path / "copy")
    run = tmp_path / "copy" / "runs" / "run"
    file = run / STEP / "data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 100] ^= 4
    file.write_bytes(data)
    return run


@pytest.mark.parametrize(
    "command",
    ["checkpoint check {run}", "checkpoint reshard {run} {out} mesh.dp=1", "evaluate {run}", "evaluate {run} mesh.dp=2",
     "generate {run} --prompt x --tokens 2", "export {run} {out}"],
)  # fmt: skip
def test_a_command_on_a_damaged_checkpoint_names_all_and_exits_1(
    command: str, damaged: Path, tmp_path: Path, capfd: Captured
) -> None:
    assert main(command.format(run=damaged, out=tmp_path / "out").split()) == 1
    out, err = capfd.readouterr()
    told = rf"{damaged}/{STEP}/data-00000\.safetensors: bytes 0\.\.\d+ \(block 0\), holding embedding\.weight: "
    assert re.search(told + "expected [0-9a-f]{32}, actual [0-9a-f]{32}", out + err)
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_show_sees_what_is_missing_and_a_damaged_manifest(damaged: Path, capfd: Captured) -> None:
    file = damaged / STEP / "data-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["checkpoint", "show", str(damaged)]) == 1
    told = (
        rf"NOT COMPLETE: {file}: \d+ bytes in the file, of \d+: bytes .* holding \S+: expected .{{32}}, actual .{{32}}"
    )
    assert re.search(told, capfd.readouterr().out)
    manifest = damaged / STEP / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":4', b'"step":5'))
    assert main(["checkpoint", "show", str(damaged)]) == 1
    assert re.search("manifest.json: the manifest's sha256: expected .{64}, actual .{64}", capfd.readouterr().err)


@pytest.mark.parametrize("launched", [False, True])
def test_a_finished_run_is_one_of_its_own_text(
    launched: bool, place: Path, tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a launcher other text was taken, and nothing was said."""
    shutil.copytree(place, tmp_path / "copy")
    more = words(tmp_path / "copy", "run", f"train.output={tmp_path}/copy/runs", f"mesh.dp={1 if launched else 2}")
    if launched:
        place_here = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        for name, value in place_here.items():
            monkeypatch.setenv(name, value)
    assert main(more) == 0
    assert capfd.readouterr().err.count("holds this run, finished: nothing to do") == 1
    (tmp_path / "copy" / "text.txt").write_text("another text altogether\n" * 900)
    assert main(more) == 2
    assert "the text itself: digest" in capfd.readouterr().err
    (tmp_path / "copy" / "text.txt").unlink()  # what is finished needs it no more
    assert main(more) == 0


@pytest.mark.timeout(300)
def test_a_run_goes_on_from_the_one_before_and_says_so(damaged: Path) -> None:
    place = damaged.parent.parent
    more = [f"train.output={damaged.parent}", "train.steps=6", "checkpoint.accept_changes=true"]
    told = trained(words(place, "run", *more), place)
    assert re.search(rf"damaged: .*{STEP}/data-00000\.safetensors: bytes .* holding embedding\.weight: expected", told)
    assert re.search(r"resumed from .*step-00000002: step 2, 8 samples", told)
    assert Folder(damaged).steps()[0] == 6


@pytest.mark.parametrize(
    "command",
    ["checkpoint show {0}", "checkpoint check {0}", "checkpoint reshard {0} {0}-out", "evaluate {0}",
     "generate {0} --prompt x", "export {0} {0}-out", "evaluate nosuch://bucket/run"],
)  # fmt: skip
def test_what_is_not_there_is_a_wrong_request(command: str, tmp_path: Path, capfd: Captured) -> None:
    assert main(command.format(tmp_path / "nowhere").split()) == 2
    assert re.search("is no checkpoint|cannot be opened: Protocol not known", capfd.readouterr().err)


# ---------------------------------------------------------------------- addresses


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_a_run_whose_output_is_an_address(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's own local file system as an object store: files under names of their own, nothing renamed."""
    monkeypatch.chdir(tmp_path)
    address = f"local://{tmp_path}/store"
    told = trained(words(place, "far", f"train.output={address}"), tmp_path)
    assert f"checkpoints at {address}/far" in told
    assert sorted(path.name for path in (tmp_path / "store" / "far").iterdir()) == ["checkpoints", "latest"]
    names = sorted(path.name for path in (tmp_path / "store" / "far" / STEP).iterdir())
    assert re.fullmatch(r"data-\w{8}-00000.safetensors data-\w{8}-00001.safetensors manifest.json", " ".join(names))
    beside = {path.name for path in (tmp_path / "runs" / "far").iterdir()}
    assert {"metrics.jsonl", "plan.json", "report.html"} <= beside

    assert "finished: nothing to do" in trained(words(place, "far", f"train.output={address}"), tmp_path)
    shutil.rmtree(tmp_path / "runs")  # another machine goes on
    more = [f"train.output={address}", "train.steps=6", "checkpoint.accept_changes=true"]
    told = trained(words(place, "far", *more), tmp_path)
    assert f"resumed from {address}/far/{STEP}: step 4, 16 samples" in told
    for command in ("checkpoint check {0}", "evaluate {0}", "generate {0} --prompt x --tokens 2", "export {0} hf"):
        assert main(command.format(f"{address}/far").split()) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_an_address_that_cannot_be_opened_is_refused_before_ranks_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words(place, "far", "train.output=nosuch://bucket/runs")) == 2
    err = capfd.readouterr().err
    assert 'train.output = "nosuch://bucket/runs/far": cannot be opened: Protocol not known: nosuch' in err
    assert not (tmp_path / "runs" / "far").exists()


def test_memory_of_one_process_is_no_place_for_a_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    """Ranks saved into memories of their own, all said "saved", and nothing was left."""
    monkeypatch.chdir(tmp_path)
    assert main(words(place, "far", "train.output=memory://bucket/runs")) == 2
    told = 'train.output = "memory://bucket/runs/far": is memory of one process, and gone when it ends; what works: '
    assert told in capfd.readouterr().err
    assert not (tmp_path / "runs" / "far").exists()
