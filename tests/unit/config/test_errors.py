"""The one error of a wrong request."""

import pickle

import pytest

from meshwright.config.errors import RequestError


def test_the_message_holds_value_rule_and_what_works():
    error = RequestError("heads 12 with tp 5", "tp must divide the heads", (4, 6))
    assert str(error) == "heads 12 with tp 5: tp must divide the heads; what works: 4, 6"
    assert error.nearest == ("4", "6")
    assert str(RequestError("x", "is wrong")) == "x: is wrong"


def test_several_are_one_message():
    first, second = RequestError("a", "is wrong"), RequestError("b", "is wrong", ("c",))
    assert RequestError.joined([first]) is first
    joined = RequestError.joined(iter([first, second]))
    assert joined.problems == (first, second)
    assert str(joined).splitlines() == [
        "the request: has 2 problems",
        "  a: is wrong",
        "  b: is wrong; what works: c",
    ]


@pytest.mark.parametrize("problems", [(), (RequestError("a", "b"),)])
def test_it_travels_between_processes(problems):
    error = RequestError("value", "rule", ("near",), problems)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.value, again.rule, again.nearest) == (error.value, error.rule, error.nearest)
