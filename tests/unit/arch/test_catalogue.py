"""Published shapes: counts equal the published figures and, to the unit, the models other libraries build."""

from __future__ import annotations

import re

import pytest
import torch

from meshwright.arch.arithmetic import active_parameters, parameters
from meshwright.arch.catalogue import catalogue, preset
from meshwright.arch.families import FAMILIES
from meshwright.arch.huggingface import arch_from_hf, hf_config
from meshwright.config.errors import RequestError

_UNITS = {"M": 10**6, "B": 10**9}


def figure(text: str) -> tuple[float, float]:
    """Value and unit of the last digit of a published figure: "7.24B" -> 7.24e9, 1e7."""
    digits, unit = re.fullmatch(r"([\d.]+)([MB])", text).groups()  # type: ignore[union-attr]
    decimals = len(digits.partition(".")[2])
    return float(digits) * _UNITS[unit], _UNITS[unit] / 10**decimals


@pytest.mark.parametrize("name", [name for name, model in catalogue().items() if model.parameters])
def test_counts_are_the_published_ones_within_their_rounding(name: str) -> None:
    model = catalogue()[name]
    value, unit = figure(model.parameters)
    assert abs(parameters(model.arch) - value) <= unit / 2
    if model.active_parameters:  # some authors cut digits off instead of rounding, or leave out the look-up
        value, unit = figure(model.active_parameters)
        assert abs(active_parameters(model.arch) - value) < unit


def test_every_model_says_where_its_sizes_come_from() -> None:
    assert all(model.source for model in catalogue().values())
    assert {model.arch.family for model in catalogue().values()} == set(FAMILIES)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"llama-3-8b.*llama3-8b"):
        preset("llama-3-8b")
    with pytest.raises(RequestError, match="demo"):
        preset("zzz")


def test_counts_equal_transformers_to_the_unit() -> None:
    transformers = pytest.importorskip("transformers")
    for name, model in catalogue().items():
        config = transformers.AutoConfig.for_model(**hf_config(model.arch))
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(each.numel() for each in built.parameters()) == parameters(model.arch), name
        assert arch_from_hf(config.to_dict()) == model.arch, name
