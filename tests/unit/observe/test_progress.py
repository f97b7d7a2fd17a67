"""Plain lines where output is piped, one line that lives on a terminal, nothing where nobody looks."""

import io

import pytest

from meshwright.observe.progress import Progress, Reading, reading_line


def seen(step: int, steps: int = 7, **fields: object) -> Reading:
    values: dict[str, object] = {
        "step": step,
        "steps": steps,
        "loss": 3.25,
        "grad_norm": 1.5,
        "learning_rate": 3e-3,
        "tokens_per_second": 8123.4,
        "flops_per_second": 5.2e10,
        "mfu": None,
        "convention": "6N + causal attention",
        "eta_seconds": 92.0,
    }
    return Reading(**{**values, **fields})  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_what_counts() -> None:
    assert reading_line(seen(5, 250)) == (
        "step   5/250  loss 3.2500  norm 1.500  lr 3.00e-03  8,123 tokens/s  52.0 GFLOP/s  eta 1m 32s"
    )


def test_mfu_names_its_convention_and_is_silent_where_the_peak_is_unknown() -> None:
    assert "MFU 41.5% (6N + causal attention)" in reading_line(seen(5, mfu=0.415))
    assert "MFU" not in reading_line(seen(5))


@pytest.mark.parametrize(("log_every", "shown"), [(1, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 4, 6]), (100, [0, 6])])
def test_piped_lines_come_every_so_many_steps_and_at_the_end(log_every: int, shown: list[int]) -> None:
    stream = io.StringIO()
    with Progress(stream, log_every) as progress:
        for step in range(7):
            progress.step(seen(step))
        progress.doing("something that only a terminal shows")
    assert [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()] == shown


def test_a_terminal_has_one_line_that_is_rewritten_and_lines_that_stay() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress.step(seen(0))
        progress.say("this stays [as it is]")
        progress.step(seen(6))
    text = stream.getvalue()
    assert text.count("this stays [as it is]\n") == 1
    assert "\x1b[" in text, "the live line is erased"


def test_silence() -> None:
    stream = Terminal()
    with Progress(stream, silent=True) as progress:
        progress.step(seen(0))
        progress.say("nobody hears this")
    assert stream.getvalue() == ""
