"""The place a launcher gives, and the refusal of what contradicts itself."""

import os

import pytest

from meshwright.launch.environment import (
    Launcher,
    Place,
    PlaceError,
    adopt,
    detect,
    first_host,
    local_snapshot,
    num_threads,
)

_TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
_SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NODELIST": "gpu[007-009]",
}


def test_outside_every_launcher_there_is_no_place() -> None:
    assert detect({"PATH": "/bin", "MASTER_PORT": "1"}) is None


def test_torchrun() -> None:
    values = {**_TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "r", "MORE": "x"}
    assert detect({**values, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == Place(
        3, 4, 1, "node0", 29500, Launcher.TORCHRUN, run_id="r", restart_count=2, agent_store=True
    )


def test_slurm() -> None:
    assert detect(_SLURM) == Place(5, 8, 1, "gpu007", 23456, Launcher.SLURM, run_id="slurm-123456-0")


def test_torchrun_inside_a_slurm_job_wins() -> None:
    place = detect({**_SLURM, **_TORCHRUN})
    assert place is not None
    assert (place.launcher, place.rank) == (Launcher.TORCHRUN, 3)


def test_a_slurm_step_smaller_than_the_allocation() -> None:
    place = detect({**_SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu9"})
    assert place is not None
    assert (place.world, place.master_addr) == (2, "gpu9")


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_a_shell_on_a_slurm_node_is_no_launcher(step: str) -> None:
    assert detect({**_SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": step}) is None


def test_an_allocation_without_a_step_is_no_launcher() -> None:
    assert detect({name: _SLURM[name] for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, r"RANK=4 must be from 0 to WORLD_SIZE - 1 = 3"),
        ({"RANK": "-1"}, r"RANK=-1 must be from 0"),
        ({"RANK": "two"}, r"RANK=two is not a whole number"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE=0 must be at least 1"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 must be from 0 to LOCAL_WORLD_SIZE - 1 = 1"),
        ({"LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "1"}, r"LOCAL_WORLD_SIZE=5 exceeds WORLD_SIZE=4"),
        ({"MASTER_PORT": "65536"}, r"MASTER_PORT=65536 is no port"),
        ({"MASTER_PORT": ""}, r"MASTER_PORT= is not a whole number"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(PlaceError, match=message) as refusal:
        detect({**_TORCHRUN, **change})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_refused(missing: str) -> None:
    with pytest.raises(PlaceError, match=missing):
        detect({name: value for name, value in _TORCHRUN.items() if name != missing})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[007-009,12],login", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]-node", "rack1-node"),
        ("gpu-a1.cluster.example,x", "gpu-a1.cluster.example"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_nodelist_without_a_host_is_refused() -> None:
    with pytest.raises(PlaceError, match="names no host"):
        first_host("[1-2]")


def test_threads() -> None:
    assert num_threads(2, {}) == 1
    assert num_threads(1, {}) is None
    assert num_threads(2, {"OMP_NUM_THREADS": "3"}) == 3
    assert num_threads(1, {"OMP_NUM_THREADS": "4,2"}) == 4
    with pytest.raises(PlaceError, match="OMP_NUM_THREADS=0"):
        num_threads(2, {"OMP_NUM_THREADS": "0"})
    with pytest.raises(PlaceError, match="OMP_NUM_THREADS=all"):
        num_threads(2, {"OMP_NUM_THREADS": "all"})


def test_local_ranks_talk_over_loopback_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert local_snapshot()["GLOO_SOCKET_IFNAME"].startswith("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert local_snapshot()["GLOO_SOCKET_IFNAME"] == "eth7"


def test_adopting_an_environment_keeps_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"KEPT": "1", "CHANGED": "1", "GONE": "1"})
    adopt({"CHANGED": "2", "KEPT": "2", "NEW": "2"}, keep=frozenset({"KEPT"}))
    assert os.environ == {"KEPT": "1", "CHANGED": "2", "NEW": "2"}
