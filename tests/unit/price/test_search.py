"""The search against layouts priced one by one, its rules against those of plans, and what it says."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run
from meshwright.layout.axes import DEFAULT_ORDER, Axis
from meshwright.parallel.support import check_supported
from meshwright.plan.stages import balanced
from meshwright.price import legal
from meshwright.price.advice import Advice
from meshwright.price.candidates import groups_of, has_legal, points_of, priced_units
from meshwright.price.catalogue import cluster_of
from meshwright.price.nothing import nothing_fits
from meshwright.price.price import Price
from meshwright.price.ranking import By, Ranking, short, with_keys
from meshwright.price.request import planned
from meshwright.price.search import search, space_of
from meshwright.price.times import times
from meshwright.price.topology import topology
from meshwright.price.weights import weights
from tests.unit.price.ask import ask

WORDS = ("model.preset=llama3-8b", "data.sequence_length=8192", "batch.global=32", "precision.compute=bfloat16")


def ranked(*words: str, gpus: int = 16, cluster: str = "h100-sxm", **more: object) -> Ranking:
    return search(load_run(None, [*WORDS, *words]), gpus, cluster, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sixteen() -> Ranking:
    return ranked()


def test_first_is_the_best_of_layouts_priced_one_by_one() -> None:
    """Every option of two meshes, by hand."""
    fixed = {"mesh.cp": 1, "mesh.order": [axis.value for axis in DEFAULT_ORDER], "parallel.schedule": "1f1b",
             "parallel.offload": "none", "parallel.zero": 1}  # fmt: skip
    ranking = ranked(fixed=fixed, top=3)
    run, arch = ranking.run, ranking.best.price.plan.arch
    best = np.inf
    for dp, tp, pp in ((2, 8, 1), (4, 2, 2), (4, 4, 1), (8, 2, 1), (2, 4, 2), (8, 1, 2), (16, 1, 1), (4, 1, 4)):
        for micro in (1, 2, 4):
            if 32 % (micro * dp):
                continue
            for sequence in (True, False):
                for recompute in ("none", "selective", "full"):
                    keys = {"mesh.dp": dp, "mesh.tp": tp, "mesh.pp": pp, "batch.micro": micro, "parallel.zero": 1,
                            "parallel.sequence": sequence, "parallel.recompute": recompute}  # fmt: skip
                    price = Price(planned(with_keys(run, keys), arch, 16), ranking.cluster)
                    best = min(best, price.step_seconds if price.fits and price.fits_trained else np.inf)
    assert ranking.best.price.step_seconds <= best * (1 + 1e-9)


def test_rows_fit_are_accepted_by_the_rules_and_ordered(sixteen: Ranking) -> None:
    seconds = [row.price.step_seconds for row in sixteen.rows]
    assert seconds == sorted(seconds)
    assert all(row.price.fits and row.price.fits_trained and row.price.plan.degrees.ranks == 16 for row in sixteen.rows)
    assert len({row.price.plan.hash for row in sixteen.rows}) == len(sixteen.rows)


def test_the_front_is_all_that_is_shown_and_nothing_shown_beats(sixteen: Ranking) -> None:
    """Closed forms chose it: by the prices shown beside it, a ranked layout beat one "that nothing is better than"."""
    for ranking in (sixteen, search(load_run(None, []), 2, cluster_of("local", calibrated=False))):
        shown = {(row.price.step_seconds, row.price.memory["peak"]) for row in (*ranking.rows, *ranking.pareto)}
        beaten = {one for one in shown for other in shown if other != one and other[0] <= one[0] and other[1] <= one[1]}
        front = [(row.price.step_seconds, row.price.memory["peak"]) for row in ranking.pareto]
        assert len(front) > 3
        assert front == sorted(shown - beaten)


def test_by_memory_is_the_least_of_all(sixteen: Ranking) -> None:
    least = ranked(by=By.MEMORY).best.price.memory["reserved"]
    assert least <= min(row.price.memory["reserved"] for row in (*sixteen.rows, *sixteen.pareto))


def test_pruning_does_not_change_the_winner() -> None:
    whole, pruned = ranked(), ranked(budget=1)
    assert pruned.counts["priced"] < whole.counts["priced"]
    assert pruned.best.price.step_seconds == pytest.approx(whole.best.price.step_seconds, rel=1e-12)


def test_json_has_the_documented_shape(sixteen: Ranking) -> None:
    row = sixteen.best.to_json(1)
    assert set(row) == {"rank", "mesh", "parallel", "batch", "memory_peak", "step_seconds", "mfu", "cost"}
    assert set(row["mesh"]) == {"dp", "tp", "pp", "cp", "ep", "order"}
    assert row["cost"] == pytest.approx(row["step_seconds"] * 16 * 12.29 / 3600)


def test_refusals_name_a_rule_once_a_mesh_and_neighbours_that_are_legal(sixteen: Ranking) -> None:
    refused = sixteen.refused
    assert len({(each.mesh, each.rule) for each in refused}) == len(refused)
    assert all(each.count > 0 and each.nearest for each in refused)


@pytest.mark.parametrize(("gpus", "batch"), [(12, 48), (7, 7), (16, 1)])
def test_every_layout_is_legal_or_refused_and_every_legal_one_fits_or_is_refused(gpus: int, batch: int) -> None:
    """Refused options were counted once a mesh, and schedules that closed forms leave out not at all."""
    ranking = ranked(f"batch.global={batch}", gpus=gpus)
    counts = ranking.counts
    overfull = sum(each.count for each in ranking.refused if each.rule.startswith("must fit"))
    refused = sum(each.count for each in ranking.refused) - overfull
    assert counts["enumerated"] == counts["legal"] + refused
    assert counts["legal"] == counts["priced"] == counts["fitting"] + overfull


def test_neighbours_of_what_is_refused_are_legal() -> None:
    """A mesh whose every option is refused was named as a neighbour."""
    space = space_of(load_run(None, WORDS), 64, cluster_of("h100-sxm"), {"parallel.context": "ulysses"})
    groups, refused, _ = groups_of(space)
    legal_meshes = {group.mesh for group in groups}
    assert {each.mesh for each in refused} - legal_meshes
    for each in refused:
        for words in each.nearest:
            if words.startswith("mesh."):
                other = dict(zip(legal.AXES, each.mesh, strict=True))
                other |= {word.split("=")[0].removeprefix("mesh."): int(word.split("=")[1]) for word in words.split()}
                assert tuple(other.values()) in legal_meshes


@pytest.mark.parametrize(
    ("words", "gpus", "fixed"),
    [
        ((), 8, {"mesh.tp": 5}), ((), 7, {"mesh.tp": 7}), ((), 8, {"mesh.ep": 2}), ((), 8, {"batch.micro": 3}),
        ((), 64, {"mesh.cp": 64, "parallel.context": "ulysses"}), (("batch.global=7",), 4, {"mesh.dp": 4}),
        (("batch.global=6",), 8, {"mesh.pp": 8, "parallel.schedule": "zb-v", "parallel.chunks": 2}),
        (("batch.global=7",), 2, {"mesh.pp": 2, "parallel.schedule": "interleaved", "parallel.chunks": 2}),
        ((), 8, {"mesh.dp": 4, "parallel.zero": 3, "parallel.zero_shard_within": 3}),
        ((), 8, {"mesh.dp": 1, "mesh.cp": 1, "parallel.offload": "params", "parallel.zero": 3}),
        (("model.preset=llama3-70b",), 2, {}), ((), 98304, {"mesh.tp": 3, "mesh.pp": 5}),
        ((), 12, {"mesh.tp": 5, "mesh.pp": 7}), ((), 23, {"mesh.tp": 3, "mesh.cp": 5, "batch.micro": 1}),
    ],
)  # fmt: skip
def test_what_is_said_to_work_works(words: tuple[str, ...], gpus: int, fixed: dict[str, Any]) -> None:
    """Twice the devices were proposed whatever the model, and devices that no mesh of the given keys has."""
    run = load_run(None, [*WORDS, *words])
    with pytest.raises(RequestError) as refused:
        search(run, gpus, "h100-sxm", fixed=fixed)
    works = [each for each in refused.value.nearest if not each.startswith("a smaller")]
    assert works
    for each in works:
        batch, devices, kept = run.batch.global_, gpus, dict(fixed)
        for word in each.replace("--gpus ", "--gpus=").split():
            key, value = word.split("=")
            if key == "--gpus":
                devices = int(value)
            elif key == "batch.global":
                batch = int(value)
            else:
                kept[key] = int(value) if value.isdecimal() else value.strip('"')
        kept = {key: value for key, value in kept.items() if value != "balanced"}
        space = space_of(with_keys(run, {"batch.global": batch}), devices, cluster_of("h100-sxm"), kept)
        assert has_legal(space), each
        if not fixed:
            assert search(run, devices, "h100-sxm", By.MEMORY, top=1, budget=0).rows


def test_parameters_live_elsewhere_where_each_rank_has_a_piece() -> None:
    """One replica was searched too, and the whole request refused for it."""
    ranking = ranked(fixed={"parallel.offload": "params"})
    assert {row.keys["parallel.zero"] for row in ranking.rows} == {3}


def test_keys_that_are_given_stay() -> None:
    ranking = ranked(fixed={"mesh.tp": 4, "parallel.zero": 1})
    assert {row.keys["mesh.tp"] for row in ranking.rows} == {4}
    assert {row.keys["parallel.zero"] for row in ranking.rows} == {1}


def test_nothing_legal_says_which_rules() -> None:
    with pytest.raises(RequestError, match="dp x ep must divide the global batch"):
        ranked("batch.global=1", fixed={"mesh.dp": 16})


def test_nothing_fits_says_how_much_is_needed() -> None:
    with pytest.raises(RequestError, match=r"fits in 25\.\d\d GB: the least needs"):
        ranked("model.preset=llama3-70b", gpus=1, cluster="rtx4090")


@pytest.mark.parametrize(("fixed", "helps"), [({}, False), ({"batch.micro": 1}, False), ({"batch.micro": 2}, True)])
def test_a_smaller_micro_batch_is_told_where_there_is_one(fixed: dict[str, Any], helps: bool) -> None:
    alone = {f"mesh.{name}": 1 for name in legal.AXES}
    space = space_of(load_run(None, ["model.preset=llama3-70b"]), 1, cluster_of("rtx4090"), alone | fixed)
    told = nothing_fits(space, groups_of(space)[0], lambda gpus, keys: False)
    assert ("a smaller batch.micro" in str(told)) is helps


@pytest.mark.parametrize(
    ("blocks", "parts", "head"), [(32, 4, 0.3), (32, 8, 2.6), (61, 16, 1.0), (96, 7, 0.4), (5, 5, 3.0)]
)
def test_stages_are_as_even_as_the_balanced_cut(blocks: int, parts: int, head: float) -> None:
    counts = legal.stage_counts(blocks, parts, head)
    assert sum(counts) == blocks
    assert min(counts) >= 1
    best = balanced([1.0] * blocks, 0.0, head, parts)
    cost = lambda each: max(*each[:-1], each[-1] + head)  # noqa: E731
    assert cost(counts) == pytest.approx(cost(best))


def test_orders_differ_in_links() -> None:
    space = space_of(load_run(None, WORDS), 64, cluster_of("h100-sxm"), {})
    orders = legal.legal_orders(space, (8, 4, 2, 1, 1))
    assert orders[0][0] == DEFAULT_ORDER
    assert len(orders) == len({order for order, _ in orders})
    assert 2 <= len(orders) <= 6


@pytest.mark.parametrize("devices", [6, 8])
def test_orders_are_those_whose_prices_differ(devices: int) -> None:
    """Of all permutations: two that were priced alike were shown as two layouts, and some were left out."""
    cluster = cluster_of("h100-sxm", [f"cluster.node.devices={devices}"])
    space = space_of(load_run(None, WORDS), 32, cluster, {})
    mesh = 2, 2, 4, 2, 1
    kept = legal.legal_orders(space, mesh)
    orders = ((Axis.EP, *order) for order in permutations(set(DEFAULT_ORDER) - {Axis.EP}))
    every = {steps_of(space, mesh, order, kept[0][1]) for order in orders}
    assert len(every) == len(kept)
    assert every == {steps_of(space, mesh, order, kept[0][1]) for order, _ in kept}


def steps_of(space: legal.Space, mesh: legal.Mesh, order: tuple[Axis, ...], near: int) -> bytes:
    """Steps of all options of a mesh, to ten digits."""
    inside, _ = legal.within(space, mesh)
    outside, stages = legal.around(space, mesh, near)
    (group,) = priced_units(space, [(mesh, order, inside, outside, stages)])
    chosen = np.indices((len(inside["micro"]), len(outside["zero"]))).reshape(2, -1)
    points = points_of(space, group, *chosen, 0)
    step = times(space.target, points, group.units.take(chosen[0]), weights(space.target, points)).step
    return b"".join(f"{each:.10g}".encode() for each in step)


def test_lanes_follow_strides(sixteen: Ranking) -> None:
    ranking = ranked(fixed={"mesh.tp": 8, "mesh.pp": 1, "mesh.cp": 1, "mesh.dp": 2,
                            "mesh.order": [axis.value for axis in DEFAULT_ORDER]})  # fmt: skip
    lanes = {lane.axis.value: lane for lane in topology(ranking.best.price)}
    assert lanes["tp"].link == "node"
    assert lanes["dp"].link == "network"


def test_advice_prices_habits_beside_the_winner(sixteen: Ranking) -> None:
    advice = Advice(sixteen)
    why, row = advice.tree
    assert row is not None
    assert row.price.step_seconds >= sixteen.best.price.step_seconds * (1 - 1e-9)
    assert any(why in line for line in advice.habits())
    assert any("does not fit" in line or "%" in line for line in advice.changes())


def test_layouts_that_differ_read_differently() -> None:
    """With and without sequence parallel, and rings of groups, were one layout in words, with two prices."""
    by_memory = search(load_run(None, []), 4, cluster_of("local", calibrated=False), By.MEMORY)
    groups = ranked(fixed={"mesh.cp": 16, "mesh.dp": 1, "parallel.context": "ring"})
    for ranking in (by_memory, groups):
        told = {tuple(row.words): short(row.keys) for row in (*ranking.rows, *ranking.pareto)}
        assert len(set(told.values())) == len(told) > 3


def test_what_fits_one_device_only_with_states_elsewhere_does_not_fit_it() -> None:
    """The tree said "it fits one device, so only data parallel", and then that no such layout fits."""
    alone = Advice(ranked(gpus=1))
    assert {row.keys["parallel.offload"] for row in alone.ranking.rows} == {"optimizer"}
    assert max(row.keys["batch.micro"] for row in alone.ranking.rows) == 2  # which was held for too much
    assert "fits one device" not in alone.tree[0]
    assert alone.lines()[-1] == "one rank sends nothing"


@pytest.mark.parametrize(
    ("words", "fixed", "missing"),
    [
        (["model.preset=llama3-8b"], {"mesh.cp": 2}, None),
        (["model.preset=mixtral-8x7b"], {"mesh.ep": 2, "parallel.recompute": "selective"}, None),
        (["model.preset=llama3-8b", "precision.compute=float8"], {"mesh.cp": 1, "mesh.tp": 4}, "float8"),
        (["model.preset=llama3-8b"], {"mesh.cp": 1, "mesh.tp": 4}, None),
    ],
)
def test_a_winner_that_train_does_not_run_is_told(words: list[str], fixed: dict[str, int], missing: str | None) -> None:
    asked = ["precision.compute=bfloat16", "data.sequence_length=4096", "batch.global=32", *words]
    advice = Advice(search(load_run(None, asked), 32, "h100-sxm", top=1, fixed=fixed, budget=10_000))
    told = [line for line in advice.winner() if "does not run yet" in line]
    if missing is None:
        check_supported(advice.price.plan)
        assert (advice.price.runs, told) == (True, [])
    else:
        assert missing in told[0]


def test_the_package_offers_it() -> None:
    assert mw.search is search


MODEL = ["model.preset=gpt2", "data.sequence_length=512", "batch.global=16", "precision.compute=bfloat16"]


def test_stages_and_groups_that_were_given_stay() -> None:
    """They were forgotten: `parallel.stages=[4,8]` gave layouts without stages, or with others."""
    stages = search(load_run(None, MODEL), 4, "h100-sxm", fixed={"parallel.stages": [4, 8]})
    assert {tuple(row.keys["parallel.stages"]) for row in (*stages.rows, *stages.pareto)} == {(4, 8)}
    assert any("2 stages of parallel.stages" in each.rule for each in stages.refused)
    inner = search(load_run(None, MODEL), 4, "h100-sxm", fixed={"mesh.cp": 4, "parallel.context_inner": 2})
    assert {row.keys["parallel.context_inner"] for row in inner.rows} == {2}
    with pytest.raises(RequestError, match="each of the 12 blocks once"):
        search(load_run(None, MODEL), 4, "h100-sxm", fixed={"parallel.stages": [4, 9]})


def test_parameters_elsewhere_that_stay_gathered_are_ranked_by_memory_too() -> None:
    """It was a ValueError: nothing was found that could have been offered elsewhere."""
    fixed = {"parallel.offload": "params", "parallel.zero": 3, "parallel.reshard_after_forward": False}
    ranking = search(load_run(None, MODEL), 4, "h100-sxm", "memory", fixed=fixed, top=1)
    assert ranking.best.keys["parallel.offload"] == "params"
    assert ranking.best.keys["parallel.reshard_after_forward"] is False


@pytest.mark.parametrize(
    ("fixed", "told", "wrong"),
    [({"mesh.tp": 5}, "mesh.tp = 5", "--gpus 4,"), ({"batch.micro": 3}, "batch.micro=4", "batch.global")],
)
def test_what_works_is_not_what_was_given(fixed: dict[str, int], told: str, wrong: str) -> None:
    with pytest.raises(RequestError) as error:
        search(load_run(None, MODEL), 4, "h100-sxm", fixed=fixed)
    assert told in str(error.value)
    assert wrong not in str(error.value).partition("what works")[2]


def test_counts_are_a_funnel() -> None:
    """Layouts tried again with their states elsewhere were counted as priced only: more were priced than legal."""
    big = ["model.preset=llama3-8b", "data.sequence_length=2048", "batch.global=64", "precision.compute=bfloat16"]
    counts = search(load_run(None, big), 16, "h100-sxm").counts
    assert counts["enumerated"] >= counts["legal"] >= counts["priced"] >= counts["fitting"]
    home = search(load_run(None, big), 16, "h100-sxm", fixed={"parallel.offload": "none"}).counts
    assert home["legal"] < counts["legal"]


def test_what_fits_by_the_fold_alone_is_found() -> None:
    """Closed forms say up to 7 % more than the program's fold: an 8B model on three devices of 25 GB was told to need
    twice their memory, and to fit on six."""
    words = ["model.preset=llama3-8b", "data.sequence_length=1024", "batch.global=24", "precision.compute=bfloat16"]
    found = search(load_run(None, words), 3, "rtx4090", top=2)
    assert [row.keys["batch.micro"] for row in found.rows] == [2, 1]
    assert all(row.price.fits and row.price.fits_trained for row in found.rows)


@pytest.mark.parametrize("offload", [None, "none", "optimizer"])
def test_what_is_least_needed_is_of_the_offload_that_may_be_chosen(offload: str | None) -> None:
    """It was of states at home, whatever was asked for."""
    words = ["model.preset=llama3-8b", "data.sequence_length=8192", "batch.global=24", "precision.compute=bfloat16"]
    fixed = {} if offload is None else {"parallel.offload": offload}
    with pytest.raises(RequestError) as error:
        search(load_run(None, words), 3, "rtx4090", fixed=fixed)
    assert ("--gpus 12" in str(error.value)) is (offload == "none")
    assert "--gpus 6" in str(error.value) or offload == "none"


def test_sharded_parameters_stay_where_the_master_copy_lives_elsewhere() -> None:
    """Usual trainers' master copy at ZeRO-3 is the parameter; with it elsewhere, both were on no device."""
    words = ("model.preset=llama3.1-70b", "batch.global=8", "batch.micro=1", "mesh.dp=8", "parallel.zero=3")
    price = ask(*words, "precision.compute=bfloat16", "parallel.offload=optimizer")
    assert price.memory["parameters"] == pytest.approx(70.55e9 * 2 / 8, rel=0.01)
