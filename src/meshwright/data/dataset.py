"""Opening the data of a run: from the [data] section to two splits of samples.

source --locate--> files --read--> documents --tokenise--> token cache --+
                     |                                                   +--> stream --> samples --> train | eval
                     +------------- token files, mapped as they are -----+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.config.choices import Documents, Order
from meshwright.config.errors import RequestError
from meshwright.data.digest import combined_digest, measure_files, remembered
from meshwright.data.order import sample_ids
from meshwright.data.samples import plan_samples
from meshwright.data.settings import DataSettings
from meshwright.data.sources.locate import ACCEPTED, Located, SourceKind, locate
from meshwright.data.sources.read import read_documents
from meshwright.data.split import Split
from meshwright.data.tokenizer.open import open_tokenizer
from meshwright.data.tokenizer.tokenizer import Tokenizer, encode_text
from meshwright.data.tokens.cache import FORMAT, Counts, NothingAcceptedError, cached_tokens
from meshwright.data.tokens.files import TokenFile, measure_tokens, open_shards, told_beyond
from meshwright.data.tokens.stream import TokenStream
from meshwright.layout.rows import Integers


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a source turned out to hold, before it is cut into samples."""

    stream: TokenStream
    tokenizer: Tokenizer | None
    """None where token files hold tokens of an unknown tokenizer."""
    vocab_size: int
    digest: str
    size_bytes: int
    num_documents: int | None
    """None where token files do not say."""
    trained_tokens: int
    num_empty: int = 0
    num_bad: int = 0
    problems: tuple[str, ...] = ()
    largest: int = -1
    """The largest token of token files."""
    token_files: tuple[TokenFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Dataset:
    """The data of a run. `train` and `eval` never share a label; `description` is one line for the screen."""

    corpus: Corpus
    train: Split
    eval: Split
    description: str
    order: Order

    @property
    def vocab_size(self) -> int:
        """What the model's vocabulary must hold at least."""
        return self.corpus.vocab_size

    @property
    def end_of_document(self) -> int | None:
        """The token that ends a document; None where it is not known."""
        return None if self.corpus.tokenizer is None else self.corpus.tokenizer.end_of_document

    @property
    def digest(self) -> str:
        """Of the corpus' content, whatever its place and its tokenizer."""
        return self.corpus.digest

    @property
    def problems(self) -> tuple[str, ...]:
        """The first bad records, each with file and line."""
        return self.corpus.problems

    def check_vocabulary(self, vocab: int) -> None:
        """Raise RequestError where a model of `vocab` tokens has no embedding for a token of the data.

        Token files are told by file, position and value; of text every token counts that its tokenizer may make.
        """
        corpus = self.corpus
        needed = corpus.largest + 1
        if not corpus.token_files:
            _check_tokens(corpus.vocab_size, vocab)
        elif needed > vocab:
            rule = f"each token must be below it, but {told_beyond(corpus.token_files, vocab)}"
            raise RequestError(
                f"model.vocab = {vocab}", rule, (f"model.vocab = {needed}", "the tokenizer of the model")
            )

    def sample_ids(self, seed: int, start: int, count: int) -> Integers:
        """(count,) training samples that entries [start, start + count) of the seeded order name."""
        return sample_ids(self.order, seed, self.train.num_samples, start, count)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        return encode_text(self._known_tokenizer(), text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return self._known_tokenizer().decode(tokens)

    def _known_tokenizer(self) -> Tokenizer:
        if self.corpus.tokenizer is None:
            rule = "these token files hold tokens that are not bytes; text needs the tokenizer that made them"
            raise RequestError('data.tokenizer = "bytes"', rule, ["a tokenizer.json or a folder that holds one"])
        return self.corpus.tokenizer


def check_text_vocabulary(settings: DataSettings, vocab: int) -> None:
    """Raise RequestError as `Dataset.check_vocabulary` does, before text is read.

    Token files tell by what they hold, and data that are elsewhere cannot tell here: nothing is said of either.
    """
    try:
        located = locate(settings.source)
    except RequestError:
        return
    if located.kind is SourceKind.TEXT:
        _check_tokens(open_tokenizer(settings.tokenizer).vocab_size, vocab)


def _check_tokens(needed: int, vocab: int) -> None:
    if needed > vocab:
        rule = f"is less than the tokenizer's {needed} tokens"
        raise RequestError(f"model.vocab = {vocab}", rule, (f"model.vocab = {needed}", "the tokenizer of the model"))


def open_dataset(settings: DataSettings, cache_folder: Path) -> Dataset:
    """The data that `settings` names; text becomes tokens once, kept below `cache_folder`.

    Raises RequestError for everything a user can mend: no file, unknown format, nothing accepted, too few tokens.
    """
    try:
        return _opened(settings, cache_folder)
    except OSError as error:
        value = str(error.filename or f'data.source = "{settings.source}"')
        raise RequestError(value, f"cannot be read: {error.strerror or error}") from None


def _opened(settings: DataSettings, cache_folder: Path) -> Dataset:
    located = locate(settings.source)
    tokenizer = open_tokenizer(settings.tokenizer)
    if located.kind is SourceKind.TEXT:
        corpus = _text_corpus(located, settings, tokenizer, cache_folder)
    else:
        corpus = _token_corpus(located, settings, tokenizer, cache_folder)
    masks = settings.documents is Documents.MASKED
    if masks and not corpus.stream.knows_documents:
        rule = "needs to know where documents end, and these token files do not say"
        raise RequestError('data.documents = "masked"', rule, ["data.tokenizer = the one that made them", '"packed"'])
    plan = plan_samples(corpus.stream.num_tokens, settings.sequence_length, settings.eval_fraction)
    length = settings.sequence_length
    train = Split(corpus.stream, length, 0, plan.num_train, masks)
    evaluation = Split(corpus.stream, length, plan.num_train, plan.num_eval, masks)
    cut = (
        f"{plan.num_train:,} + {plan.num_eval:,} samples of {length} (train + eval), "
        f"{plan.dropped_tokens:,} tokens dropped at the end"
    )
    return Dataset(corpus, train, evaluation, f"{settings.source}: {_described(corpus)}; {cut}", settings.order)


def _text_corpus(located: Located, settings: DataSettings, tokenizer: Tokenizer, cache_folder: Path) -> Corpus:
    files = located.files
    content = remembered(files, cache_folder, lambda: measure_files(files))
    key = combined_digest((str(FORMAT), content.digest, tokenizer.digest, settings.text_field))
    try:
        shard, counts = cached_tokens(
            cache_folder / "tokens", key, tokenizer, lambda: read_documents(files, settings.text_field, tokenizer)
        )
    except NothingAcceptedError as error:
        raise _refusal(settings.source, error.counts) from None
    return Corpus(
        TokenStream([shard]),
        tokenizer,
        tokenizer.vocab_size,
        content.digest,
        content.size_bytes,
        counts.documents,
        counts.trained_tokens,
        counts.empty,
        counts.bad,
        counts.problems,
    )


def _token_corpus(located: Located, settings: DataSettings, tokenizer: Tokenizer, cache_folder: Path) -> Corpus:
    shards = open_shards(located.files, settings.dtype)
    files = [file for shard in shards for file in shard.files]
    reading = settings.dtype.value  # of a raw .bin: other numbers, and another largest one
    content = remembered(files, cache_folder, lambda: measure_tokens(shards), reading)
    largest = content.largest_token or 0
    known: Tokenizer | None = tokenizer
    if largest >= tokenizer.vocab_size:
        if settings.tokenizer != "bytes":
            beyond = told_beyond(shards, tokenizer.vocab_size)
            rule = f"has {tokenizer.vocab_size} tokens, but {beyond}"
            raise RequestError(f'data.tokenizer = "{settings.tokenizer}"', rule, ["the tokenizer that made them"])
        known = None
    end = None if known is None else known.end_of_document
    stream = TokenStream([shard.open(end) for shard in shards])
    counted = [shard.num_documents for shard in shards]
    num_documents = None if None in counted else sum(number or 0 for number in counted)
    vocab_size = tokenizer.vocab_size if known is not None else largest + 1
    size_bytes, trained = content.size_bytes, stream.num_tokens
    return Corpus(
        stream, known, vocab_size, content.digest, size_bytes, num_documents, trained, largest=largest,
        token_files=tuple(shards),
    )  # fmt: skip


def _refusal(source: str, counts: Counts) -> RequestError:
    told = "".join(f"\n  {problem}" for problem in counts.problems)
    rule = f"holds no document: {counts.bad} bad and {counts.empty} empty records{told}"
    return RequestError(f'data.source = "{source}"', rule, ACCEPTED)


def _described(corpus: Corpus) -> str:
    tokenizer = "an unknown tokenizer" if corpus.tokenizer is None else corpus.tokenizer.name
    parts = [
        f"{corpus.stream.num_tokens:,} tokens of {tokenizer}",
        f"{corpus.size_bytes:,} bytes",
        f"digest {corpus.digest[:12]}",
    ]
    if corpus.num_documents is not None:
        parts.insert(0, f"{corpus.num_documents:,} documents")
    if corpus.trained_tokens != corpus.stream.num_tokens:
        parts.append(f"{corpus.trained_tokens:,} tokens trained")
    if corpus.num_empty:
        parts.append(f"{corpus.num_empty:,} empty texts left out")
    if corpus.num_bad:
        parts.append(f"{corpus.num_bad:,} bad records left out")
    return ", ".join(parts)
