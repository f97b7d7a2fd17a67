"""Traffic: the ledger of the program, long steps read off short ones, axes that declare theirs."""

from dataclasses import replace

import pytest

from meshwright.arch.parameters import unit_tensors
from meshwright.arch.tensors import LogicalAxis
from meshwright.layout.groups import GroupName
from meshwright.plan.action import Phase
from meshwright.plan.folds.ledger import Row, ledger
from meshwright.plan.folds.traffic import Transport
from meshwright.price import traffic as module
from meshwright.price.traffic import traffic
from tests.unit.price.ask import ask

SMALL = (
    "model.preset=llama3-8b",
    "model.layers=4",
    "data.sequence_length=256",
    "batch.micro=1",
    "precision.compute=bfloat16",
)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("pp", "schedule", "micros"), [(1, "1f1b", 9), (2, "1f1b", 11), (2, "gpipe", 12), (4, "1f1b", 17), (2, "zb-h1", 12)]
)
def test_a_long_step_is_read_off_short_ones_exactly(
    monkeypatch: pytest.MonkeyPatch, zero: int, pp: int, schedule: str, micros: int
) -> None:
    words = (f"mesh.pp={pp}", f"parallel.schedule={schedule}", f"parallel.zero={zero}", f"batch.global={2 * micros}")
    plan = ask(*SMALL, *words, "mesh.dp=2", gpus=2 * pp).plan
    monkeypatch.setattr(module, "_LONG", 0)
    for rank in (0, plan.degrees.ranks - 1):
        assert traffic(plan, rank) == ledger(plan, rank)


def rows(*words: str, gpus: int, group: GroupName) -> dict[Phase, Row]:
    return {row.phase: row for row in ask(*SMALL, *words, gpus=gpus).traffic if row.group is group}


def test_zero_3_moves_parameters_every_micro_batch() -> None:
    """A known mistake is 3 parameters' worth a step: it is 3 a micro-batch, and falls short of it only at turns."""
    step = ("parallel.zero=3", "mesh.dp=8")
    few = rows(*step, "batch.global=8", gpus=8, group=GroupName.DENSE)
    many = rows(*step, "batch.global=64", gpus=8, group=GroupName.DENSE)
    params = 2 * (128256 * 4096) + 4 * 218112000
    for phase, width in ((Phase.FORWARD, 2), (Phase.REDUCE, 4)):
        assert few[phase].payload_bytes == pytest.approx(width * params, rel=0.35)
        assert many[phase].payload_bytes == pytest.approx(8 * few[phase].payload_bytes, rel=0.02)


def test_a_ring_sends_keys_and_values_to_all_but_one() -> None:
    """(c - 1) blocks of one key and one value forward, twice that backward, never fewer for a causal mask."""
    found = rows("mesh.cp=4", "mesh.dp=2", "batch.global=2", gpus=8, group=GroupName.CP)
    block = 256 // 4 * 8 * 2 * 128 * 2
    assert found[Phase.FORWARD].payload_bytes == 3 * 4 * block
    assert found[Phase.FORWARD].calls == 3 * 4
    assert found[Phase.BACKWARD].sent_bytes == 2 * found[Phase.FORWARD].sent_bytes


def test_experts_exchange_twice_a_pass() -> None:
    words = (
        "model.preset=qwen3-30b-a3b",
        "model.layers=2",
        "data.sequence_length=256",
        "batch.micro=1",
        "batch.global=8",
    )
    price = ask(*words, "precision.compute=bfloat16", "mesh.ep=4", "mesh.dp=2", gpus=8)
    found = {row.phase: row for row in price.traffic if row.group is GroupName.EP}
    buffer = 256 * 8 * 2048 * 2
    assert found[Phase.FORWARD].calls == 3 * 2  # rows there and back, behind how many they are
    assert found[Phase.FORWARD].payload_bytes == 4 * buffer + 2 * 8 * 128
    assert found[Phase.BACKWARD].sent_bytes == 4 * (buffer * 3 // 4)


def test_rows_on_a_cpu_are_those_of_the_transport() -> None:
    price = ask(*SMALL, "mesh.dp=2", "batch.global=4", cluster="local")
    assert price.traffic == ledger(price.plan, 0, transport=Transport.DIRECT)
    assert replace(price, rank=1).traffic == ledger(price.plan, 1, transport=Transport.DIRECT)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize(("zero", "scale"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_experts_meet_those_that_share_them_only(model: str, zero: int, scale: int) -> None:
    """On ep a rank has its own experts: they were summed over all replicas, 187 GB a step where 6 GB are shared."""
    step = ("data.sequence_length=256", "batch.micro=1", "batch.global=32", "precision.compute=bfloat16")
    price = ask(f"model.preset={model}", *step, "mesh.dp=2", "mesh.ep=4", f"parallel.zero={zero}", gpus=8)
    arch = price.plan.arch
    tensors = [each for unit in range(arch.head_unit + 1) for each in unit_tensors(arch, unit)]
    experts = sum(each.numel for each in tensors if LogicalAxis.EXPERTS in each.axes)
    dense = sum(each.numel for each in tensors) - experts
    found = {row.group: row for row in price.traffic if row.phase is Phase.REDUCE}
    assert found[GroupName.EXPERT].ranks == 2
    assert found[GroupName.EXPERT].payload_bytes == scale * 4 * experts // 4
    assert found[GroupName.DENSE].payload_bytes == pytest.approx(scale * 4 * dense, rel=1e-4)
    alone = ask(f"model.preset={model}", *step, "mesh.dp=1", "mesh.ep=4", gpus=4)
    assert not [row for row in alone.traffic if row.group is GroupName.EXPERT]


def test_products_of_eight_bits_send_what_sixteen_do() -> None:
    words = (*SMALL[:-1], "mesh.tp=2", "mesh.cp=2", "mesh.dp=2", "parallel.zero=3", "batch.global=4")
    assert ask(*words, "precision.compute=float8", gpus=8).traffic == ask(*words, SMALL[-1], gpus=8).traffic
