"""No field of a plan is set in vain: changing any one changes what a run does, or is refused.

Every stored field is found by walking the plan itself, so a new one is looked at from its first day; `name` alone is
exempt. What a run does: its programs, the bytes it sends and keeps, its samples, its learning rates, the files it
exports, and, where all of these are equal, the losses and weights of two real steps and an evaluation. Plans of more
than one rank are looked at through what their executor does literally.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.arch.arch import Arch, Experts, Latent, Norm, Rope, RopeScaling
from meshwright.arch.huggingface import hf_config
from meshwright.comm.mesh import Mesh
from meshwright.config.choices import (
    Balance,
    Context,
    LearningRateSchedule,
    OptimizerKind,
    Schedule,
)
from meshwright.config.errors import RequestError
from meshwright.data import Dataset, open_dataset
from meshwright.layout.axes import Degrees
from meshwright.parallel.engine import Engine
from meshwright.parallel.support import check_supported
from meshwright.plan.action import Kind
from meshwright.plan.folds.ledger import ledger
from meshwright.plan.folds.memory import memory
from meshwright.plan.learning_rate import learning_rate
from meshwright.plan.pieces import state_pieces
from meshwright.plan.plan import (
    Batch,
    ContextSplit,
    Data,
    Execution,
    Moe,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Sharding,
    Start,
)
from meshwright.plan.program import program
from meshwright.plan.rules import canonical, check_plan
from meshwright.train.evaluate import evaluate
from meshwright.train.feed import Feed

EXEMPT = {"name"}
STEPS = 2


def base_arch(**fields: Any) -> Arch:
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 257}
    return Arch(**{"family": "llama", "layers": 2, **sizes, **fields})


def base_plan(source: str, **sections: Any) -> Plan:
    plan = Plan(
        name="fields", seed=0, arch=base_arch(), start=Start(),
        data=Data(source=source, sequence_length=16, eval_fraction=0.1),
        batch=Batch(4, 2), optimizer=Optimizer(warmup_steps=2, steps=6, clip_norm=0.5), precision=Precision(),
        degrees=Degrees(), sharding=Sharding(), pipeline=Pipeline(), context=ContextSplit(), execution=Execution(),
    )  # fmt: skip
    return canonical(replace(plan, **sections))


@dataclass(frozen=True)
class Base:
    """A plan in which some fields decide something: those whose paths begin with one of `fields`.

    `runs`: on one process, so what cannot be seen before is seen by running it.
    """

    plan: Plan
    fields: tuple[str, ...] = ("",)
    runs: bool = True


def bases(source: str) -> dict[str, Base]:
    """Every field is looked at in the first, and again where others give it a meaning."""
    steep = Rope(scaling=RopeScaling.LLAMA3, factor=4.0, original_positions=16)
    yarn = Rope(scaling=RopeScaling.YARN, factor=4.0, original_positions=16)
    window = {"sliding_window": 4, "windowed_layers": (1,)}
    sgd = Optimizer(kind=OptimizerKind.SGD, schedule=LearningRateSchedule.CONSTANT, weight_decay=0.0, clip_norm=0.5)
    learned = {"rope": None, "max_positions": 32, "norm": Norm.LAYER, "dropout": 0.1}
    latent = Latent(query_rank=8, kv_rank=8, content_dim=4, rope_dim=4, value_dim=8)
    windowed = ("arch.rope", "arch.sliding", "arch.windowed", "optimizer", "execution")
    layout = ("batch", "degrees", "sharding", "pipeline", "context", "execution")
    zero = base_plan(source, degrees=Degrees(dp=4), batch=Batch(8, 1), sharding=Sharding(3, within=2))
    stages = base_plan(
        source, arch=base_arch(layers=4), degrees=Degrees(dp=2, pp=2), batch=Batch(8, 1),
        pipeline=Pipeline(Schedule.ONE_F_ONE_B, 1, (1, 3)),
    )  # fmt: skip
    tensor = base_plan(source, degrees=Degrees(tp=2), execution=Execution(sequence=True))
    context = base_plan(source, degrees=Degrees(cp=4), context=ContextSplit(Context.RING, 2))
    experts = base_arch(family="mixtral", experts=Experts(4, 2, 16))
    compressed = base_arch(family="deepseek_v3", kv_heads=4, latent=latent)
    return {
        "llama": Base(base_plan(source)),
        "window": Base(base_plan(source, arch=base_arch(rope=steep, **window), optimizer=sgd), windowed),
        "yarn": Base(base_plan(source, arch=base_arch(rope=yarn, tie_embeddings=True)), ("arch.rope",)),
        "learned": Base(base_plan(source, arch=base_arch(family="gpt2", **learned)), ("arch",)),
        "experts": Base(base_plan(source, arch=experts), ("arch.experts",), runs=False),
        "loads": Base(base_plan(source, arch=experts, moe=Moe(Balance.AUXILIARY, 0.5, 0.1)), ("moe",)),
        "latent": Base(base_plan(source, arch=compressed), ("arch.latent",), runs=False),
        "zero": Base(zero, layout, runs=False),
        "stages": Base(stages, layout, runs=False),
        "tensor": Base(tensor, layout, runs=False),
        "context": Base(context, ("context", "degrees", "data.documents"), runs=False),
    }


# ------------------------------------------------------------------ the walk


@dataclass(frozen=True)
class Change:
    """One stored field at another value."""

    path: str
    plan: Plan


def changes(base: Base, source: str) -> Iterator[Change]:
    """Every field that `base` is about, alone, at other values."""
    plan = base.plan
    others = {"data.source": [source.replace("corpus", "other")], "data.text_field": ["body"]}
    for path, value in leaves(plan):
        if path in EXEMPT or not path.startswith(base.fields):
            continue
        for other in others.get(path) or alternatives(path, value):
            if other != value:
                yield Change(f"{path} = {other}", with_field(plan, path.split("."), other))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every stored field, dataclasses walked through; an optional one is a leaf as well."""
    for field in dataclasses.fields(value):
        inner, name = getattr(value, field.name), f"{path}{field.name}"
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, f"{name}.")
            if "None" in str(field.type):
                yield name, inner
        else:
            yield name, inner


OPTIONAL: dict[str, Any] = {
    "arch.rope": Rope(),
    "arch.experts": Experts(4, 2, 16),
    "arch.latent": Latent(query_rank=8, kv_rank=8, content_dim=4, rope_dim=4, value_dim=8),
}


def alternatives(path: str, value: Any) -> list[Any]:
    """Other values of the same type."""
    if path in OPTIONAL:
        return [None if value is not None else OPTIONAL[path]]
    if path == "arch.family":
        return [family for family in ("llama", "mistral", "qwen2", "gpt2") if family != value]
    if path == "arch.windowed_layers":
        return [(), (0,)] if value else [(0,)]
    match value:
        case bool():
            return [not value]
        case Enum():
            return [other for other in type(value) if other is not value]
        case int():
            return [value + 1, value * 2] if value else [1, 2]
        case float():
            return [value / 2, value + 0.25] if value else [0.25]
        case str():
            return [value + "x"]
        case tuple():
            return [value[::-1], *([(value[0] * 2, *value[1:])] if isinstance(value[0], float | int) else [])]
    raise AssertionError(f"{path}: no other value of {value!r} is known; say one here")


def with_field(value: Any, path: list[str], other: Any) -> Any:
    name, *rest = path
    return replace(value, **{name: with_field(getattr(value, name), rest, other) if rest else other})


# ------------------------------------------------------------------ what a run does


@cache
def opened(data: Data, cache: Path) -> Dataset:
    return open_dataset(data, cache)


def told(plan: Plan, cache: Path) -> str:
    """What a run does, as far as it is decided before it runs."""
    dataset = opened(plan.data, cache)
    ranks = range(plan.degrees.ranks)
    evaluation = dataset.eval.read(np.arange(dataset.eval.num_samples))
    feeds = [Feed(dataset, plan.seed, plan.batch.sequences, 0, 1).batch(step).fingerprint() for step in range(STEPS)]
    return repr(
        (
            [program(plan, rank, kind) for rank in ranks for kind in Kind],
            [ledger(plan, rank) for rank in ranks],
            [memory(plan, rank) for rank in ranks] if plan.optimizer.kind is not OptimizerKind.MUON else "muon",
            [state_pieces(plan, rank) for rank in ranks],
            feeds,
            (dataset.digest, evaluation.fingerprint(), evaluation.rows.document_ids is None),
            [learning_rate(plan.optimizer, step) for step in range(12)],
            exported(plan.arch),
        )
    )


def exported(arch: Arch) -> str:
    """The configuration file an export writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return json.dumps(hf_config(arch), sort_keys=True, default=str)
        except RequestError as error:
            return str(error)


def ran(plan: Plan, cache: Path) -> list[Any]:
    """Losses and weights of two steps, and an evaluation, on one rank."""
    feed = Feed(opened(plan.data, cache), plan.seed, plan.batch.sequences, 0, 1)
    engine = Engine(plan, Mesh.of(plan).start())
    losses = [engine.step(feed.batch(step), learning_rate(plan.optimizer, step)) for step in range(STEPS)]
    weights = [
        [float(values.double().sum()), float(values.abs().double().sum())]
        for values in (s.whole for s in engine.stores)
    ]
    return [losses, weights, evaluate(engine, feed)]


def refused(plan: Plan) -> bool:
    try:
        check_plan(plan)
    except RequestError:
        return True
    return False


def in_vain(base: Base, change: Change, cache: Path, reference: list[Any]) -> bool:
    """Whether a change is accepted and changes nothing."""
    if refused(change.plan):
        return False
    try:
        check_supported(change.plan)
        if told(base.plan, cache) != told(change.plan, cache):
            return False
        return not base.runs or ran(change.plan, cache) == reference
    except RequestError:  # the data do not exist, or do not suit
        return False
    except NotImplementedError:  # the engine says what it cannot do instead of doing something else
        return False


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("every-field")
    for name, words in (("corpus", "a rose is a rose"), ("other", "so it goes")):
        lines = [json.dumps({"text": f"{words} {i}" * 3, "body": f"{i} {words}"}) for i in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder / "corpus.jsonl")


@pytest.mark.parametrize("name", list(bases("corpus.jsonl")))
def test_no_field_is_set_in_vain(name: str, source: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    base, cache = bases(source)[name], tmp_path_factory.getbasetemp() / "every-field-cache"
    check_plan(base.plan)
    reference = ran(base.plan, cache) if base.runs else []
    vain = [change.path for change in changes(base, source) if in_vain(base, change, cache, reference)]
    assert not vain, "accepted, and yet nothing changes:\n" + "\n".join(vain)


def test_the_walk_meets_every_field(source: str) -> None:
    """All but the exempt, down to the numbers inside optional parts."""
    met = {change.path.split(" = ")[0] for base in bases(source).values() for change in changes(base, source)}
    stored = {path for base in bases(source).values() for path, _ in leaves(base.plan)}
    assert stored - met == EXEMPT
    assert {"seed", "arch.rope.theta", "arch.experts.count", "arch.latent.kv_rank", "sharding.within"} <= met


def test_runs_repeat_so_a_difference_means_something(source: str, tmp_path: Path) -> None:
    plan = bases(source)["learned"].plan
    assert ran(plan, tmp_path) == ran(plan, tmp_path)
    assert told(plan, tmp_path) == told(plan, tmp_path)
