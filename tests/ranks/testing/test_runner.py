"""The rank runner itself: results, every traceback, hangs, deaths, cases."""

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from meshwright.testing.ranks import RanksError, run, run_cases


def _adds(rank: int, value: float) -> float:
    x = torch.full((4,), value + rank)
    dist.all_reduce(x)
    return float(x[0])


def _raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("the seventh seal")
    dist.barrier()


def _hangs(rank: int) -> None:
    if rank == 1:
        _waits_for_ever()
    dist.barrier()


def _waits_for_ever() -> None:
    while True:
        time.sleep(1)


def _dies(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _told(rank: int) -> tuple[str | None, int]:
    return os.environ.get("MESHWRIGHT_TOLD"), torch.get_num_threads()


@dataclass(frozen=True)
class _Case:
    name: str
    value: float


def _case(rank: int, case: _Case) -> float:
    if case.value < 0:
        raise ValueError("negative")
    return _adds(rank, case.value)


def _stuck_case(rank: int, case: _Case) -> None:
    if case.value < 0:
        _waits_for_ever()


def test_results_come_in_rank_order() -> None:
    assert run(_adds, 3, 1.0) == [6.0, 6.0, 6.0]


def test_eight_ranks() -> None:
    assert run(_adds, 8, 0.0) == [28.0] * 8


def test_environment_reaches_ranks_of_a_running_server() -> None:
    assert run(_told, 2, environment={"MESHWRIGHT_TOLD": "yes"}) == [("yes", 1)] * 2
    assert run(_told, 1) == [(None, 1)]


def test_every_traceback_is_in_the_failure() -> None:
    with pytest.raises(RanksError) as failure:
        run(_raises, 2)
    text = str(failure.value)
    assert "--- rank 1" in text
    assert "ValueError: the seventh seal" in text
    assert "--- rank 0" in text


def test_a_hang_is_a_failure_and_names_the_frame() -> None:
    begin = time.monotonic()
    with pytest.raises(RanksError) as failure:
        run(_hangs, 2, timeout=6)
    assert time.monotonic() - begin < 16
    text = str(failure.value)
    assert "did not end within 6 s" in text
    assert "_waits_for_ever" in text
    assert "barrier" in text


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RanksError, match="killed by SIGKILL"):
        run(_dies, 3)


def test_cases_share_a_launch() -> None:
    cases = [_Case("one", 1.0), _Case("two", 2.0)]
    assert run_cases(_case, 2, cases) == [[3.0, 5.0]] * 2


def test_a_failing_case_is_named() -> None:
    with pytest.raises(RanksError, match="in case 2 of 3: minus"):
        run_cases(_case, 2, [_Case("one", 1.0), _Case("minus", -1.0), _Case("two", 2.0)])


def test_a_hanging_case_is_named() -> None:
    with pytest.raises(RanksError, match="rank 1 in case 2 of 2: stuck"):
        run_cases(_stuck_case, 2, [_Case("one", 1.0), _Case("stuck", -1.0)], timeout=6)
