"""JSON on standard output, colour on terminals only."""

import io
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
