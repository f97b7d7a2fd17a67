"""The frame: exit codes, one message, help, and nothing heavy before a command runs."""

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from meshwright.cli.commands import COMMANDS
from meshwright.cli.main import main
from meshwright.cli.request import load, run_file_arguments
from meshwright.config.errors import RequestError


def command(run, add_arguments=run_file_arguments):
    return SimpleNamespace(NAME="try", HELP="try it", EXAMPLES="meshwright try", add_arguments=add_arguments, run=run)


def raising(error):
    def run(arguments):
        raise error

    return command(run)


# what a command does            exit code   what standard error holds
ENDS = [
    (RequestError("mesh.dp = 0", "must be at least 1", (1,)), 2, "error: mesh.dp = 0: must be at least 1"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (SystemExit(143), 143, ""),
    (SystemExit(None), 0, ""),
    (SystemExit("no more"), 1, "no more"),
    (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
]


@pytest.mark.parametrize(("error", "code", "message"), ENDS)
def test_exit_codes(capsys, error, code, message):
    assert main(["try"], [raising(error)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys):
    for words in (["try", "--debug"], ["--debug", "try"]):
        assert main(words, [raising(ZeroDivisionError("by zero"))]) == 1
        assert "Traceback" in capsys.readouterr().err


def test_a_wrong_request_has_no_traceback_even_with_debug(capsys):
    assert main(["try", "--debug", "mesh.dp=0"], [command(lambda arguments: 0 * bool(load(arguments)))]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_the_code_of_a_command_is_returned(code):
    assert main(["try"], [command(lambda arguments: code)]) == code


def test_options_may_stand_between_overrides(capsys):
    seen = []

    def run(arguments):
        seen.append((load(arguments).mesh.dp, load(arguments).seed, arguments.json))
        return 0

    assert main(["try", "mesh.dp=4", "--json", "seed=3"], [command(run)]) == 0
    assert seen == [(4, 3, True)]


def test_logs_go_to_standard_error(capsys):
    def run(arguments):
        logging.getLogger("meshwright.part").info("something happened")
        return 0

    assert main(["try"], [command(run)]) == 0
    assert main(["try"], [command(run)]) == 0  # no second handler
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["something happened"] * 2


def test_unknown_commands_and_options_name_the_nearest(capsys):
    assert main(["tri"], [command(lambda arguments: 0)]) == 2
    assert "tri: is no command; what works: try" in capsys.readouterr().err
    assert main(["try", "--jsn"], [command(lambda arguments: 0)]) == 2
    assert "--jsn: is no argument of meshwright try; what works: --json" in capsys.readouterr().err
    assert main(["--vers"]) == 2
    assert "--version" in capsys.readouterr().err
    assert main(["try", "--js"], [command(lambda arguments: 0)]) == 2  # no abbreviations


def test_wrong_arguments_are_wrong_requests(capsys):
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rank", type=int)

    assert main(["try", "--rank", "x"], [command(lambda arguments: 0, add_arguments)]) == 2
    err = capsys.readouterr().err
    assert "--rank" in err
    assert "'x'" in err
    assert len(err.splitlines()) == 1


def test_nested_commands_parse(capsys):
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_subparsers(dest="what", required=True).add_parser("show").add_argument("folder")

    seen = []
    nested = command(lambda arguments: seen.append((arguments.what, arguments.folder)) or 0, add_arguments)
    assert main(["try", "show", "here"], [nested]) == 0
    assert seen == [("show", "here")]
    assert main(["try", "shw", "here"], [nested]) == 2


def test_help_lists_commands_and_shows_examples(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(each.NAME in out and each.HELP in out for each in COMMANDS)
        assert "\x1b" not in out
    for each in COMMANDS:
        assert main([each.NAME, "--help"]) == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert all(line.strip() in out for line in each.EXAMPLES.splitlines())
        assert main(["help", each.NAME]) == 0
        assert capsys.readouterr().out == out


def test_commands_are_complete():
    names = [each.NAME for each in COMMANDS]
    assert len(names) == len(set(names))
    assert all(each.NAME in each.EXAMPLES for each in COMMANDS)


def test_schema_is_one_json_object(capsys):
    assert main(["schema", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["properties"]["mesh"]
    assert len(out.splitlines()) == 1
    assert err == ""
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out)


def test_help_is_quick_and_light():
    """Neither torch nor the schema is imported to tell what commands there are."""
    code = (
        "import sys; from meshwright.cli.main import main; code = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 2


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "schem"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: schem: is no command; what works: schema\n"


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", "schema"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")
