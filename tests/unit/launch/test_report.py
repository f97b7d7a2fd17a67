"""Which failure was the first, and the line that tells it."""

from pathlib import Path

import pytest

from meshwright.launch.environment import JoinError
from meshwright.launch.report import Failure, first_failure, from_exception, from_json, to_json
from meshwright.launch.status import RankStatus, describe, read_status

_CAUSE = Failure(2, 10.2, "ValueError", "bad", 7, "backward")
_CONSEQUENCE = Failure(0, 10.1, "RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:3981")
_DEATH = Failure(1, 10.3, exit_code=-9, step=15, phase="forward")


def test_the_earliest_cause_wins_over_an_earlier_consequence() -> None:
    assert first_failure([_CONSEQUENCE, _DEATH, _CAUSE]) == _CAUSE
    assert first_failure([_CONSEQUENCE, _DEATH]) == _DEATH
    assert first_failure([_CONSEQUENCE]) == _CONSEQUENCE
    assert first_failure([]) is None


@pytest.mark.parametrize(
    "message",
    [
        "Connection reset by peer",
        "Application timeout caused pair closure",
        "Timed out waiting 60000ms for recv operation to complete",
        "NCCL error: remote process exited or there was a network error",
        "Gloo connectFullMesh failed with ...",
    ],
)
def test_what_a_peers_end_looks_like(message: str) -> None:
    assert Failure(0, 0.0, "RuntimeError", message).is_consequence


def test_lines() -> None:
    assert _CAUSE.line() == "rank 2 failed at step 7, in backward: ValueError: bad"
    assert Failure(0, 0.0, "KeyError").line() == "rank 0 failed: KeyError"
    assert _DEATH.line().startswith("rank 1 was killed by SIGKILL (")
    assert _DEATH.line().endswith(") at step 15, in forward")
    assert Failure(3, 0.0, exit_code=-11).line() == "rank 3 was killed by SIGSEGV"
    assert Failure(3, 0.0, exit_code=2).line() == "rank 3 ended with exit code 2"
    assert Failure(3, 0.0).line() == "rank 3 ended without a word (killed?)"


def _raised() -> ValueError:
    try:
        raise ValueError("first")
    except ValueError as error:
        error.add_note("in case 2")
        return error


def test_an_exception_is_told_with_its_notes() -> None:
    status = RankStatus()
    status.at(3, "update")
    told = from_exception(_raised(), 1, 5.0, status)
    assert told.line() == "rank 1 failed at step 3, in update: ValueError: first\nin case 2"
    assert told.traceback.rstrip().endswith("ValueError: first\nin case 2")
    assert from_exception(_raised(), 1, 5.0, status, mistakes=(ValueError,)).traceback == ""
    assert from_exception(JoinError("port"), 1, 5.0, status).traceback == ""


@pytest.mark.parametrize("failure", [_CAUSE, _CONSEQUENCE, _DEATH])
def test_a_record_survives_the_file(failure: Failure) -> None:
    assert from_json(to_json(failure)) == failure


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(ValueError, match="no failure record"):
        from_json("[1, 2]")


def test_status_is_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "status"
    status = RankStatus(file)
    assert read_status(file) == (None, "")
    status.at(15, "backward")
    assert read_status(file) == (15, "backward")
    status.at(0, "x" * 100)
    assert read_status(file) == (0, "x" * 40)
    status.at(None, "joining")
    assert read_status(file) == (None, "joining")
    assert (status.step, status.phase) == (None, "joining")


def test_no_status_file_is_no_error(tmp_path: Path) -> None:
    assert read_status(tmp_path / "absent") == (None, "")
    RankStatus().at(3, "forward")


def test_describe() -> None:
    assert describe(None, "") == ""
    assert describe(0, "") == "at step 0"
    assert describe(None, "forward") == "in forward"
