"""What lies beside imported weights is checked as they are: a flipped bit in a tokenizer makes other tokens."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from uuid import uuid4

import pytest

from meshwright.checkpoint.check import check_checkpoint
from meshwright.checkpoint.errors import CheckpointError, DamagedError
from meshwright.checkpoint.folder import find_checkpoint
from meshwright.checkpoint.huggingface.convert import export_checkpoint, import_checkpoint
from meshwright.checkpoint.plans import plan_from
from meshwright.checkpoint.rewrite import reshard, write_checkpoint
from meshwright.checkpoint.source import checkpoint_source
from meshwright.checkpoint.storage import open_storage
from meshwright.config.errors import RequestError
from meshwright.train.standalone import plan_of, tokenizer_of
from tests.unit.checkpoint.saved import engine_of, save
from tests.unit.checkpoint.test_damage import rewritten

FILES = {"config.json": b'{"bos_token_id": 3}', "tokenizer.json": b'{"version": "1.0"}', "merges.txt": b"a b\n"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported weights: exported from a small run, and imported again with files beside them."""
    root = tmp_path_factory.mktemp("beside")
    storage, path = find_checkpoint(save(engine_of(), root / "run"))
    export_checkpoint(storage, path, root / "hf")
    for name, content in FILES.items():
        if name != "config.json":
            (root / "hf" / name).write_bytes(content)
    import_checkpoint(root / "hf", root / "imported")
    return root / "imported"


@pytest.fixture
def imported(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "imported")
    return tmp_path / "imported"


def test_a_flip_in_any_file_is_found_by_every_reader(imported: Path, tmp_path: Path) -> None:
    storage = open_storage(imported)
    assert check_checkpoint(storage, "").problems == ()
    plan = plan_of(storage, "")
    draw = random.Random(3)
    for file in sorted((imported / "huggingface").iterdir()):
        whole = bytearray(file.read_bytes())
        whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        kept = file.read_bytes()
        file.write_bytes(whole)
        (found,) = check_checkpoint(storage, "").problems
        assert (found.file, len(found.expected), len(found.actual)) == (str(file), 32, 32)
        assert found.expected != found.actual
        for use in (
            lambda: reshard(storage, "", tmp_path / "out", plan),
            lambda: export_checkpoint(storage, "", tmp_path / "out"),
            lambda: tokenizer_of(storage, "", plan),
        ):
            with pytest.raises(DamagedError, match=f"{file.name}: the file, .*: expected {found.expected}, actual "):
                use()
        file.unlink()
        (gone,) = check_checkpoint(storage, "").problems
        assert (gone.file, gone.problem) == (str(file), "is missing")
        file.write_bytes(kept)
    assert not (tmp_path / "out").exists()


def test_a_new_layout_keeps_files_and_digests(imported: Path, tmp_path: Path) -> None:
    storage = open_storage(imported)
    before = reshard(storage, "", tmp_path / "again", plan_of(storage, ""))
    assert set(before.extra["beside"]) == {"config.json", "tokenizer.json", "merges.txt"}
    assert check_checkpoint(open_storage(tmp_path / "again"), "").problems == ()
    (tmp_path / "again" / "huggingface" / "merges.txt").write_bytes(b"b a\n")
    assert len(check_checkpoint(open_storage(tmp_path / "again"), "").problems) == 1


def test_a_file_that_is_added_is_taken_as_it_is(imported: Path, tmp_path: Path) -> None:
    (imported / "huggingface" / "chat_template.jinja").write_text("{{ text }}")
    assert check_checkpoint(open_storage(imported), "").problems == ()
    export_checkpoint(open_storage(imported), "", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ text }}"


def test_a_checkpoint_from_before_there_were_digests_is_read(imported: Path, tmp_path: Path) -> None:
    rewritten(imported, lambda manifest: manifest["extra"].clear())
    export_checkpoint(open_storage(imported), "", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]


@pytest.mark.parametrize("said", [1, [], {"x": 1}, {"../../secret": "0"}, {"/etc/passwd": "0"}, {".hidden": "0"}])
def test_digests_that_are_none_are_refused(said: object, imported: Path, tmp_path: Path) -> None:
    rewritten(imported, lambda manifest: manifest["extra"].update(beside=said))
    with pytest.raises(CheckpointError, match="what the manifest says of the files beside the weights"):
        export_checkpoint(open_storage(imported), "", tmp_path / "out")
    assert len(check_checkpoint(open_storage(imported), "").problems) == 1


def test_a_tokenizer_at_an_address_is_not_taken_for_bytes(imported: Path) -> None:
    """It was: tokens of another vocabulary, and no word of it."""
    storage = open_storage(imported)
    manifest, problems = check_checkpoint(storage, "").manifest, check_checkpoint(storage, "").problems
    assert manifest is not None
    assert problems == ()
    address = f"memory://bucket-{uuid4().hex}/model"
    plan = plan_from(manifest.plan, "m")
    names = {tensor.name for tensor in manifest.tensors}
    write_checkpoint(checkpoint_source(storage, "", manifest), address, plan, names.__contains__, beside=FILES)
    with pytest.raises(RequestError, match=r"tokenizer\.json: is at an address.*--tokenizer FILE"):
        tokenizer_of(open_storage(address), "", plan)
