"""Ranks that this machine cannot take are refused before one is started."""

import pytest
import torch

from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError
from meshwright.train.machine import check_devices, check_ranks
from meshwright.train.room import check_machine_room, check_rank_room
from tests.unit.plan.plans import make_plan


def test_far_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    check_ranks(128)
    with pytest.raises(RequestError, match="129 ranks on this machine of 2 cores: at most 128"):
        check_ranks(129)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    check_ranks(1024)


@pytest.mark.parametrize(("found", "device"), [(0, DeviceKind.AUTO), (0, DeviceKind.CPU), (2, DeviceKind.CUDA)])
def test_a_device_for_each_rank_or_none_wanted(found: int, device: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    _cuda(monkeypatch, found)
    check_devices(device, 2)


@pytest.mark.parametrize(
    ("found", "device", "message"),
    [
        (0, DeviceKind.CUDA, "no CUDA device is found here"),
        (1, DeviceKind.CUDA, "this machine has 1; what works: a mesh of one rank"),
        (1, DeviceKind.AUTO, "this machine has 1"),
    ],
)
def test_too_few_devices(found: int, device: DeviceKind, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _cuda(monkeypatch, found)
    with pytest.raises(RequestError, match=message):
        check_devices(device, 2)


def _cuda(monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)


LARGE = {"hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "ffn": 4096, "vocab": 512}
"""A block of 12.6 or 16.8 million parameters: 16 bytes each with AdamW in float32."""


def test_memory_that_a_machine_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = make_plan(layers=2, arch=LARGE), make_plan(layers=2, dp=2, arch=LARGE)
    states = 2 * 16.8e6 * 16
    _memory(monkeypatch, 1.5 * states)
    check_machine_room(one, DeviceKind.CPU)
    check_rank_room(two, 1, torch.device("cpu"))
    with pytest.raises(RequestError, match=r"GiB of memory, which the 2 ranks would hold .*: this machine has 7"):
        check_machine_room(two, DeviceKind.CPU)
    with pytest.raises(RequestError, match="which the 2 ranks would hold"):
        check_machine_room(one, DeviceKind.CPU, copies=2)
    _memory(monkeypatch, states / 2, swap=states / 4)
    with pytest.raises(RequestError, match="which the run would hold"):
        check_machine_room(one, DeviceKind.CPU)
    with pytest.raises(RequestError, match=r"which rank 1 would hold .*: its machine has"):
        check_rank_room(two, 1, torch.device("cpu"))


def test_sharding_and_swap_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    states = 2 * 16.8e6 * 16
    sharded = make_plan(layers=2, dp=2, zero=3, arch=LARGE)
    _memory(monkeypatch, states, swap=states)
    check_machine_room(sharded, DeviceKind.CPU)
    _memory(monkeypatch, states / 2)
    with pytest.raises(RequestError, match="the 2 ranks"):
        check_machine_room(sharded, DeviceKind.CPU)


def test_ranks_on_devices_ask_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _memory(monkeypatch, 1.0)
    _cuda(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 10**6))
    plan = make_plan(layers=2, dp=2, arch=LARGE)
    check_machine_room(plan, DeviceKind.AUTO)
    with pytest.raises(RequestError, match=r"rank 0 would hold .*: its device has 976.6 KiB"):
        check_rank_room(plan, 0, torch.device("cuda", 0))


def _memory(monkeypatch: pytest.MonkeyPatch, num_bytes: float, swap: float = 0.0) -> None:
    monkeypatch.setattr("meshwright.train.room.memory_bytes", lambda: num_bytes)
    monkeypatch.setattr("meshwright.train.room.swap_bytes", lambda: swap)
