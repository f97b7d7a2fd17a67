"""Damage is found and named: the file, the tensor, what was expected and what is there. Nothing is loaded silently."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.errors import CheckpointError, DamagedError
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.storage import open_storage
from meshwright.comm.agree import Side
from meshwright.layout.rectangles import flat_rectangles
from tests.unit.checkpoint.saved import engine_of, save, scramble, values_of


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one run: steps 1 and 2."""
    root = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        save(engine_of(step), root, step)
    return root / "checkpoints" / "step-00000002"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(good, tmp_path / "copy")
    return tmp_path / "copy"


def damage_of(folder: Path) -> DamagedError:
    """What loading says; the engine must not have taken it for good."""
    with pytest.raises(DamagedError) as caught:
        load(engine_of(0), folder, Side())
    return caught.value


def tensor_at(folder: Path, offset: int) -> str:
    """The tensor that byte `offset` of the data file belongs to; "the header" before the first."""
    manifest = read_manifest((folder / "manifest.json").read_bytes(), "m")
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            if piece.offset <= offset < piece.offset + piece.rectangle.numel * tensor.dtype.itemsize:
                return tensor.name
    return "the header"


def test_what_is_saved_is_loaded(good: Path) -> None:
    engine, other = engine_of(2), engine_of(0)
    scramble(other)
    manifest = load(other, good, Side())
    assert (manifest.step, manifest.samples, manifest.updates) == (2, 24, 2)
    loaded, saved = values_of(other), values_of(engine)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert all(int(run.step) == 2 for store in other.stores for run in store.runs)
    assert check_checkpoint(open_storage(good), "").problems == ()


def test_two_hundred_bit_flips_are_found_and_named(folder: Path) -> None:
    """Anywhere in the data file: header, weights, states. Plain torch and safetensors find none of 200."""
    file = folder / "data-00000.safetensors"
    whole = file.read_bytes()
    draw = random.Random(0)
    found = named = 0
    for _ in range(200):
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        problems = check_checkpoint(open_storage(folder), "").problems
        found += len(problems) == 1
        error = problems[0]
        named += error.tensor == tensor_at(folder, place) and error.file == str(file)
        assert len(error.expected) == len(error.actual) == 32
        assert error.expected != error.actual
    assert (found, named) == (200, 200)


def test_flips_are_found_by_loading_too(folder: Path) -> None:
    file = folder / "data-00000.safetensors"
    whole = file.read_bytes()
    draw = random.Random(1)
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in (begin, len(whole) - 1, *(draw.randrange(begin, len(whole)) for _ in range(10))):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        error = damage_of(folder)
        assert (error.tensor, error.file) == (tensor_at(folder, place), str(file))


def test_flips_in_the_manifest_are_found(folder: Path) -> None:
    file = folder / "manifest.json"
    whole = file.read_bytes()
    draw = random.Random(2)
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        assert check_checkpoint(open_storage(folder), "").problems[0].file == str(file)


def zeroed(folder: Path) -> None:
    with (folder / "data-00000.safetensors").open("r+b") as file:
        file.seek(40960)
        file.write(bytes(4096))


def cut(folder: Path, left: int) -> None:
    os.truncate(folder / "data-00000.safetensors", left)


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        (zeroed, "expected"),
        (lambda folder: cut(folder, (folder / "data-00000.safetensors").stat().st_size - 1), "bytes in the file"),
        (lambda folder: cut(folder, 5000), "bytes in the file"),
        (lambda folder: cut(folder, 0), "bytes in the file"),
        (lambda folder: (folder / "data-00000.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "holds neither a manifest"),
        (lambda folder: os.truncate(folder / "manifest.json", 500), "is cut off"),
        (lambda folder: (folder / "manifest.json").write_bytes(b""), "is cut off"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"{}"), "is cut off"),
    ],
)
def test_lost_pages_and_files(hurt: Callable[[Path], object], told: str, folder: Path) -> None:
    hurt(folder)
    with pytest.raises(CheckpointError, match=told):
        load(engine_of(0), folder, Side())


@pytest.mark.parametrize("left", [0, 20, 5000, 30_000, -1])
def test_a_cut_names_the_tensors_that_are_gone(left: int, folder: Path) -> None:
    """What is told of a cut is what is told of a flip: file, tensors, both digests; a cut named no tensor before."""
    file = folder / "data-00000.safetensors"
    whole = file.stat().st_size
    size = left % whole
    manifest = read_manifest((folder / "manifest.json").read_bytes(), "m")
    gone = [each.name for each in manifest.tensors if each.pieces[0].offset + each.num_bytes > size]
    cut(folder, size)
    for error in (damage_of(folder), *check_checkpoint(open_storage(folder), "").problems):
        assert error.file == str(file)
        assert f"{size} bytes in the file, of {whole}" in error.problem
        first, _, more = error.tensor.partition(" and ")
        assert set(first.split(", ")) <= set(gone)
        assert len(first.split(", ")) + int(more.split()[0] if more else 0) == len(gone)
        assert len(error.expected) == len(error.actual) == 32
        assert error.expected != error.actual


def test_a_file_that_is_gone_or_longer_is_told_with_what_it_held(folder: Path) -> None:
    file = folder / "data-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert (damage_of(folder).expected, damage_of(folder).actual) == (str(len(whole)), str(len(whole) + 1))
    file.unlink()
    manifest = read_manifest((folder / "manifest.json").read_bytes(), "m")
    for error in (damage_of(folder), *check_checkpoint(open_storage(folder), "").problems):
        assert (error.file, error.problem) == (str(file), "is missing")
        assert re.fullmatch(rf"(\S+, ){{2}}\S+ and {len(manifest.tensors) - 3} more", error.tensor)


def test_the_file_of_another_step_is_foreign(folder: Path, good: Path) -> None:
    shutil.copy(good.with_name("step-00000001") / "data-00000.safetensors", folder)
    assert "expected" in str(damage_of(folder))


def test_the_manifest_of_another_step_is_foreign(folder: Path, good: Path) -> None:
    shutil.copy(good.with_name("step-00000001") / "manifest.json", folder)
    assert "expected" in str(damage_of(folder))


# ---------------------------------------------------------------------- hostile files


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest changed by someone who knows the format: its digest is right."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_bytes())["manifest"]
    change(manifest)
    sign(folder, json.dumps(manifest, separators=(",", ":")).encode())


def sign(folder: Path, body: bytes) -> None:
    digest = sha256(body).hexdigest().encode()
    (folder / "manifest.json").write_bytes(b'{"sha256": "' + digest + b'", "manifest": ' + body + b"}\n")


def first_piece(manifest: dict[str, Any]) -> list[Any]:
    piece = manifest["tensors"][0]["pieces"][0]
    assert isinstance(piece, list)
    return piece


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "parent folder": (lambda m: m["files"][0].update(name="../x.safetensors"), "only plain names"),
    "absolute": (lambda m: m["files"][0].update(name="/etc/x.safetensors"), "only plain names"),
    "hidden": (lambda m: m["files"][0].update(name=".x.safetensors"), "only plain names"),
    "another kind": (lambda m: m["files"][0].update(name="x.pt"), "only plain names"),
    "long name": (lambda m: m["files"][0].update(name="x" * 300 + ".safetensors"), "only plain names"),
    "huge file": (lambda m: m["files"][0].update(bytes=1 << 60), "digests for the"),
    "negative size": (lambda m: m["files"][0].update(bytes=-1), "no count"),
    "size of another type": (lambda m: m["files"][0].update(bytes=True), "no count"),
    "size as text": (lambda m: m["files"][0].update(bytes="9"), "no count"),
    "huge shape": (lambda m: m["tensors"][0].update(shape=[1 << 61, 1 << 61]), "lacks elements"),
    "absurd shape": (lambda m: m["tensors"][0].update(shape=[1 << 70]), "no count"),
    "fewer dims": (lambda m: m["tensors"][0].update(shape=[67]), "number of dimensions"),
    "offset outside": (lambda m: first_piece(m).__setitem__(1, 1 << 50), "outside its file"),
    "file that is not there": (lambda m: first_piece(m).__setitem__(0, 7), "outside its file"),
    "torn element": (lambda m: first_piece(m).__setitem__(1, first_piece(m)[1] + 1), "no multiple"),
    "empty piece": (lambda m: first_piece(m).__setitem__(3, [0, 24]), "empty piece"),
    "piece outside": (lambda m: first_piece(m).__setitem__(2, [1, 0]), "outside the shape"),
    "no piece": (lambda m: m["tensors"][0].update(pieces=[]), "lacks elements"),
    "piece twice": (lambda m: m["tensors"][0]["pieces"].append(first_piece(m)), "overlapping pieces"),
    "tensor twice": (lambda m: m["tensors"].append(m["tensors"][0]), "twice"),
    "file twice": (lambda m: m["files"].append(m["files"][0]), "twice"),
    "shared bytes": (lambda m: first_piece(m).__setitem__(1, first_piece(m)[1] + 8), "gives the same bytes"),
    "unknown dtype": (lambda m: m["tensors"][0].update(dtype="object"), "unknown dtype"),
    "no digest": (lambda m: m["files"][0].update(digests=["x" * 32] * len(m["files"][0]["digests"])), "hexadecimal"),
    "no fingerprint": (lambda m: m["tensors"][0].update(fingerprint="0x"), "hexadecimal"),
    "tiny blocks": (lambda m: m.update(block_bytes=1), "power of two"),
    "another version": (lambda m: m.update(version=1), "of version 1 of the format, and version 2 is read"),
    "no step": (lambda m: m.pop("step"), "has no step"),
    "no object": (lambda m: m.update(plan=[]), "no object plan"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_manifest_that_lies_is_refused(kind: str, folder: Path) -> None:
    change, told = HOSTILE[kind]
    rewritten(folder, change)
    error = damage_of(folder)
    assert re.search(told, str(error)), str(error)
    assert error.file.endswith("manifest.json")


@pytest.mark.parametrize(
    "body", [b'{"step": 1, "step": 2}', b"[" * 100_000, b'{"step": NaN}', b"9" * 5000, b"\xff\xfe", b"null", b"[]"]
)
def test_a_manifest_that_is_no_json_object_is_refused(body: bytes, folder: Path) -> None:
    sign(folder, body)
    assert damage_of(folder).file.endswith("manifest.json")


def test_a_changed_fingerprint_is_told_with_the_tensor(folder: Path) -> None:
    """Digests agree, the elements are other ones: two pieces of one shape that changed places."""

    def swap(manifest: dict[str, Any]) -> None:
        by_name = {tensor["name"]: tensor for tensor in manifest["tensors"]}
        one, other = (by_name[f"layers.{n}.mlp.up.weight"] for n in (0, 1))
        one["pieces"], other["pieces"] = other["pieces"], one["pieces"]

    rewritten(folder, swap)
    error = damage_of(folder)
    assert (error.problem, error.tensor) == ("the fingerprint", "layers.0.mlp.up.weight")
    assert len(error.expected) == len(error.actual) == 16
    problems = check_checkpoint(open_storage(folder), "").problems
    assert [each.tensor for each in problems] == ["layers.0.mlp.up.weight", "layers.1.mlp.up.weight"]


def test_links_and_folders_are_not_followed(folder: Path, tmp_path: Path) -> None:
    file = folder / "data-00000.safetensors"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    assert "links are not followed" in str(damage_of(folder))
    file.unlink()
    file.mkdir()
    assert "no regular file" in str(damage_of(folder))


def test_a_pipe_keeps_nobody_waiting(folder: Path) -> None:
    for name in ("data-00000.safetensors", "manifest.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{name}: is no regular file" in str(damage_of(folder))


class _Trap:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


@pytest.mark.parametrize("name", ["manifest.json", "data-00000.safetensors"])
def test_a_pickle_under_any_name_runs_nothing(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).write_bytes(pickle.dumps(_Trap(tmp_path / "ran")))
    assert damage_of(folder).file.endswith(name)
    torch.save(_Trap(tmp_path / "ran"), folder / name)
    assert damage_of(folder).file.endswith(name)
    assert not (tmp_path / "ran").exists()


def test_no_module_of_the_project_unpickles_files() -> None:
    """Pickles travel between processes of one run only: never from a file."""
    root = Path(__file__).parents[3] / "src" / "meshwright"
    for package in ("checkpoint", "train", "data", "model"):
        for file in (root / package).rglob("*.py"):
            text = file.read_text()
            assert not re.search(r"\b(import pickle|torch\.load|allow_pickle=True|marshal|shelve)\b", text), file


def test_flat_ranges_cover_blocks() -> None:
    """The arithmetic that loading rests on: a block's rectangles are the block."""
    shape = (5, 3, 4)
    for first in range(0, 60, 7):
        seen = [
            flat + place for rectangle, flat in flat_rectangles(shape, first, 60) for place in range(rectangle.numel)
        ]
        assert sorted(seen) == list(range(first, 60))
