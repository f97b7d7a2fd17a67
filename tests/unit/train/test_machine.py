"""Ranks that this machine cannot take are refused before one is started."""

import pytest
import torch

from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError
from meshwright.train.machine import check_devices, check_ranks


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
