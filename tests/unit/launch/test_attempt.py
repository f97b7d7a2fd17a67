"""The roll call, on a store that is a dictionary and ranks that are threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from meshwright.launch.attempt import agree, all_connected
from meshwright.launch.environment import JoinError


class _Store:
    def __init__(self) -> None:
        self._lock, self._values = threading.Lock(), {}  # type: ignore[var-annotated]

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
            return int(self._values[key])

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(0.001)


def _meet(store: _Store, ranks: range, world: int, timeout_s: float = 10.0) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: agree(store, rank, world, "run", timeout_s), ranks))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_learn_one_name(world: int) -> None:
    assert len(set(_meet(_Store(), range(world), world))) == 1


def test_every_attempt_has_a_name_of_its_own() -> None:
    store = _Store()
    names = [set(_meet(store, range(3), 3)) for _ in range(4)]
    assert all(len(name) == 1 for name in names)
    assert len(set.union(*names)) == 4


def test_what_an_attempt_that_died_half_way_left_misleads_nobody() -> None:
    store = _Store()
    with pytest.raises(JoinError, match=r"ranks \[2\] of 3 did not arrive within 0\.3 s"):
        _meet(store, range(2), 3, 0.3)
    with pytest.raises(JoinError, match=r"waited 0\.3 s for rank 0"):
        agree(store, 2, 3, "run", 0.3)
    assert len(set(_meet(store, range(3), 3))) == 1


def test_two_processes_with_one_rank_are_an_error() -> None:
    store = _Store()
    with ThreadPoolExecutor(2) as pool:
        claims = [pool.submit(agree, store, 1, 2, "run", 2.0) for _ in range(2)]
        errors = [claim.exception() for claim in claims]
    assert any("two processes claim rank 1" in str(error) for error in errors)


def test_the_store_of_another_run_is_refused() -> None:
    store = _Store()
    assert len(set(_meet(store, range(2), 2))) == 1
    with pytest.raises(JoinError, match="rank 1 of run 'mine' reached the store of run 'run'"):
        agree(store, 1, 2, "mine", 5.0)


def test_nobody_goes_on_before_all_are_connected() -> None:
    store, gone_on = _Store(), []

    def connect(rank: int) -> None:
        all_connected(store, rank, 3, 10.0)
        gone_on.append(rank)

    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(connect, rank) for rank in (0, 1)]
        while store.add("connected", 0) < 2:
            time.sleep(0.001)
        assert not gone_on
        pool.submit(connect, 2).result()
        assert all(claim.exception() is None for claim in early)
    assert sorted(gone_on) == [0, 1, 2]
    assert store.get("heard") == b"3"  # rank 0, where the store may live, was not the first to leave


def test_a_rank_that_never_connects_is_told() -> None:
    with pytest.raises(JoinError, match=r"rank 0: not all of 2 ranks were connected within 0\.1 s"):
        all_connected(_Store(), 0, 2, 0.1)
