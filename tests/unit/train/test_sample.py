"""What a run's sample of text begins with: the user's own held-out text, or there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.data import open_dataset
from meshwright.plan.plan import Data
from meshwright.train.sample import opening

LENGTH = 64


def opening_of(folder: Path, held_out: str, share: float = 0.5) -> str:
    """Of a text whose second half is held out, from exactly there on."""
    held = held_out.encode()[: LENGTH + 1].ljust(LENGTH + 1, b"\n")
    (folder / "text.txt").write_bytes(b"a" * LENGTH + held)
    data = Data(str(folder / "text.txt"), sequence_length=LENGTH, eval_fraction=share)
    return opening(open_dataset(data, folder / "cache"))


@pytest.mark.parametrize(
    ("held_out", "words"),
    [
        ("nal words\nO Romeo, Romeo! wherefore art thou", "O Romeo, Romeo! wherefore"),
        ("tail\n\n    def area(self,  radius):  # of a circle", "def area(self,  radius):  #"),
        ("one line without an end of it", "one line without an"),
        ("tail\nonly two\nthen more of it", "only two"),
        ("\u00e9 Schl\u00f6sser\nGr\u00fc\u00dfe aus M\u00fcnchen", "Gr\u00fc\u00dfe aus M\u00fcnchen"),
        ("tail\n\n \t\n", "tail"),
        ("\n", ""),
    ],
)
def test_it_begins_with_the_first_words_of_a_whole_line(tmp_path: Path, held_out: str, words: str) -> None:
    assert opening_of(tmp_path, held_out) == words


def test_without_held_out_text_there_is_none(tmp_path: Path) -> None:
    assert opening_of(tmp_path, "tail\nwords of a text", share=0.0) == ""


def test_tokens_of_an_unknown_tokenizer_are_no_words(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", (np.arange(4 * LENGTH) + 300).astype(np.uint16))
    data = Data(str(tmp_path / "tokens.npy"), sequence_length=LENGTH, eval_fraction=0.5)
    assert opening(open_dataset(data, tmp_path / "cache")) == ""
