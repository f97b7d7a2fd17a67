"""The token cache: whole or absent, whoever builds it and however the building ends."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.errors import RequestError
from meshwright.data.document import Part, Piece, Skipped, empty, plain
from meshwright.data.tokenizer.bytewise import ByteTokenizer
from meshwright.data.tokens import cache, writer
from meshwright.data.tokens.cache import MAX_PROBLEMS, Counts, NothingAcceptedError, cached_tokens
from meshwright.data.tokens.stream import Shard, TokenStream

END = 256


def build(folder: Path, *documents: Piece | Skipped) -> tuple[Shard, Counts]:
    return cached_tokens(folder, "key", ByteTokenizer(), lambda: documents)


def test_documents_end_with_their_token(tmp_path: Path) -> None:
    shard, counts = build(tmp_path, plain("ab"), plain("é"), plain(" "))
    assert shard.tokens.tolist() == [97, 98, END, 0xC3, 0xA9, END, 32, END]
    assert counts == Counts(documents=3, tokens=8, trained_tokens=8)
    assert TokenStream([shard]).document_ids(0, 8).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert shard.trained_bits is None


def test_pieces_make_one_document(tmp_path: Path) -> None:
    shard, counts = build(tmp_path, Piece((Part("ab"),), ends_document=False), plain("c"), plain("d"))
    assert shard.tokens.tolist() == [97, 98, 99, END, 100, END]
    assert counts.documents == 2


def test_prompts_are_stored_untrained(tmp_path: Path) -> None:
    shard, counts = build(tmp_path, plain("xyz"), Piece((Part("ab", trained=False), Part("cd"))), plain("e"))
    assert shard.trained(0, 11).tolist() == [True] * 4 + [False] * 2 + [True] * 5
    assert counts.trained_tokens == 9
    untrained_end = build(tmp_path / "2", Piece((Part("a"),), trains_end=False))[0]
    assert untrained_end.trained(0, 2).tolist() == [True, False]


def test_the_mask_keeps_its_place_across_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_FLUSH_TOKENS", 16)
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 30, (200, 2)).tolist()
    documents = [Piece((Part("p" * prompt, trained=False), Part("c" * said))) for prompt, said in sizes]
    shard, counts = build(tmp_path, *documents)
    trained = shard.trained(0, counts.tokens)
    assert (trained == (shard.tokens != ord("p"))).all()


def test_skipped_records_are_counted_and_told(tmp_path: Path) -> None:
    """B78 (Megatron-LM#62): documents in the index = accepted records; still told when the cache is only opened."""
    bad = [Skipped("f.jsonl", line, "broken") for line in range(1, 31)]
    for _ in range(2):
        _, counts = build(tmp_path, *bad, empty("f.jsonl", 31), plain("a"))
        assert (counts.documents, counts.bad, counts.empty) == (1, 30, 1)
        assert counts.problems[0] == "f.jsonl:1: broken"
        assert len(counts.problems) == MAX_PROBLEMS


def test_it_is_built_once(tmp_path: Path) -> None:
    build(tmp_path, plain("ab"))
    shard, _ = cached_tokens(tmp_path, "key", ByteTokenizer(), lambda: pytest.fail("read again"))
    assert shard.tokens.tolist() == [97, 98, END]
    assert [file.name for file in tmp_path.iterdir()] == ["key"]


def test_nothing_accepted_leaves_nothing(tmp_path: Path) -> None:
    """B79 (gpt-neox#552)."""
    with pytest.raises(NothingAcceptedError) as caught:
        build(tmp_path, Skipped("f", 1, "broken"), empty("f", 2))
    assert (caught.value.counts.bad, caught.value.counts.empty) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_building_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Iterator[Piece]:
        yield plain("a")
        raise RequestError("f", "is damaged")

    with pytest.raises(RequestError, match="is damaged"):
        cached_tokens(tmp_path, "key", ByteTokenizer(), fails)
    assert list(tmp_path.iterdir()) == []


def test_a_process_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    def documents() -> Iterator[Piece]:
        yield plain("a")
        os.kill(os.getpid(), signal.SIGTERM)
        yield from (plain("b") for _ in range(10_000))

    with pytest.raises(SystemExit) as left:
        cached_tokens(tmp_path, "key", ByteTokenizer(), documents)
    assert left.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_that_takes_sigterm_builds_on(tmp_path: Path) -> None:
    taken: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    try:
        cached_tokens(tmp_path, "key", ByteTokenizer(), lambda: (os.kill(os.getpid(), signal.SIGTERM) or plain("a"),))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == [signal.SIGTERM]


@pytest.mark.parametrize("damage", ["index.json", "tokens.bin", "starts.bin", "trained.bin", "empty index", "short"])
def test_a_broken_cache_is_built_anew(tmp_path: Path, damage: str) -> None:
    document = Piece((Part("a", trained=False), Part("b")))
    build(tmp_path, document)
    if damage == "empty index":
        (tmp_path / "key" / "index.json").write_text("")
    elif damage == "short":
        (tmp_path / "key" / "tokens.bin").write_bytes(b"\x00")
    else:
        (tmp_path / "key" / damage).unlink()
    shard, _ = build(tmp_path, document)
    assert shard.tokens.tolist() == [97, 98, END]
    assert [file.name for file in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("locks", [True, False])
def test_two_builders_at_once(tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lock the text is read once; without one both read it, one folder wins, and both see the same tokens."""
    reads: list[int] = []
    both_read = threading.Barrier(2)
    if not locks:
        monkeypatch.setattr(cache, "_lock", lambda file: nullcontext())

    def read() -> Iterator[Piece]:
        reads.append(1)
        if not locks:
            both_read.wait(timeout=20)
        yield from (plain(f"document {number}") for number in range(2000))

    results: list[list[int]] = []

    def open_it() -> None:
        shard, _ = cached_tokens(tmp_path, "key", ByteTokenizer(), read)
        results.append(shard.tokens.tolist())

    threads = [threading.Thread(target=open_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(reads) == (1 if locks else 2)
    assert [file.name for file in tmp_path.iterdir()] == ["key"]


def test_abandoned_drafts_go_after_a_day(tmp_path: Path) -> None:
    for name, age_s in [("key.building-old", 90_000), ("key.building-new", 60)]:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    build(tmp_path, plain("a"))
    assert {file.name for file in tmp_path.iterdir()} == {"key", "key.building-new"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="file"):
        build(tmp_path / "file" / "cache", plain("a"))


def test_the_index_is_plain_json(tmp_path: Path) -> None:
    """B68 (Megatron-Bridge#3506): no pickle anywhere in the format."""
    build(tmp_path, plain("a"))
    index = json.loads((tmp_path / "key" / "index.json").read_text())
    assert index["counts"]["tokens"] == 2
    assert index["dtype"] == "<u2"
