"""Raw token files."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from meshwright.config.choices import TokenDtype
from meshwright.config.errors import RequestError
from meshwright.data.tokens.raw import first_beyond, largest_token, open_bin, open_npy


class Marker:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("dtype", ["u2", "u4", "i4", "i8", ">u2"])
def test_npy_is_mapped_as_it_is(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(100).astype(dtype))
    tokens = open_npy(tmp_path / "a.npy")
    assert tokens.tolist() == list(range(100))
    assert largest_token(tmp_path / "a.npy", tokens) == 99


def test_pickled_objects_are_never_read(tmp_path: Path) -> None:
    """B68 (Megatron-Bridge#3506): neither inside .npy nor as a bare pickle under that name."""
    file, marker = tmp_path / "a.npy", tmp_path / "ran"
    np.save(file, np.array([Marker(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError, match=r"a\.npy.*pickled objects are never read"):
        open_npy(file)
    file.write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(RequestError, match=r"a\.npy"):
        open_npy(file)
    assert not marker.exists()


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.uint16), np.zeros(3), np.zeros(0, np.uint16)])
def test_npy_of_another_kind_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(RequestError, match=r"a\.npy"):
        open_npy(tmp_path / "a.npy")


def test_bin_has_the_type_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(np.array([1, 70_000], dtype="<u4").tobytes())
    assert open_bin(file, TokenDtype.UINT32).tolist() == [1, 70_000]
    assert open_bin(file, TokenDtype.UINT16).tolist() == [1, 0, 70_000 % 65536, 1]


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_bin_of_part_tokens_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(RequestError, match=r"data\.dtype"):
        open_bin(tmp_path / "a.bin", TokenDtype.UINT16)


def test_the_first_token_beyond_a_vocabulary() -> None:
    tokens = np.array([0, 9, 3, 9], dtype=np.uint16)
    assert [first_beyond(tokens, vocab) for vocab in (0, 4, 9, 10)] == [0, 1, 1, None]


@pytest.mark.parametrize(
    ("stored", "asked", "told"),
    [
        ("<u4", TokenDtype.UINT16, r"looks like uint32: .*what works: data\.dtype=uint32, a \.npy"),
        ("<u2", TokenDtype.UINT32, r"looks like uint16: .*what works: data\.dtype=uint16, a \.npy"),
        ("<i8", TokenDtype.UINT16, r"looks like uint64, which is not read: .*tokens written as uint16 or uint32"),
        ("<i8", TokenDtype.UINT32, r"looks like uint64"),
    ],
)
def test_a_bin_of_another_width_is_refused(tmp_path: Path, stored: str, asked: TokenDtype, told: str) -> None:
    """Read as uint16, a file of uint32 is every token and a zero: nothing else would ever notice."""
    file = tmp_path / "a.bin"
    np.random.default_rng(0).zipf(1.2, 20_000).clip(max=50_256).astype(stored).tofile(file)
    with pytest.raises(RequestError, match=rf"a\.bin: is read as {asked} \(data\.dtype\), but {told}"):
        open_bin(file, asked)


def test_a_npy_tells_its_own_type(tmp_path: Path) -> None:
    """Also where its numbers look like another's."""
    np.save(tmp_path / "a.npy", np.array([7, 0, 40_000, 0] * 100, dtype=np.uint16))
    assert open_npy(tmp_path / "a.npy").tolist() == [7, 0, 40_000, 0] * 100


def test_negative_tokens_are_refused_by_place() -> None:
    with pytest.raises(RequestError, match=r"token 2.*-5"):
        largest_token(Path("a.npy"), np.array([0, 1, -5, -6]))
