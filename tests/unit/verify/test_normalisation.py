"""Labels of the user's own: what is refused before any rank is started."""

import numpy as np
import pytest

from meshwright.config.errors import RequestError
from meshwright.data.batch import IGNORED
from meshwright.layout.rows import Integers
from meshwright.verify.normalisation import check_normalisation
from tests.unit.plan.plans import make_plan

SOME = np.array([[3, IGNORED], [IGNORED, 5]])


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.full((2, 4), IGNORED), r"labels of shape \(2, 4\): are all -100: nothing trains"),
        (np.zeros((0, 4), dtype=np.int64), r"labels of shape \(0, 4\): must be those of the sequences of a batch"),
        (SOME[0], r"labels of shape \(2,\): must be"),
        (np.where(SOME == IGNORED, -1, SOME), r"a label of -1: is no token, and would count as trained; .*-100"),
    ],
)
def test_labels_that_no_batch_has(labels: Integers, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        check_normalisation(make_plan(dp=2), labels)
