"""A run draws from no global generator: what else a program draws does not change with it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from meshwright.launch.status import RankStatus
from meshwright.train.loop import train_joined
from tests.ranks.train.jobs import tiny_job


def test_global_generators_are_left_alone(tmp_path: Path) -> None:
    """B72: a loader that drew once from the global generator changed all draws after it."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    train_joined(RankStatus(), tiny_job(tmp_path, 1, model={"dropout": 0.1}, train={"steps": 3}))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
