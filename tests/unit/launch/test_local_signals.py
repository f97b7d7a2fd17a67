"""A signal that reaches the whole process group while ranks are still being forked."""

import signal

import pytest

from meshwright.launch import local
from meshwright.launch.local import InterruptedRanksError, run_ranks


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), ConnectionResetError(), BrokenPipeError()])
def test_a_fork_server_that_the_signal_ended_is_no_failure(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an EOFError, "run again with --debug", and exit code 1."""

    def dies(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise error

    monkeypatch.setattr(local, "start_server", lambda preload: None)
    monkeypatch.setattr(local, "_run_agent", dies)
    with pytest.raises(InterruptedRanksError) as told:
        run_ranks(print, 1)
    assert told.value.exit_code == 143


def test_a_fork_server_that_dies_by_itself_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr(local, "start_server", lambda preload: None)
    monkeypatch.setattr(local, "_run_agent", dies)
    with pytest.raises(EOFError):
        run_ranks(print, 1)
