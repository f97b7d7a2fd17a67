"""The file that `local` is read from: written whole, and told where it is another machine's."""

import warnings
from pathlib import Path

import pytest

from meshwright.config.errors import RequestError
from meshwright.price import calibration, catalogue
from meshwright.price.calibration import Measured, ProductTime, calibrated, writable_place, write_cluster
from meshwright.price.catalogue import cluster_of

FOUND = Measured(2, "CPU", "cpu", 1e10, 1e10, (ProductTime("float32", 256, 256, 256, 1e-3),))


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "home" / "local.toml"
    for module in (calibration, catalogue):
        monkeypatch.setattr(module, "calibrated_path", lambda: file)
    return file


def test_local_is_what_was_measured_here(local: Path) -> None:
    assert write_cluster(calibrated(FOUND)) == local
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cluster_of("local").device.name == "CPU"
    assert cluster_of(str(local)).device == cluster_of("local").device


def test_local_of_another_machine_is_told(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cluster(calibrated(FOUND))
    monkeypatch.setattr(catalogue, "this_machine", lambda: "64 x other")
    with pytest.warns(UserWarning, match=r"local\.toml was measured on .*; this machine is 64 x other"):
        cluster_of("local")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster_of(str(local))  # asked for by name: it is meant


@pytest.mark.parametrize("text", ["", "name = ", "[device]\nname = 3\n", "\x00"])
def test_a_damaged_file_is_told_with_what_mends_it(text: str, local: Path) -> None:
    local.parent.mkdir()
    local.write_text(text)
    with pytest.raises(RequestError, match=r"local\.toml.*no measurement.*meshwright doctor --calibrate") as error:
        cluster_of("local")
    assert "\n" not in str(error.value)


def test_a_place_that_cannot_be_written_is_told_before_measuring(tmp_path: Path, local: Path) -> None:
    """It was an OSError of minutes later."""
    local.parent.write_text("a file where the folder should be")
    with pytest.raises(RequestError, match="--out FILE"):
        writable_place()
    assert writable_place(tmp_path / "mine.toml") == tmp_path / "mine.toml"
    assert not (tmp_path / "mine.toml").exists()
