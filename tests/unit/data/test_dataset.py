"""Opening the data of a run, from every kind of source to batches."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config.choices import Documents, Order, TokenDtype
from meshwright.config.errors import RequestError
from meshwright.data.batch import evaluation_ids
from meshwright.data.dataset import Dataset, open_dataset

Factory = Callable[..., Any]


def labels(dataset: Dataset) -> list[int]:
    """All tokens but the first, in order of the stream."""
    return [
        int(label)
        for split in (dataset.train, dataset.eval)
        for label in split.read(np.arange(split.num_samples)).labels.reshape(-1)
    ]


def test_the_built_in_corpus(tmp_path: Path, settings: Factory) -> None:
    dataset = open_dataset(settings(sequence_length=256, eval_fraction=0.01), tmp_path)
    assert dataset.vocab_size == 257
    assert dataset.end_of_document == 256
    assert len(dataset.digest) == 32
    assert dataset.train.num_samples > 10_000
    assert dataset.eval.num_samples == round((dataset.train.num_samples + dataset.eval.num_samples) * 0.01)
    assert dataset.digest[:12] in dataset.description
    assert "documents" in dataset.description
    text = dataset.decode(labels(dataset)[:1_000_000])
    assert text.count("def ") > 1000
    assert dataset.decode(dataset.encode("def é")) == "def é"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bin", "a.npy", "a.parquet"])
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, settings: Factory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"12345678")

    def denied(file: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(RequestError, match=f"{name}.*: cannot be read.*Permission denied"):
        open_dataset(settings(source=tmp_path / name), tmp_path / "c")


def test_text_files_in_order_of_their_paths(tmp_path: Path, settings: Factory) -> None:
    for name, text in [("b.txt", "second"), ("a.txt", "first"), ("c.txt", "")]:
        (tmp_path / name).write_text(text)
    dataset = open_dataset(settings(source=tmp_path / "*.txt", sequence_length=4, eval_fraction=0.4), tmp_path / "c")
    assert labels(dataset) == [*b"irst", 256, *b"second", 256][: 4 * 3]
    assert dataset.corpus.num_documents == 2
    assert dataset.corpus.num_empty == 1
    assert (dataset.train.num_samples, dataset.eval.num_samples) == (2, 1)
    assert "0 tokens dropped" in dataset.description


def test_steps_take_entries_of_the_order(tmp_path: Path, settings: Factory) -> None:
    """B74 (KempnerForge#51), with samples that hold their own number; the batch size changes on the way."""
    np.save(tmp_path / "a.npy", np.arange(101, dtype=np.uint16))
    dataset = open_dataset(settings(source=tmp_path / "a.npy", sequence_length=1), tmp_path / "c")
    assert dataset.train.num_samples == 100
    whole = dataset.sample_ids(3, 0, 200).tolist()
    consumed, seen = 0, []
    for batch_size in (7, 7, 30, 1, 55, 100):
        ids = dataset.sample_ids(3, consumed, batch_size)
        batch = dataset.train.read(ids)
        assert batch.inputs[:, 0].tolist() == ids.tolist()
        seen += ids.tolist()
        consumed += batch_size
    assert seen == whole
    assert sorted(whole[:100]) == sorted(whole[100:]) == list(range(100))
    in_order = open_dataset(
        settings(source=tmp_path / "a.npy", sequence_length=1, order=Order.SEQUENTIAL), tmp_path / "c"
    )
    assert in_order.sample_ids(3, 98, 4).tolist() == [98, 99, 0, 1]


def test_fine_tuning_data_packs_like_any_other(tmp_path: Path, settings: Factory) -> None:
    file = tmp_path / "a.jsonl"
    records = [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "ef"}]
    file.write_text("\n".join(map(json.dumps, records)) + "\nbroken\n")
    dataset = open_dataset(settings(source=file, sequence_length=7, documents=Documents.MASKED), tmp_path / "c")
    batch = dataset.train.read(np.array([0]))
    assert batch.inputs.tolist() == [[*b"abc", 256, *b"def"]]
    assert batch.labels.tolist() == [[-100, *b"c", 256, -100, *b"ef", 256]]
    assert batch.rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert "5 tokens trained" in dataset.description
    assert "1 bad records" in dataset.description
    assert dataset.problems[0].startswith(f"{file}:3: not JSON")


def test_token_files_of_any_kind_join(tmp_path: Path, settings: Factory) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 256, 3], dtype=np.uint32))
    (tmp_path / "b.bin").write_bytes(np.array([4, 256, 5], dtype="<u2").tobytes())
    dataset = open_dataset(settings(source=tmp_path, sequence_length=6, documents=Documents.MASKED), tmp_path / "c")
    batch = dataset.train.read(np.array([0]))
    assert batch.inputs.tolist() == [[1, 2, 256, 3, 4, 256]]
    assert batch.rows.document_ids is not None
    assert batch.rows.document_ids.tolist() == [[0, 0, 0, 1, 2, 2]]


def test_tokens_of_an_unknown_tokenizer(tmp_path: Path, settings: Factory) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(np.array([1, 70_000, 3], dtype="<u4").tobytes())
    chosen = {"source": file, "sequence_length": 2, "dtype": TokenDtype.UINT32}
    dataset = open_dataset(settings(**chosen), tmp_path / "c")
    assert dataset.vocab_size == 70_001
    assert dataset.end_of_document is None
    with pytest.raises(RequestError, match=r"data\.tokenizer"):
        dataset.decode([1])
    with pytest.raises(RequestError, match=r"data\.documents"):
        open_dataset(settings(documents=Documents.MASKED, **chosen), tmp_path / "c")


def test_a_vocabulary_must_hold_what_a_tokenizer_makes(tmp_path: Path, settings: Factory) -> None:
    (tmp_path / "a.txt").write_text("some text")
    dataset = open_dataset(settings(source=tmp_path / "a.txt"), tmp_path / "c")
    dataset.check_vocabulary(257)
    with pytest.raises(RequestError, match=r"less than the tokenizer's 257 tokens; what works: model\.vocab = 257"):
        dataset.check_vocabulary(256)


def test_a_vocabulary_must_hold_what_token_files_hold(tmp_path: Path, settings: Factory) -> None:
    """Told by file, position and value; what the files do not hold needs no embedding."""
    np.save(tmp_path / "1.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "2.npy", np.array([5, 120, 7, 130], dtype=np.uint16))
    dataset = open_dataset(settings(source=tmp_path / "*.npy"), tmp_path / "c")
    dataset.check_vocabulary(131)
    with pytest.raises(RequestError, match=r"2\.npy holds 120 as token 1; what works: model\.vocab = 131"):
        dataset.check_vocabulary(120)
    with pytest.raises(RequestError, match=r"2\.npy holds 130 as token 3"):
        dataset.check_vocabulary(130)


def test_another_type_is_other_tokens_though_the_file_is_remembered(tmp_path: Path, settings: Factory) -> None:
    """The largest token was remembered by file alone: read as another type the file seemed to hold the old one."""
    file = tmp_path / "a.bin"
    file.write_bytes(np.array([3, 1, 2, 2] * 8, dtype="<u2").tobytes())
    os.utime(file, (0, 0))
    narrow, wide = (
        open_dataset(settings(source=file, sequence_length=2, dtype=dtype), tmp_path / "c") for dtype in TokenDtype
    )
    assert (narrow.corpus.largest, wide.corpus.largest) == (3, 2 * 65536 + 2)
    with pytest.raises(RequestError, match=r"a\.bin holds 65539 as token 0"):
        wide.check_vocabulary(300)


def test_refusals_leave_no_file(tmp_path: Path, settings: Factory) -> None:
    """B79 (gpt-neox#552): the path, the reason and the accepted formats."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"other": 1}\n\n')
    with pytest.raises(RequestError, match=r"a\.jsonl.*1 bad and 1 empty") as caught:
        open_dataset(settings(source=file), tmp_path / "c")
    assert f"{file}:1: has no field" in str(caught.value)
    assert ".parquet" in str(caught.value)
    assert [path for path in (tmp_path / "c").rglob("*") if path.is_file()] == []
    file.write_text('{"text": "ab"}')
    with pytest.raises(RequestError, match="sequence_length = 8"):
        open_dataset(settings(source=file), tmp_path / "c")


def test_another_tokenizer_or_field_is_another_cache(tmp_path: Path, settings: Factory) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "first text", "body": "other body"}')
    one = open_dataset(settings(source=file), tmp_path / "c")
    other = open_dataset(settings(source=file, text_field="body"), tmp_path / "c")
    assert one.decode(labels(one)) == "irst tex"
    assert other.decode(labels(other)) == "ther bod"
    assert one.digest == other.digest
    file.write_text('{"text": "THIRD text", "body": "other body"}')
    changed = open_dataset(settings(source=file), tmp_path / "c")
    assert changed.decode(labels(changed)) == "HIRD tex"
    assert changed.digest != one.digest


def test_the_whole_evaluation_split_in_equal_batches(tmp_path: Path, settings: Factory) -> None:
    np.save(tmp_path / "a.npy", np.arange(101, dtype=np.uint16))
    dataset = open_dataset(settings(source=tmp_path / "a.npy", sequence_length=10, eval_fraction=0.5), tmp_path / "c")
    batches = [dataset.eval.read(evaluation_ids(dataset.eval.num_samples, start, 4)) for start in (0, 4)]
    assert [batch.inputs.shape for batch in batches] == [(4, 10)] * 2
    counted = [int(label) for batch in batches for label in batch.labels.reshape(-1) if label >= 0]
    assert counted == list(range(51, 101))


def test_data_needs_no_torch() -> None:
    code = "import sys, meshwright.data, meshwright.layout.rows; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
