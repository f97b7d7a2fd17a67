"""Addresses of object stores: no rename, one manifest that publishes, nothing overwritten in place."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

from meshwright.checkpoint.errors import CheckpointError, DamagedError
from meshwright.checkpoint.folder import Folder, find_checkpoint
from meshwright.checkpoint.huggingface.convert import export_checkpoint
from meshwright.checkpoint.loader import load
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.rewrite import reshard
from meshwright.checkpoint.saver import Progress
from meshwright.checkpoint.storage import At, nothing
from meshwright.comm.agree import Side
from meshwright.config.choices import Resume
from tests.ranks.checkpoint.layouts import Layout
from tests.unit.checkpoint.saved import engine_of, plan_of, saver_of, scramble, values_of
from tests.unit.checkpoint.test_crash import Crash, Fuse, thinned

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def address() -> Iterator[str]:
    address = f"memory://bucket-{uuid4().hex}/run"
    yield address
    files = fsspec.filesystem("memory")
    if files.exists(address):
        files.rm(address, recursive=True)


def save(address: str, step: int, at: At = nothing) -> None:
    saver_of(engine_of(step), address, at).save(Progress(step, step * 12))


def test_saved_and_loaded(address: str) -> None:
    for step in (1, 2, 3):
        save(address, step)
    folder = Folder(address)
    assert folder.steps() == [3, 2]
    assert folder.latest() == "checkpoints/step-00000003"
    engine = engine_of(0)
    scramble(engine)
    assert load(engine, address, Side()).step == 3
    wanted, got = values_of(engine_of(3)), values_of(engine)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize("latest", [b"checkpoints/step-00000002\n", b"../outside\n"])
def test_a_newest_that_lost_its_manifest_is_kept_and_told(latest: bytes, address: str) -> None:
    """Its data were removed as those of a cut save, although `latest` says that it was whole."""
    for step in (1, 2):
        save(address, step)
    folder = Folder(address)
    folder.storage.put("latest", latest)
    folder.storage.remove(f"{folder.path(2)}/manifest.json")
    kept = folder.storage.names(folder.path(2))
    assert kept
    lines: list[str] = []
    manifest = resume(engine_of(0), folder, Resume.AUTO, Side(), told=lines.append)
    assert manifest is not None
    assert manifest.step == 1
    assert folder.storage.names(folder.path(2)) == kept
    assert lines[0] == f"damaged: {address}/checkpoints/step-00000002: has no manifest, so it is not complete"
    save(address, 3)  # now `latest` says nothing for it
    assert resume(engine_of(0), folder, Resume.AUTO, Side()) is not None
    assert folder.incomplete() == []


def test_a_second_save_of_a_step_replaces_it_at_once(address: str) -> None:
    """Until the new manifest is there the old one and its files stand."""
    save(address, 2)
    before = Folder(address).manifest(2)
    fuse = Fuse(1 << 30)
    save(address, 2, fuse)
    for point in thinned(fuse.steps):
        with pytest.raises(Crash):
            save(address, 2, Fuse(point))
        manifest = resume(engine_of(0), Folder(address), Resume.AUTO, Side())
        assert manifest is not None
        assert [t.fingerprint for t in manifest.tensors] == [t.fingerprint for t in before.tensors]
    save(address, 2)
    storage, path = find_checkpoint(address)
    assert len(storage.names(path)) == 2  # the files of cut saves are gone


def test_a_cut_save_is_not_seen(address: str) -> None:
    save(address, 1)
    fuse = Fuse(1 << 30)
    save(f"{address}-dry", 2, fuse)
    manifest_put = next(n for n, step in enumerate(fuse.steps) if step.startswith("put") and "manifest" in step)
    for point in thinned(fuse.steps):
        with pytest.raises(Crash):
            save(address, 2, Fuse(point))
        newest = Folder(address).steps()[0]
        assert newest == (1 if point <= manifest_put else 2)
        manifest = resume(engine_of(0), Folder(address), Resume.AUTO, Side())
        assert manifest is not None
        assert manifest.step == newest
        assert Folder(address).incomplete() == []  # what a cut save had written stayed for ever
        if newest == 2:
            Folder(address).storage.remove_folder("checkpoints/step-00000002")
            save(address, 1)


def test_a_flip_is_found(address: str) -> None:
    save(address, 1)
    storage, path = find_checkpoint(address)
    name = next(name for name in storage.names(path) if name.endswith(".safetensors"))
    data = bytearray(storage.read(f"{path}/{name}") or b"")
    data[-1] ^= 1
    storage.put(f"{path}/{name}", bytes(data))
    with pytest.raises(DamagedError, match="holding exp_avg_sq"):
        load(engine_of(0), address, Side())
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        find_checkpoint(f"{address}-nothing")


def test_resharded_from_one_store_to_another(address: str) -> None:
    save(address, 1)
    storage, path = find_checkpoint(address)
    plan = plan_of()
    cut = Layout("two", dp=2, zero=3).plan
    from dataclasses import replace

    other = replace(plan, degrees=cut.degrees, sharding=cut.sharding)
    out = f"{address}-out"
    written = reshard(storage, path, out, other)
    assert len(written.files) == 2
    found, place = find_checkpoint(out)
    read = read_manifest(found.read("manifest.json") or b"", out)
    assert place == ""
    assert read.tensors == written.tensors
    export_checkpoint(found, place, f"{address}-hf")
    assert fsspec.filesystem("memory").exists(f"{address}-hf/config.json")
