"""A number with its noun."""

from meshwright.config.counted import counted


def test_a_noun_is_in_the_number_that_stands_before_it() -> None:
    assert [counted(number, "mesh") for number in (0, 1, 2)] == ["0 meshes", "1 mesh", "2 meshes"]
    assert counted(1024, "micro-batch") == "1,024 micro-batches"
    assert counted(1, "key") == "1 key"
    assert counted(3, "loss") == "3 losses"
