"""Text from a model: greedy is the arg max of the whole forward, sampling is a function of its seed."""

import numpy as np
import pytest
import torch

from meshwright.layout.rows import whole_rows
from meshwright.model import Decoder, build_decoder, initialise, rows_to_torch
from meshwright.train.generate import generate
from tests.unit.plan.plans import make_arch


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = build_decoder(make_arch(), dtype=torch.float64, device="cpu")
    initialise(decoder, decoder.arch, 0)
    return decoder


def test_greedy_takes_the_likeliest_token_of_a_whole_forward(model: Decoder) -> None:
    tokens = [5, 6, 7]
    for token in generate(model, tokens, 6, context=32):
        rows = rows_to_torch(whole_rows(0, np.zeros(1, dtype=np.int64), len(tokens)), model.arch, dtype=torch.float64)
        logits = model(torch.tensor([tokens]), rows)
        assert token == int(logits[-1].argmax())
        tokens.append(token)
    assert len(tokens) == 9


def test_sampling_repeats_with_its_seed_and_leaves_the_process_alone(model: Decoder) -> None:
    state = torch.get_rng_state()
    first = list(generate(model, [5], 20, context=32, temperature=1.0, seed=3))
    assert first == list(generate(model, [5], 20, context=32, temperature=1.0, seed=3))
    assert first != list(generate(model, [5], 20, context=32, temperature=1.0, seed=4))
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_context_is_looked_at(model: Decoder) -> None:
    tail = [9, 8, 7, 6]
    assert list(generate(model, [1, 2, *tail], 1, context=4)) == list(generate(model, tail, 1, context=4))


def test_it_ends_before_the_stop_token(model: Decoder) -> None:
    free = list(generate(model, [5], 10, context=32, temperature=1.0, seed=3))
    assert (
        list(generate(model, [5], 10, context=32, temperature=1.0, seed=3, stop=free[4])) == free[: free.index(free[4])]
    )


def test_a_prompt_is_needed(model: Decoder) -> None:
    with pytest.raises(ValueError, match="prompt"):
        next(generate(model, [], 1, context=4))
