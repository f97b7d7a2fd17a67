"""Keys of parts that are not built yet are accepted at their default and refused otherwise, by name."""

import pytest

from meshwright.config.built import UNBUILT, check_built
from meshwright.config.errors import RequestError
from meshwright.config.keys import key_names
from meshwright.config.load import load_run
from tests.unit.config.test_keys import overrides


def test_the_table_names_keys_that_exist_once():
    names = [entry.key for entry in UNBUILT]
    assert len(names) == len(set(names))
    assert set(names) <= set(key_names())


def test_the_demonstration_run_is_built():
    check_built(load_run())
    check_built(load_run(overrides=["precision.compute=float64", "optimizer.kind=sgd", "mesh.dp=4"]))
    check_built(load_run(overrides=["parallel.sequence=false", "parallel.bucket_bytes=65536"]))


@pytest.mark.parametrize("entry", [entry for entry in UNBUILT if entry.runs], ids=lambda entry: entry.key)
def test_values_that_run_are_accepted(entry):
    for value in entry.runs:
        check_built(load_run(overrides=[f"{entry.key}={str(value).lower()}"]))


@pytest.mark.parametrize("entry", UNBUILT, ids=lambda entry: entry.key)
def test_a_part_that_is_not_built_is_refused_by_name(entry):
    special = {"optimizer.kind": ["optimizer.kind=muon"], "precision.compute": ["precision.compute=float8"]}
    typed = special.get(entry.key) or overrides(entry.key)
    with pytest.raises(RequestError, match="is not built yet") as caught:
        check_built(load_run(overrides=typed))
    assert entry.key in str(caught.value)
    assert entry.part in str(caught.value)
