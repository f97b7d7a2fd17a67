"""Ragged masks of a user: the loss is the mean over the trained tokens of the global batch, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.errors import RequestError
from meshwright.data.batch import IGNORED
from meshwright.layout.rows import Integers
from meshwright.verify.normalisation import check_normalisation
from tests.unit.plan.plans import make_plan


def ragged() -> Integers:
    """Eight answers of very different lengths; the second rank's half has a sequence without any."""
    labels = np.full((8, 12), IGNORED, dtype=np.int64)
    for row, trained in enumerate((12, 1, 3, 7, 0, 2, 11, 5)):
        labels[row, 12 - trained :] = 1
    return labels


@pytest.mark.timeout(150)
def test_ragged_masks_of_a_user() -> None:
    found = check_normalisation(make_plan(dp=2, micro=2, accumulation=2), ragged())
    assert found.ok, str(found.outcome.first)
    assert found.outcome.loss <= 1e-12
    assert found.trained == ((13, 10), (2, 16))
    assert found.telling
    for naive in (found.mean_of_ranks, found.mean_of_micro_batches):
        assert abs(naive / found.loss - 1) > 1e-5


def test_labels_that_cannot_be_cut_are_refused() -> None:
    plan = make_plan(dp=2, micro=2, accumulation=2)
    with pytest.raises(RequestError, match="at least one trained token"):
        check_normalisation(plan, np.full((8, 12), IGNORED, dtype=np.int64))
    with pytest.raises(RequestError, match=r"batch.global = 7"):
        check_normalisation(plan, ragged()[:7])
