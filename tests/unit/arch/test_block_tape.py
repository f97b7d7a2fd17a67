"""The tapes of a block: forwards leave what is kept, backwards give each of it back once, in every setting."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.arch.activations import Crossing, Setting, kept_bytes
from meshwright.arch.block_backward import BlockBackward
from meshwright.arch.block_forward import BlockForward
from meshwright.arch.passing import stash_bytes
from meshwright.arch.resolve import arch_from_model
from meshwright.arch.tape import Tape
from meshwright.config.choices import Dtype
from meshwright.config.load import load_run
from meshwright.plan.folds.setting import narrowed

SIZES = ("layers=2", "hidden=160", "heads=8", "head_dim=24", "ffn=208", "vocab=500")
ROUTED = ("family=mixtral", "kv_heads=4", "experts=4", "experts_per_token=3")
FAMILIES = {
    "llama": ("family=llama", "kv_heads=4"),
    "gpt2": ("family=gpt2", "max_positions=64"),
    "qwen3": ("family=qwen3", "kv_heads=2"),
    "windowed": ("family=mistral", "kv_heads=8", "sliding_window=16"),
    "routed": ROUTED,
    "shared": (*ROUTED, "shared_experts=1"),
}
ARRIVING = ((None, 0), (500, 128))
"""Rows of a rank's experts, of its own tokens alone (384), or from an expert axis: none, more, fewer."""
AXES = [(1, False, False), (2, False, False), (2, True, False), (2, True, True)]
"""(tensor ranks, sequence parallel, in chunks)."""


CROSSINGS = [
    None, Crossing(2, 1), Crossing(4, 1, place=2), Crossing(2, 1, True, 1), Crossing(1, 2), Crossing(1, 4),
    Crossing(2, 2),
]  # fmt: skip


@pytest.mark.parametrize("crossing", CROSSINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ways", AXES)
def test_what_comes_goes(family: str, ways: tuple[int, bool, bool], crossing: Crossing | None) -> None:
    tp, gathers, rings = ways
    for dropout, dtype, selective, masked, direct in product(
        (0.0, 0.1), (Dtype.BFLOAT16, Dtype.FLOAT32), (False, True), (False, True), (False, True)
    ):
        words = [f"model.{each}" for each in (*SIZES, *FAMILIES[family], f"dropout={dropout}")]
        arch = narrowed(arch_from_model(load_run(None, [*words, "data.sequence_length=64"]).model), tp)
        arriving = ARRIVING[dropout > 0][masked] if arch.experts is not None else None
        setting = Setting(
            2, 64, masked, True, selective, gathers, tp, rings, direct, arriving=arriving, crossing=crossing
        )
        kept = kept_bytes(arch, 1, setting, dtype)
        made, stream = sum(kept.values()) - kept["input"], 128 * 160 * dtype.num_bytes // (tp if gathers else 1)

        forward = BlockForward(arch, 1, setting, dtype)
        assert forward.passing() >= 0
        assert forward.left == made + stream

        backward = BlockBackward(arch, 1, setting, dtype)
        backward.moments()
        assert backward.never_given_back == ("input",)
        assert backward.left == stream - made

        split = BlockBackward(arch, 1, setting, dtype, split=True)
        split.moments()
        # The cotangent itself, which is not the tape's, is a factor of what it meets first as it is.
        borrowed = not dropout and not gathers and family != "routed"
        assert split.left == stream - made + stash_bytes(arch, 1, setting, dtype) - borrowed * stream


def test_a_tape_remembers_its_fullest_moment() -> None:
    tape = Tape()
    tape.come(5, 7)
    tape.go(10)
    tape.flash(1)
    assert (tape.live, tape.peak, tape.begin_anew()) == (2, 12, 12)
    tape.flash(3)
    tape.go(4)
    assert (tape.live, tape.peak) == (-2, 5)
