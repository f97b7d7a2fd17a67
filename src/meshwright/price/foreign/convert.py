"""From one format to another by way of a run.

    text --read--> keys --> run --write--> text --read--> keys      what comes back otherwise was lost

What is lost of a layout ([mesh], [parallel]) changes what ranks do: it is refused by name. What a format is not about
is told in one line, anything else lost key by key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from meshwright.arch.arch import Arch
from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import Fill
from meshwright.config.counted import counted
from meshwright.config.errors import RequestError
from meshwright.config.load import build_run, change_run, dump_run
from meshwright.config.problems import shown
from meshwright.config.schema import RunConfig
from meshwright.layout.axes import DEFAULT_ORDER, Degrees
from meshwright.plan.resolve import resolve_degrees, stages_of
from meshwright.price.foreign import accelerate, deepspeed, megatron, torchtitan
from meshwright.price.foreign.dialect import Dialect, Format, Source, parsed

__all__ = ["DIALECTS", "Conversion", "convert"]

DIALECTS: Mapping[Format, Dialect] = {
    Format.MEGATRON: megatron.DIALECT, Format.TORCHTITAN: torchtitan.DIALECT,
    Format.DEEPSPEED: deepspeed.DIALECT, Format.ACCELERATE: accelerate.DIALECT,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversion:
    """The text in the other format, what words mean otherwise there, and what it does not hold."""

    text: str
    run: RunConfig
    notes: tuple[str, ...]
    lost: tuple[str, ...]


def convert(
    text: str, source: Format, target: Format, words: tuple[str, ...] = (), ranks: int | None = None
) -> Conversion:
    """`text` of one format as another's. `words`: overrides for what the source leaves unsaid.

    Raises RequestError for what either side cannot express, by name.
    """
    run, notes = _run(text, source, words, ranks)
    run = _filled(run, ranks)
    if ranks is not None:
        resolve_degrees(run, ranks)
    if target is Format.MESHWRIGHT:
        _check_model(run)
        return Conversion(dump_run(run), run, tuple(notes), ())
    dialect, arch = DIALECTS[target], arch_from_model(run.model)
    degrees = resolve_degrees(run, ranks)
    at = {name: getattr(degrees, name) for name in ("dp", "tp", "pp", "cp", "ep")}
    if unsaid := [axis for axis in dialect.unspoken if at[axis] > 1]:
        rule = f"{target.value} cannot express it"
        raise RequestError.joined(
            RequestError(f"mesh.{axis} = {at[axis]}", rule, (f"mesh.{axis}=1",)) for axis in unsaid
        )
    if "batch" in dialect.sections:
        _check_batch(run, at)
    written = Source(run, arch, at, _stages(run, arch, degrees))
    out = dialect.write(written)
    back = _laid(dialect, out, run, ranks)
    refused, lost = _losses(run, back, arch, dialect, at)
    if at["pp"] > 1 and "mesh" in dialect.sections and stages_of(back, arch, degrees) != written.stages:
        refused.append((f"parallel.stages = {list(written.stages)}", ""))
    if refused:
        rule = f"{target.value} cannot express it"
        problems = [RequestError(each, rule, (works,) if works else ()) for each, works in refused]
        raise RequestError.joined(problems)
    return Conversion(out, run, (*notes, *dialect.differences(written)), tuple(lost))


def _run(text: str, source: Format, words: tuple[str, ...], ranks: int | None) -> tuple[RunConfig, list[str]]:
    if source is Format.MESHWRIGHT:
        return change_run(build_run(parsed(tomllib.loads, text, "TOML")), words), []
    reading = DIALECTS[source].read(text, ranks)
    return change_run(build_run(_tables({}, reading.keys)), words), list(reading.notes)


def _check_batch(run: RunConfig, at: Mapping[str, int]) -> None:
    """Raises RequestError where the batch is no whole number of micro-batches a rank."""
    once = run.batch.micro * at["dp"] * at["ep"]
    if run.batch.global_ % once:
        works = (f"batch.global={max(run.batch.global_ // once, 1) * once}",)
        named = f"batch.global = {run.batch.global_} with batch.micro = {run.batch.micro}"
        raise RequestError(named, f"must be a multiple of micro x {at['dp'] * at['ep']} batch ranks = {once}", works)


def _stages(run: RunConfig, arch: Arch, degrees: Degrees) -> tuple[int, ...]:
    """Blocks of each virtual stage. Raises RequestError where they are not those of the model."""
    stages, parts = stages_of(run, arch, degrees), degrees.pp * run.parallel.chunks
    if degrees.pp > 1 and (len(stages) != parts or sum(stages) != arch.layers):
        rule = f"must be {parts} numbers that hold each of the {arch.layers} blocks once"
        raise RequestError(f"parallel.stages = {list(stages)}", rule, ('parallel.stages="balanced"',))
    return stages


def _check_model(run: RunConfig) -> None:
    """Raises RequestError where the model's sizes contradict each other; a vocabulary may still be unsaid."""
    if run.model.preset is None and run.model.hf is None and run.model.vocab is None:
        run = change_run(run, ("model.vocab=2",))
    arch_from_model(run.model)


def _laid(dialect: Dialect, text: str, run: RunConfig, ranks: int | None) -> RunConfig:
    """What the written text says, where it says nothing the defaults."""
    keys = dialect.read(text, ranks).keys
    base: dict[str, Any] = {}
    if "model" not in dialect.sections:
        base["model"] = run.tables()["model"]
    if "batch.global" not in keys:
        base["batch"] = run.tables()["batch"]
    if "optimizer" not in dialect.sections:
        base["optimizer"] = run.tables()["optimizer"]
    return _filled(build_run(_tables(base, keys)), ranks)


def _tables(base: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if name:
            base.setdefault(section, {})[name] = value
        else:
            base[section] = value
    return base


def _filled(run: RunConfig, ranks: int | None) -> RunConfig:
    if ranks is None or run.mesh.dp is not Fill.FILL:
        return run
    return change_run(run, (f"mesh.dp={resolve_degrees(run, ranks).dp}",))


def _losses(
    run: RunConfig, back: RunConfig, arch: Arch, dialect: Dialect, at: Mapping[str, int]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(refused, lost) keys, as `section.key = value`; of a refused one also what the format has in its place."""
    given, got = run.tables(), back.tables()
    refused: list[tuple[str, str]] = []
    lost: list[str] = []
    if "model" in dialect.sections:
        found = arch_from_model(back.model)
        lost += [f"model: {each.name} = {getattr(arch, each.name)}" for each in fields(arch)
                 if getattr(arch, each.name) != getattr(found, each.name)]  # fmt: skip
    default = RunConfig().tables()
    left: dict[str, int] = {}
    for section, table in given.items():
        if not isinstance(table, dict):
            if table != got[section] and section != "name":
                lost.append(f"{section} = {table}")
            continue
        if section == "model":
            continue
        for name, value in table.items():
            there = got[section].get(name)
            if value == there or not _decides(section, name, given, at):
                continue
            if section in ("mesh", "parallel"):
                if name != "order" or _active(value, at) != _active(there, at):
                    refused.append((f"{section}.{name} = {shown(value)}", f"{section}.{name}={shown(there)}"))
            elif section in dialect.sections:
                lost.append(f"{section}.{name} = {value}")
            elif value != default[section].get(name):
                left[section] = left.get(section, 0) + 1
    lost += [f"[{section}]: {counted(count, 'key')}; the format is not about it" for section, count in left.items()]
    if "model" not in dialect.sections:
        lost.append("[model]: the format is not about it")
    return refused, lost


def _active(order: list[str], at: Mapping[str, int]) -> list[str]:
    return [axis for axis in order if at[axis] > 1]


def _decides(section: str, name: str, given: Mapping[str, Any], at: Mapping[str, int]) -> bool:
    """Whether a key of a layout decides anything in it. Of stages the numbers of blocks are compared."""
    parallel = given["parallel"]
    replicas = at["dp"] * at["ep"] * at["cp"]
    if section == "parallel":
        deciding: dict[str, bool] = {
            "sequence": at["tp"] > 1, "asynchronous_tensor": at["tp"] > 1, "schedule": at["pp"] > 1,
            "chunks": at["pp"] > 1, "stages": False, "context": at["cp"] > 1, "context_inner": at["cp"] > 1,
            "zero": replicas > 1,
            "zero_shard_within": parallel["zero"] > 0 and parallel["zero_shard_within"] != replicas,
            "reshard_after_forward": parallel["zero"] == 3, "offload_to": parallel["offload"] != "none",
        }  # fmt: skip
        return deciding.get(name, True)
    if section == "mesh" and name == "order":
        return list(given["mesh"]["order"]) != [axis.value for axis in DEFAULT_ORDER]
    if section == "moe" and name in ("auxiliary_loss", "statistic"):
        return bool(given["moe"]["balance"] == "auxiliary")
    unread = section == "optimizer" and name == "min_learning_rate" and given["optimizer"]["schedule"] == "constant"
    return not unread
