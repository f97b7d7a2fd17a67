"""One source of truth: what the search refuses by arithmetic the plan's rules refuse, and no more."""

import pytest

from meshwright.config.choices import Context
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run
from meshwright.layout.axes import Axis
from meshwright.price import legal
from meshwright.price.catalogue import cluster_of
from meshwright.price.layouts import CONTEXTS
from meshwright.price.ranking import with_keys
from meshwright.price.request import planned
from meshwright.price.search import search, space_of

ROUTED = ("model.preset=qwen3-30b-a3b", "model.layers=4", "data.sequence_length=96", "batch.global=24")
DENSE = ("model.preset=llama3-8b", "model.layers=4", "model.heads=24", "model.kv_heads=6", "model.head_dim=64",
         "data.sequence_length=144", "batch.global=36")  # fmt: skip


@pytest.mark.parametrize("words", [ROUTED, DENSE])
@pytest.mark.parametrize("gpus", [12, 16, 36])
def test_search_and_rules_refuse_the_same_layouts(words: tuple[str, ...], gpus: int) -> None:
    run = load_run(None, words)
    space = space_of(run, gpus, cluster_of("h100-sxm"), {})
    accepted = refused = 0
    for mesh in legal.meshes(space):
        degrees = {f"mesh.{name}": size for name, size in zip(legal.AXES, mesh, strict=True)}
        rule = legal.mesh_rules(space, mesh)
        if rule is not None:
            refused += 1
            with pytest.raises(RequestError):
                planned(with_keys(run, degrees | {"batch.micro": 1}), space.target.arch, gpus)
            continue
        found, _ = legal.within(space, mesh)
        kinds = {(CONTEXTS[int(kind)], int(inner), int(micro), bool(sp)) for kind, inner, micro, sp in zip(
            found["context"], found["inner_context"], found["micro"], found["sequence"], strict=True)}  # fmt: skip
        for micro in legal.micros(space, mesh):
            for kind, inner in [(Context.RING, 1), (Context.RING, 2), (Context.ULYSSES, 1), (Context.ALLGATHER, 1)]:
                if inner > 1 and (inner >= mesh[3] or mesh[3] == 1):
                    continue  # ulysses by another name
                keys = {"parallel.context": kind.value, "parallel.context_inner": inner, "batch.micro": micro}
                keys |= {"parallel.sequence": False}
                here = (kind, inner, micro, False) in kinds or mesh[3] == 1
                wanted = with_keys(run, degrees | keys)
                if here:
                    assert planned(wanted, space.target.arch, gpus).degrees.on(Axis.CP) == mesh[3]
                    accepted += 1
                else:
                    with pytest.raises(RequestError):
                        planned(wanted, space.target.arch, gpus)
                    refused += 1
    assert accepted > 3
    assert refused > 3


def test_rules_of_axes_that_do_not_run_yet_are_told_in_one_message() -> None:
    for words, rule in (
        ((*ROUTED, "mesh.ep=5", "batch.global=20"), "ep must divide the 128 experts"),
        ((*DENSE, "mesh.ep=2"), "ep needs a model with experts"),
        ((*ROUTED, "mesh.cp=5"), "cp must divide the sequence length of 96"),
        ((*DENSE, "mesh.cp=16"), "2 cp must divide the sequence length of 144"),
        ((*DENSE, "mesh.cp=9", "parallel.context=ulysses"), "ulysses must divide the 24 query heads"),
    ):
        run = load_run(None, words)
        with pytest.raises(RequestError, match=rule):
            planned(run, space_of(run, run.mesh.cp * run.mesh.ep, cluster_of("h100-sxm"), {}).target.arch)


@pytest.mark.parametrize("cluster", ["h100-sxm", "local"])
@pytest.mark.parametrize(
    ("layers", "pp", "chunks"), [(3, 4, 1), (2, 4, 1), (6, 2, 4), (7, 2, 4), (5, 2, 4), (11, 2, 4), (40, 2, 14)]
)
def test_stages_and_blocks_by_one_rule(cluster: str, layers: int, pp: int, chunks: int) -> None:
    """Virtual stages of usual trainers outnumber blocks by at most two; no pipeline stage is without a block."""
    words = (f"model.layers={layers}", f"mesh.pp={pp}", "batch.global=16", "batch.micro=1")
    keys = {"mesh.pp": pp, "parallel.schedule": "interleaved" if chunks > 1 else "1f1b", "parallel.chunks": chunks}
    run, where = with_keys(load_run(None, words), keys | {"mesh.dp": 1}), cluster_of(cluster)
    space = space_of(run, pp, where, keys)
    spare = 2 if cluster == "h100-sxm" and chunks > 1 else 0
    legal_here = legal.mesh_rules(space, (1, 1, pp, 1, 1)) is None
    assert legal_here == (pp * chunks <= layers + spare)
    if legal_here:
        assert sum(planned(run, space.target.arch, pp, where).pipeline.stages) == layers
        assert search(run, pp, where, fixed=keys).best.price.plan.pipeline.chunks == chunks
    else:
        with pytest.raises(RequestError, match="one at least a stage"):
            planned(run, space.target.arch, pp, where)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("within", [0, 1, 2, 3, 4, 6, 12, 24])
@pytest.mark.parametrize("more", [{}, {"parallel.offload": "params"}])
def test_shards_within_a_number_of_replicas_by_one_rule(zero: int, within: int, more: dict[str, str]) -> None:
    """Within all replicas, and within one, was refused by the search alone."""
    keys = {"mesh.dp": 12, "batch.micro": 1, "parallel.zero": zero, "parallel.zero_shard_within": within, **more}
    run = load_run(None, [*DENSE, *(f"{key}={value}" for key, value in keys.items())])
    space = space_of(run, 12, cluster_of("h100-sxm"), keys)
    if legal.mesh_rules(space, (12, 1, 1, 1, 1)) is None:
        plan = planned(run, space.target.arch, 12)
        found = {each[:2] for each in legal._shardings(space, 12, 8)}
        assert found == {(plan.sharding.stage, plan.sharding.within)}
    else:
        with pytest.raises(RequestError, match=r"zero_shard_within|parallel\.offload"):
            planned(run, space.target.arch, 12)


def test_the_search_takes_what_the_estimate_takes() -> None:
    for within, sharding in ((12, (3, 0)), (1, (0, 0))):
        keys = {"mesh.dp": 12, "parallel.zero": 3, "parallel.zero_shard_within": within}
        best = search(load_run(None, DENSE), 12, "h100-sxm", fixed=keys, top=1, budget=0).best
        assert (best.price.plan.sharding.stage, best.price.plan.sharding.within) == sharding
