"""Foreign files with anything in place of a value: read, or refused in one RequestError; nothing else is raised."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.config.errors import RequestError
from meshwright.config.load import dump_run, load_run
from meshwright.price.foreign.convert import convert
from meshwright.price.foreign.dialect import Format

OURS = Format.MESHWRIGHT
RUN = dump_run(load_run(None, ["model.preset=llama3.1-8b", "mesh.dp=8", "parallel.zero=3", "batch.global=32",
                               "batch.micro=1", "precision.compute=bfloat16"]))  # fmt: skip
WORDS = (
    "",
    "-1",
    "0",
    "3.5",
    "1" + "0" * 30,
    "1" * 5000,
    "nan",
    '"abc"',
    "[1, 2]",
    "{a = 1}",
    "true",
    "2024-01-01",
    "*x",
)
TEXTS = ("", "[]", "3", "{", "{}", "\ufeff{}", "\x00", "[" * 20_000, '{"a":' * 20_000, "a = " + "[" * 20_000,
         "seed = " + "1" * 5000, '{"seed": ' + "1" * 5000 + "}", "# ranks " + "1" * 5000)  # fmt: skip
VALUES = (None, True, -1, 0, 3.5, 10**30, float("nan"), "", "abc", "auto", [], [1, 2], {}, {"a": 1})


def refused_or_read(text: str, source: Format) -> None:
    with contextlib.suppress(RequestError):
        convert(text, source, OURS, (), 8)


def with_other_words(text: str, between: str) -> Iterator[str]:
    """Every line with another value, left out, and given twice."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        before, after = lines[:index], lines[index + 1 :]
        yield "\n".join(before + after)
        yield "\n".join([*before, line, line, *after])
        if between in line:
            name = line.split(between)[0]
            for word in WORDS:
                yield "\n".join([*before, f"{name}{between}{word}", *after])


def with_other_values(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in given.items():
        yield from ({**given, name: other} for other in VALUES)
        if isinstance(value, dict):
            yield from ({**given, name: inside} for inside in with_other_values(value))


@pytest.mark.parametrize(("format_", "between"), [(Format.ACCELERATE, ": "), (Format.TORCHTITAN, " = ")])
def test_lines(format_: Format, between: str) -> None:
    for text in with_other_words(convert(RUN, OURS, format_).text, between):
        refused_or_read(text, format_)


def test_deepspeed_values() -> None:
    given = json.loads(convert(RUN, OURS, Format.DEEPSPEED).text)
    given["zero_optimization"] |= {
        "mics_shard_size": 2,
        "zero_hpz_partition_size": 2,
        "offload_param": {"device": "cpu"},
    }
    given |= {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1}
    for other in with_other_values(given):
        refused_or_read(json.dumps(other), Format.DEEPSPEED)


def test_megatron_words() -> None:
    words = convert(RUN.replace("zero = 3", "zero = 1"), OURS, Format.MEGATRON).text.split()
    for index in range(len(words)):
        for other in (*WORDS, "--", "--tensor-model-parallel-size", "'", "\\", "t*" + "9" * 5000):
            refused_or_read(" ".join([*words[:index], other, *words[index + 1 :]]), Format.MEGATRON)


@pytest.mark.parametrize("source", list(Format))
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_whole_files(source: Format, text: str) -> None:
    with contextlib.suppress(RequestError):
        convert(text, source, Format.MEGATRON if source is OURS else OURS, (), 2)


@pytest.mark.parametrize(
    ("source", "text", "rule"),
    [
        (Format.DEEPSPEED, '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', "bf16 and fp16"),
        (Format.DEEPSPEED, '{"train_batch_size": 8, "train_batch_size": 16}', "given twice"),
        (Format.DEEPSPEED, '{"zero_optimization": {"stage": 3, "mics_shard_size": "2"}}', "mics_shard_size: 2"),
        (Format.MEGATRON, "--bf16 --fp16", "--bf16 and --fp16"),
        (Format.TORCHTITAN, '[training]\nglobal_batch_size = "all"\n', "training.global_batch_size: all"),
        (Format.TORCHTITAN, '[optimizer]\nlr = "3e-4"\n[training]\nglobal_batch_size = 8\n', "optimizer.lr: 3e-4"),
    ],
)
def test_what_contradicts_itself_or_has_another_type_is_named(source: Format, text: str, rule: str) -> None:
    with pytest.raises(RequestError, match=r"wants|takes|enables") as refused:
        convert(text, source, OURS, (), 8)
    assert rule in str(refused.value)


def test_a_line_given_twice_is_told() -> None:
    done = convert("num_processes: 4\nnum_processes: 8\n", Format.ACCELERATE, OURS)
    assert any("line 2: num_processes is given twice" in note for note in done.notes)


@pytest.mark.parametrize("target", [Format.DEEPSPEED, Format.TORCHTITAN])
def test_a_run_without_a_learning_rate_is_written(target: Format) -> None:
    """The ratio of the least to the peak rate was a division by zero."""
    words = ["optimizer.learning_rate=0", "optimizer.min_learning_rate=0", "optimizer.schedule=cosine", "mesh.dp=1",
             "model.preset=llama3.1-8b", "parallel.zero=0"]  # fmt: skip
    assert "0.0" in convert(dump_run(load_run(None, words)), OURS, target).text
