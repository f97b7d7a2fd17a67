"""Wrong words after `verify`: one message each, before a rank is started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that are no labels, by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npy").write_text("labels")
    (tmp_path / "nothing.npy").write_text("")
    np.savez("several.npz", labels=np.ones((4, 8), dtype=np.int64))
    for name, array in {
        "objects": np.array([{}], dtype=object), "floats": np.ones((4, 8)), "flags": np.ones((4, 8), dtype=bool),
        "texts": np.full((4, 8), "a"), "flat": np.ones(4, dtype=np.int64), "none": np.full((4, 8), -100),
        "empty": np.ones((0, 8), dtype=np.int64),
    }.items():  # fmt: skip
        np.save(f"{name}.npy", array, allow_pickle=True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--labels absent.npy", "--labels absent.npy: cannot be read: No such file or directory; what works: labels"),
        ("--labels .", "--labels .: cannot be read: Is a directory"),
        *(
            (f"--labels {name}", f"--labels {name}: is no .npy file of whole numbers; what works: labels (sequences,")
            for name in (
                "text.npy",
                "nothing.npy",
                "several.npz",
                "objects.npy",
                "floats.npy",
                "flags.npy",
                "texts.npy",
            )
        ),
        *((f"--labels {name}.npy", "at least one trained token") for name in ("flat", "none", "empty")),
        ("--rank 1", "--rank 1: is of a dry run; the ladder climbs with all ranks; what works: --dry-run"),
        ("--dry-run --rank 2", "--rank 2: the mesh has 2 ranks; what works: 0 to 1"),
        ("--dry-run --labels none.npy", "--dry-run with --labels: are two proofs, each by itself"),
    ],
)
def test_a_wrong_word_is_one_message(words: str, told: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "mesh.dp=2", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert told in err
    assert "pickle" not in err
