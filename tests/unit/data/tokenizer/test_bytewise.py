"""The built-in tokenizer."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.document import Part, Piece, plain
from meshwright.data.tokenizer.bytewise import ByteTokenizer
from meshwright.data.tokenizer.tokenizer import encode_text, token_dtype

BYTES = ByteTokenizer()


@given(st.text())
def test_text_comes_back(text: str) -> None:
    tokens = encode_text(BYTES, text)
    assert tokens == list(text.encode())
    assert BYTES.decode([*tokens, BYTES.end_of_document]) == text


def test_broken_characters_are_shown_as_such() -> None:
    assert BYTES.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_trained_parts_by_bytes() -> None:
    whole, masked = BYTES.encode([plain("é"), Piece((Part("é", trained=False), Part("a")))])
    assert whole.trained is None
    assert masked.trained is not None
    assert masked.trained.tolist() == [False, False, True]


def test_the_smallest_stored_type() -> None:
    assert token_dtype(65_536) == "u2"
    assert token_dtype(65_537) == "u4"
