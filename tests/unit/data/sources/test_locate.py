"""What a path or glob means."""

from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.data.sources.locate import SourceKind, format_of, locate


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ["b.txt", "a.jsonl", "sub/c.jsonl.gz", "sub/d.parquet", "notes.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


def names(source: str, root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in locate(source).files]


def test_a_folder_is_all_its_accepted_files_by_path(tree: Path) -> None:
    assert names(str(tree), tree) == ["a.jsonl", "b.txt", "sub/c.jsonl.gz", "sub/d.parquet"]


def test_globs_are_sorted_and_may_go_down(tree: Path) -> None:
    assert names(f"{tree}/*.txt", tree) == ["b.txt"]
    assert names(f"{tree}/**/*.[jp]*", tree) == ["a.jsonl", "sub/c.jsonl.gz", "sub/d.parquet"]


def test_a_file_that_a_glob_finds_twice_is_read_once(tree: Path) -> None:
    assert names(f"{tree}/**/**/*.jsonl.gz", tree) == ["sub/c.jsonl.gz"]


def test_hidden_files_and_run_folders_are_no_data(tree: Path) -> None:
    """A run that reads "." finds the same files once its own folder and cache lie there."""
    before = names(str(tree), tree)
    for name in ["run.toml", "plan.json", "metrics.jsonl", "data.jsonl", "checkpoints/step-1/x.bin"]:
        (tree / "runs" / "demo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / "runs" / "demo" / name).write_text("{}")
    for name in ["runs/.cache/tokens/a/tokens.bin", ".hidden.txt"]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    assert names(str(tree), tree) == before


def test_an_index_without_its_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_text("x")
    for name in ("a.idx", "a"):
        with pytest.raises(RequestError, match=r"there is no a\.bin beside it"):
            locate(f"{tmp_path}/{name}")


def test_a_megatron_pair_is_one_file(tmp_path: Path) -> None:
    for name in ["a.bin", "a.idx", "b.npy"]:
        (tmp_path / name).write_text("x")
    located = locate(f"{tmp_path}/*")
    assert located.kind is SourceKind.TOKENS
    assert [file.name for file in located.files] == ["a.bin", "b.npy"]
    for name in ("a.bin", "a.idx", "a"):
        assert locate(f"{tmp_path}/{name}").files == (tmp_path / "a.bin",)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("missing.txt", "no such file or folder"),
        ("notes.md", "of no accepted format"),
        ("*.md", "of no accepted format"),
        ("*.csv", "matches no file"),
        ("empty", "folder without a file of an accepted format"),
    ],
)
def test_what_cannot_be_read_is_refused_with_path_and_formats(tree: Path, source: str, told: str) -> None:
    """B79 (gpt-neox#552): unsupported input is never read as nothing."""
    (tree / "empty").mkdir()
    with pytest.raises(RequestError, match=told) as caught:
        locate(f"{tree}/{source}")
    assert str(tree) in str(caught.value)
    assert ".jsonl.zst" in str(caught.value)


def test_text_and_tokens_do_not_mix(tree: Path) -> None:
    (tree / "a.npy").write_text("x")
    with pytest.raises(RequestError, match="mixes"):
        locate(str(tree))


def test_the_name_python_is_the_corpus() -> None:
    located = locate("python")
    assert located.kind is SourceKind.TEXT
    assert all(format_of(file) == ".txt" for file in located.files)


def test_a_folder_that_cannot_be_searched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "closed"))

    monkeypatch.setattr("os.scandir", denied)
    with pytest.raises(RequestError, match=r"cannot be searched: .*closed: Permission denied"):
        locate(str(tmp_path))
