"""Files that cannot be read, and runs that come back from a file as they went."""

import tomllib
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.errors import RequestError
from meshwright.config.keys import key_names
from meshwright.config.load import build_run, dump_run, json_schema, load_run
from meshwright.config.schema import RunConfig

# content                                 what the message holds
BROKEN = [
    (b"[mesh]\ndp = 2\ndp = 3\n", ["line 3", "already given", "dp = 3"]),
    (b"[mesh]\ndp = 2\n[mesh]\ntp = 2\n", ["line 3", "already given", "[mesh]"]),
    (b"[mesh]\ndp = \n", ["line 2", "column", "dp ="]),
    (b"[mesh]\ndp = ", ["line 2", "dp ="]),
    (b"[mesh\ndp = 2\n", ["line 1"]),
    (b"mesh:\n  dp: 2\n", ["line 1", "mesh:"]),
    (b'{"mesh": {"dp": 2}}', ["line 1"]),
    (b'# ok\nname = "\xff"\n', ["line 2", "UTF-8"]),
    (b"\x00\x01", ["line 1"]),
]


@pytest.mark.parametrize(("content", "parts"), BROKEN)
def test_a_broken_file_is_placed(tmp_path, content, parts):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        load_run(file)
    message = str(caught.value)
    assert str(file) in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000 + "]" * 5000])
def test_a_file_too_large_to_read_is_refused(tmp_path, value):
    file = tmp_path / "run.toml"
    file.write_text(f"seed = {value}")
    with pytest.raises(RequestError, match="cannot be read as TOML"):
        load_run(file)


@pytest.mark.parametrize("key", [name for name in key_names() if name.count(".") == 1])
@pytest.mark.parametrize("number", [10**400, -(10**400), 2**63])
def test_no_number_is_too_large_for_a_message(key, number):
    section, name = key.split(".")
    with pytest.raises(RequestError, match=section) if number != 2**63 else suppress(RequestError):
        build_run({section: {name: number}})


def test_a_missing_file_names_what_lies_beside_it(tmp_path):
    (tmp_path / "other.toml").write_text("")
    with pytest.raises(RequestError, match="no such file") as caught:
        load_run(tmp_path / "run.toml")
    assert caught.value.nearest == (str(tmp_path / "other.toml"),)
    with pytest.raises(RequestError, match="no such file"):
        load_run(tmp_path / "nowhere" / "run.toml")
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be read"):
        load_run(tmp_path / "file" / "run.toml")


def test_a_folder_names_the_run_file_inside(tmp_path):
    with pytest.raises(RequestError, match="is a folder"):
        load_run(tmp_path)
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(RequestError) as caught:
        load_run(tmp_path)
    assert caught.value.nearest == (str(tmp_path / "run.toml"),)


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(b'\xef\xbb\xbfname = "x"\r\n[mesh]\r\ndp = 3\r\n')
    assert load_run(file).mesh.dp == 3


integers = st.integers(1, 2**63 - 1)
numbers = st.floats(0, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)

TABLES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text("abc-_. é", min_size=1, max_size=20).filter(lambda name: not name.startswith(".")),
        "seed": st.integers(0, 2**63 - 1),
        "model": st.fixed_dictionaries(
            {},
            optional={
                "family": st.sampled_from(["llama", "gpt2"]),
                "layers": integers,
                "tie_embeddings": st.booleans(),
                "rope_scaling": st.fixed_dictionaries({"kind": st.just("yarn"), "factor": numbers.filter(bool)}),
                "dropout": st.floats(0, 1, exclude_max=True),
            },
        ),
        "data": st.fixed_dictionaries({}, optional={"source": texts, "order": st.just("sequential")}),
        "mesh": st.fixed_dictionaries(
            {},
            optional={
                "dp": integers | st.just("fill"),
                "order": st.permutations(["pp", "dp", "ep", "cp", "tp"]),
            },
        ),
        "parallel": st.fixed_dictionaries(
            {}, optional={"stages": st.lists(integers, min_size=1), "zero": st.integers(0, 3), "offload_to": texts}
        ),
        "batch": st.fixed_dictionaries({}, optional={"global": integers, "micro": integers}),
        "optimizer": st.fixed_dictionaries(
            {"schedule": st.just("constant")},
            optional={"kind": st.just("sgd"), "learning_rate": numbers, "eps": numbers, "clip_norm": numbers},
        ),
        "precision": st.fixed_dictionaries({}, optional={"compute": st.sampled_from(["float64", "bfloat16"])}),
        "train": st.fixed_dictionaries({}, optional={"tokens": integers, "output": texts}),
        "checkpoint": st.fixed_dictionaries({}, optional={"resume": texts, "every": integers}),
    },
)


@settings(deadline=None)
@given(TABLES)
def test_a_dumped_run_comes_back_equal(tables):
    run = build_run(tables)
    again = build_run(tomllib.loads(dump_run(run)))
    assert again == run
    assert dump_run(again) == dump_run(run)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
sections = st.sampled_from([*RunConfig.model_fields])


@settings(deadline=None)
@given(st.dictionaries(sections, st.dictionaries(st.sampled_from(["dp", "order", "stages", "kind"]), anything)))
def test_any_table_is_accepted_or_refused_in_one_message(tables):
    try:
        run = build_run(tables)
    except RequestError as error:
        told = str(error)
    else:
        told = dump_run(run)
    assert told


def test_the_json_schema_knows_every_table_and_refuses_other_keys():
    schema = json_schema()
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert all(each["additionalProperties"] is False for each in schema["$defs"].values() if "properties" in each)
    assert "global" in schema["$defs"]["BatchConfig"]["properties"]
    assert not schema.get("required")
    assert schema["$defs"]["ModelConfig"]["properties"]["preset"]["default"] == "demo"
    assert schema["$defs"]["TrainConfig"]["properties"]["steps"]["default"] == 250
    assert "default" not in schema["$defs"]["ModelConfig"]["properties"]["hf"]
    tokens = schema["$defs"]["TrainConfig"]["properties"]["tokens"]["anyOf"][0]
    assert tokens == {"type": "number", "minimum": 1, "maximum": 2**63 - 1, "multipleOf": 1}
    order = schema["$defs"]["MeshConfig"]["properties"]["order"]
    assert (order["minItems"], order["maxItems"], order["uniqueItems"]) == (5, 5, True)
