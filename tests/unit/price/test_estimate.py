"""The command: its JSON, its text, its answers to why, its refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.price import catalogue
from meshwright.price.calibration import Measured, ProductTime, calibrated
from meshwright.price.compute import units
from meshwright.price.explain import FIGURES
from meshwright.price.layouts import of_plan
from meshwright.price.price import Price
from meshwright.price.request import requested
from meshwright.train.spent import spent_rows
from tests.unit.price.ask import ask

RUN = ("model.preset=llama3-8b", "mesh.tp=2", "batch.global=64", "batch.micro=1", "data.sequence_length=4096",
       "precision.compute=bfloat16", "parallel.zero=1")  # fmt: skip
ON = ("--cluster", "h100-sxm", "--gpus", "16")

MEMORY = {
    "parameters",
    "gradients",
    "optimizer",
    "master",
    "activations",
    "logits",
    "buffers",
    "peak",
    "reserved",
    "device",
}
TIME = ("compute", "dp", "tp", "pp", "cp", "ep", "bubble", "optimizer", "data", "other")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *RUN, *ON)
    assert {"plan", "ranks", "traffic", "memory", "flops", "time"} <= set(found)
    assert found["ranks"] == 16
    row = {"group", "ranks", "operation", "phase", "calls", "payload_bytes", "sent_bytes", "wire_bytes"}
    assert all(set(each) == row for each in found["traffic"])
    assert set(found["memory"]) == MEMORY | {"per_rank"}
    assert [each["rank"] for each in found["memory"]["per_rank"]] == list(range(16))
    assert max(each["peak"] for each in found["memory"]["per_rank"]) == found["memory"]["peak"]
    assert {"model_per_step", "hardware_per_step"} <= set(found["flops"])
    time = found["time"]
    assert sum(time[name] for name in TIME) == pytest.approx(time["step_seconds"])
    assert time["mfu"] == pytest.approx(found["flops"]["model_per_step"] / time["step_seconds"] / 16 / 989e12)
    low, high = found["range"]
    assert low < time["step_seconds"] < high


def test_without_arguments_the_demonstration_run_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys)
    assert found["ranks"] == 2
    assert found["time"]["mfu"] is None  # nobody states a peak of this machine
    assert found["fits"]


def test_a_peak_that_somebody_states_or_measured_gives_a_share_of_it() -> None:
    """The catalogue's guess of a CPU is no peak; a figure laid over it is, and so is a measured one."""
    assert ask(*RUN, cluster="local", gpus=16).mfu is None
    mine = Measured(2, "CPU", "cpu", 1e12, 1e10, (ProductTime("bfloat16", 512, 512, 512, 1e-3),))
    measured = Price(ask(*RUN, gpus=16).plan, calibrated(mine))
    assert measured.mfu is not None
    peak = measured.cluster.device.matrix_flops["bfloat16"]
    assert measured.mfu == pytest.approx(measured.flops["model_per_step"] / measured.step_seconds / 16 / peak)
    _, plan, stated = requested(None, [*RUN, "cluster.device.matrix_flops={bfloat16=2e11}"], "local", 16)
    assert Price(plan, stated).mfu is not None


def test_three_conventions_of_flops() -> None:
    """Causal half, full attention, and what recomputation repeats: each named, hardware never below model."""
    plain, again = ask(*RUN, gpus=16).flops, ask(*RUN, "parallel.recompute=full", gpus=16).flops
    assert plain["model_per_step"] == plain["hardware_per_step"] < plain["model_full_attention_per_step"]
    assert again["model_per_step"] == plain["model_per_step"]
    assert 1.25 < again["hardware_per_step"] / plain["hardware_per_step"] < 4 / 3
    # Selective: this program makes the attention core again; usual trainers keep what fused attention gives.
    core, usual = (
        ask(*RUN, "parallel.recompute=selective", gpus=16, cluster=cluster).flops["hardware_per_step"]
        for cluster in ("local", "h100-sxm")
    )
    attention = plain["model_full_attention_per_step"] - plain["model_per_step"]
    assert core - plain["model_per_step"] == pytest.approx(attention / 3, rel=1e-3)
    assert usual == plain["model_per_step"]


def test_every_key_of_the_json_has_a_why() -> None:
    found = ask(*RUN, gpus=16).to_json()
    keys = [f"{key}.{inner}" if inner else key for key, value in found.items()
            for inner in (value if isinstance(value, dict) else ("",))]  # fmt: skip
    assert set(keys) == set(FIGURES)


@pytest.mark.parametrize("figure", [*FIGURES, "traffic.tp"])
def test_every_figure_says_why(capsys: pytest.CaptureFixture[str], figure: str) -> None:
    assert main(["estimate", *RUN, *ON, "--why", figure]) == 0
    text = capsys.readouterr().out
    assert "formula" in text
    assert "source" in text
    assert "m 8" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cluster", "h100"), "h100-sxm"),
        ((*RUN, "--cluster", "h100-sxm", "--gpus", "15"), "15 ranks"),
        ((*RUN, *ON, "--why", "memory.activation"), "memory.activations"),
        ((*RUN, *ON, "--rank", "16"), "16 ranks"),
        ((*RUN, *ON, "cluster.software.host=old"), "legacy"),
        ((*RUN[:5], "precision.compute=float8", "--cluster", "local"), "matrix_flops"),
        (("mesh.dp=3", "--gpus", "4"), "--gpus"),
    ],
)
def test_wrong_requests_are_refused_in_one_message(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["estimate", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert "Traceback" not in err


def test_text_shows_time_memory_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *RUN, *ON]) == 0
    text = capsys.readouterr().out
    for word in (
        "time of a step",
        "between",
        "MFU",
        "memory of a rank",
        "fits in",
        "allocated / reserved / device",
        "all_gather",
    ):
        assert word in text


def test_text_tells_how_attention_crosses_the_context_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["estimate", *RUN, "mesh.cp=4", "parallel.context_inner=2", "--cluster", "h100-sxm", "--gpus", "16"]) == 0
    )
    first = capsys.readouterr().out.splitlines()[0]
    assert "cp 4 tp 2, ring over ulysses groups of 2, ZeRO-1, " in first


def test_the_package_may_be_called() -> None:
    plan = ask(*RUN, gpus=16).plan
    assert mw.price(plan, cluster="h100-sxm").step_seconds == ask(*RUN, gpus=16).step_seconds


def test_slower_links_and_smaller_devices_never_help() -> None:
    step = ask(*RUN, gpus=16).step_seconds
    assert ask(*RUN, "cluster.network.bytes_per_s=1e9", gpus=16).step_seconds > step
    assert ask(*RUN, "cluster.device.power_w=350", gpus=16).step_seconds > step
    assert ask(*RUN, "parallel.recompute=full", gpus=16).step_seconds > step


def test_what_depends_on_the_data_is_a_range() -> None:
    """Documents of unknown lengths: from no attention at all to one document a sequence."""
    whole, ragged = ask(*RUN, gpus=16), ask(*RUN, "data.documents=masked", gpus=16)
    assert ragged.range_seconds[1] == whole.range_seconds[1]
    assert ragged.range_seconds[0] < 0.97 * whole.range_seconds[0]
    experts = ask("model.preset=qwen3-30b-a3b", *RUN[2:], gpus=16)
    assert experts.spread == 2 * whole.spread


def test_guessed_rates_are_never_told_as_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`local` before `doctor --calibrate`: the step is a range of a factor of 4 either way, and says why."""
    monkeypatch.setattr(catalogue, "calibrated_path", lambda: tmp_path / "local.toml")
    words = ("batch.global=8", "batch.micro=2")
    guessed = ask(*words, cluster="local")
    assert guessed.is_uncalibrated
    assert guessed.range_seconds == (guessed.step_seconds / 4, guessed.step_seconds * 4)
    assert "UNCALIBRATED" in str(guessed)
    rows = spent_rows(guessed, None, 0.1)
    assert all("guess" in row[1] for row in rows)
    measured = ask(*words, cluster="h100-sxm")
    assert not measured.is_uncalibrated
    assert "UNCALIBRATED" not in str(measured)
    assert not any("guess" in row[1] for row in spent_rows(measured, None, 0.1))


@pytest.mark.parametrize("attention", ["flash2", "unfused"])
def test_selective_recomputation_repeats_what_each_program_does(attention: str) -> None:
    """The literal program makes the core and what is cheap around it again; usual ones keep a fused core's output."""
    words = (*RUN, f"cluster.software.attention={attention}")
    usual, literal = (
        ask(*words, f"cluster.software.following={kind}", gpus=16).estimates.times.compute[0]
        for kind in ("usual", "literal")
    )
    more = {
        kind: ask(*words, "parallel.recompute=selective", f"cluster.software.following={kind}", gpus=16)
        .estimates.times.compute[0]
        for kind in ("usual", "literal")
    }  # fmt: skip
    price = ask(*words, "cluster.software.following=literal", gpus=16)
    layouts = of_plan(price.plan)
    own = units(price.target, layouts)
    core = float(own.core[0]) * float(layouts.accumulation[0]) * price.plan.arch.layers
    assert more["literal"] - literal == pytest.approx(core, rel=0.02)
    assert more["usual"] - usual < 0.97 * core
