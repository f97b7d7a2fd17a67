"""Exported files, read by the projects they are for; each test skips where its package is not installed."""

from __future__ import annotations

import importlib
import json
import tomllib
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.load import dump_run, load_run
from meshwright.price.foreign.convert import convert
from meshwright.price.foreign.dialect import Format

MODEL = ("model.preset=llama3-8b", "batch.global=16", "batch.micro=2")


def exported(to: Format, ranks: int, *words: str) -> str:
    return convert(dump_run(load_run(None, [*MODEL, *words])), Format.MESHWRIGHT, to, (), ranks).text


def foreign(name: str) -> Any:
    """A module of another project, which may warn of what this machine lacks."""
    pytest.importorskip(name.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} needs more: {error}")


@pytest.mark.parametrize(("zero", "kind"), [(0, "MULTI_GPU"), (3, "FSDP")])
def test_accelerate_reads_its_file(zero: int, kind: str, tmp_path: Path) -> None:
    module = foreign("accelerate.commands.config.config_args")
    file = tmp_path / "accelerate.yaml"
    file.write_text(exported(Format.ACCELERATE, 8, "mesh.dp=8", f"parallel.zero={zero}"))
    read = module.load_config_from_file(str(file))
    assert read.distributed_type.value == kind
    assert read.num_processes == 8


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_reads_its_file(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    module = foreign("deepspeed.runtime.config")
    table = json.loads(exported(Format.DEEPSPEED, 1, "mesh.dp=1", f"parallel.zero={zero}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = module.DeepSpeedConfig(table)
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (16, 2, 8)
    assert (read.zero_optimization_stage, read.gradient_clipping, read.optimizer_name) == (zero, 1.0, "adamw")


def test_torchtitan_knows_every_key() -> None:
    module = foreign("torchtitan.config.configs")
    words = ("mesh.dp=2", "mesh.tp=2", "mesh.pp=2", "parallel.zero=3")
    tables = tomllib.loads(exported(Format.TORCHTITAN, 8, *words))
    for section, name in (("parallelism", "ParallelismConfig"), ("training", "TrainingConfig")):
        known = getattr(module, name)
        unknown = set(tables[section]) - {field.name for field in fields(known)}
        assert not unknown, f"[{section}] {unknown}"
        known(**tables[section])
