"""tokenizer.json: nothing added, cut or padded; the end found or refused; masks by characters."""

import json
from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.data.document import Part, Piece, plain
from meshwright.data.tokenizer.huggingface import HuggingFaceTokenizer
from meshwright.data.tokenizer.tokenizer import encode_text

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["def main(): return 1", "import numpy as np", "the quick brown fox jumps over the lazy dog"] * 3


def make(folder: Path, specials: list[str], **config: object) -> Path:
    """A byte-level BPE tokenizer with a traps' worth of settings: truncation, padding, a template that adds tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    if specials:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], tokenizer.token_to_id(specials[0]))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_text_is_encoded_as_it_is(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer.open(str(make(tmp_path, ["<bos>", "<|endoftext|>"])))
    text = "the quick brown fox\n\n  jumps ☃"
    tokens = encode_text(tokenizer, text)
    assert len(tokens) > 4
    assert tokenizer.decode([*tokens, tokenizer.end_of_document]) == text
    assert 1 not in tokens
    assert tokenizer.vocab_size > 256


def test_trained_characters_decide(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer.open(str(make(tmp_path, ["<|endoftext|>"])))
    piece = Piece((Part("the quick ☃", trained=False), Part(" brown ☃"), Part(" fox", trained=False)))
    encoded, whole = tokenizer.encode([piece, plain("the")])
    assert encoded.trained is not None
    assert tokenizer.decode(encoded.tokens[encoded.trained].tolist()) == " brown ☃"
    assert encoded.tokens.tolist() == encode_text(tokenizer, piece.text)
    assert whole.trained is None
    straddles = tokenizer.encode([Piece((Part("the quick br", trained=False), Part("own")))])[0]
    assert straddles.trained is not None
    assert tokenizer.decode(straddles.tokens[straddles.trained].tolist()).endswith("own")


@pytest.mark.parametrize(
    ("config", "ids", "end"),
    [
        ({"eos_token": "<b>"}, {}, "<b>"),
        ({"eos_token": {"content": "<b>"}}, {"eos_token_id": 0}, "<b>"),
        ({"eos_token": "<gone>"}, {"eos_token_id": [1, 2]}, "<b>"),
        ({}, {"eos_token_id": 0}, "<a>"),
        ({}, {}, "</s>"),
    ],
)
def test_the_end_of_a_document_is_found(tmp_path: Path, config: dict, ids: dict, end: str) -> None:
    folder = make(tmp_path, ["<a>", "<b>", "</s>"], **config)
    (folder / "config.json").write_text(json.dumps(ids))
    tokenizer = HuggingFaceTokenizer.open(str(folder / "tokenizer.json"))
    assert tokenizer.end_of_document == ["<a>", "<b>", "</s>"].index(end)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="which token ends a document"):
        HuggingFaceTokenizer.open(str(make(tmp_path, ["<a>"])))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        HuggingFaceTokenizer.open(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="no tokenizer"):
        HuggingFaceTokenizer.open(str(tmp_path))


def test_the_digest_knows_what_decides_tokens(tmp_path: Path) -> None:
    folder = make(tmp_path, ["<a>", "</s>"])
    first = HuggingFaceTokenizer.open(str(folder)).digest
    assert HuggingFaceTokenizer.open(str(folder)).digest == first
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<a>"}')
    second = HuggingFaceTokenizer.open(str(folder)).digest
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert len({first, second, HuggingFaceTokenizer.open(str(folder)).digest}) == 3


def test_conversations_by_the_folders_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = {"eos_token": "</s>", "chat_template": [{"name": "default", "template": template}]}
    tokenizer = HuggingFaceTokenizer.open(str(make(tmp_path, ["<a>", "</s>"], **config)))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (piece,) = tokenizer.render_chat(messages)
    assert piece.text == "<user>Hi</s><assistant>Hello</s>"
    (encoded,) = tokenizer.encode([piece])
    assert encoded.trained is not None
    assert encoded.tokens[encoded.trained].tolist()[-1] == tokenizer.end_of_document
    assert tokenizer.decode(encoded.tokens[encoded.trained].tolist()) == "Hello"
    without = HuggingFaceTokenizer.open(str(make(tmp_path, ["<a>", "</s>"], eos_token="</s>")))
    with pytest.raises(RequestError, match="no chat template"):
        without.render_chat(messages)


@pytest.mark.parametrize("chat", [["x"], [None], [{"name": "tools"}], 5, {}])
def test_a_template_in_no_known_form_is_none(tmp_path: Path, chat: object) -> None:
    tokenizer = HuggingFaceTokenizer.open(str(make(tmp_path, ["<a>", "</s>"], chat_template=chat)))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "assistant", "content": "Hello"}])
