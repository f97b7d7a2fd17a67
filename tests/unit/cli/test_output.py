"""JSON on standard output, colour on terminals only."""

import io
import json
import os
import subprocess
import sys
import warnings

import pytest

from meshwright.cli.output import plain_warnings, print_json, print_styled


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_json_is_one_line_and_finite(capsys):
    print_json({"loss": 2.5, "name": "é"})
    assert capsys.readouterr().out == '{"loss": 2.5, "name": "é"}\n'
    with pytest.raises(ValueError, match="JSON"):
        print_json({"loss": float("nan")})


def test_json_stays_json_where_the_encoding_has_no_such_letter():
    latin = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_json({"name": "é"}, stream=latin)
    assert json.loads(latin.buffer.getvalue()) == {"name": "é"}


STREAMS = """
import os, sys
from meshwright.cli.main import main
code = main(["explain", "name=é"])
print("�", flush=True)  # what a generated text may hold
with open(os.devnull) as file:
    sys.exit(code if file.fileno() > 2 and not sys.stdout.closed else 9)
"""


@pytest.mark.parametrize("closed", [(), (1,), (2,), (0, 1, 2)])
def test_closed_streams_and_poor_encodings_end_nothing(closed):
    """Else the next file opened would take the number of a closed stream, and what is printed would go there."""
    done = subprocess.run(
        [sys.executable, "-c", STREAMS],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        stdout=None if 1 in closed else subprocess.PIPE,
        stderr=None if 2 in closed else subprocess.PIPE,
        preexec_fn=lambda: [os.close(number) for number in closed],
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    if 1 not in closed:
        assert done.stdout.endswith(b"\\ufffd\n")


@pytest.mark.parametrize(("no_colour", "coloured"), [(None, True), ("1", False)])
def test_colour_is_for_terminals_that_want_it(monkeypatch, no_colour, coloured):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", no_colour)
    terminal = Terminal()
    print_styled("error: [bold] 3", {"^error:": "red"}, terminal)
    assert ("\x1b[31m" in terminal.getvalue()) is coloured
    assert "[bold] 3" in terminal.getvalue()  # no markup is read

    pipe = io.StringIO()
    print_styled("error: 3", {"^error:": "bold red"}, pipe)
    assert pipe.getvalue() == "error: 3\n"


def test_a_warning_is_one_line_without_a_place_in_the_code():
    with plain_warnings():
        assert warnings.formatwarning("look out", UserWarning, "file.py", 3) == "warning: look out\n"
    assert "file.py:3" in warnings.formatwarning("look out", UserWarning, "file.py", 3)
