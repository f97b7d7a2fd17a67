"""The ladder's batches: ragged, numbered through, equal wherever they are made."""

from dataclasses import replace

import numpy as np

from meshwright.config.choices import Documents
from meshwright.data.batch import IGNORED
from meshwright.verify.batches import global_batches, local_share
from tests.unit.plan.plans import make_plan

PLAN = make_plan(dp=2, micro=2, accumulation=3)


def test_sequences_are_ragged_so_that_a_mean_of_means_is_not_the_mean() -> None:
    for batch in global_batches(PLAN, 3):
        trained = (batch.labels != IGNORED).sum(1)
        assert trained[0] == 32
        assert trained[3] == 0
        assert len(set(trained.tolist())) >= 4
        halves = [local_share(PLAN, batch, rank).trained_tokens for rank in range(2)]
        assert halves[0] != halves[1]
        assert sum(halves) == batch.trained_tokens


def test_labels_are_the_tokens_that_follow() -> None:
    batch = global_batches(PLAN, 1)[0]
    inside = batch.labels[:, :-1] != IGNORED
    assert np.array_equal(batch.labels[:, :-1][inside], batch.inputs[:, 1:][inside])


def test_samples_are_numbered_through_and_shares_are_slices() -> None:
    batches = global_batches(PLAN, 2)
    assert [int(batch.rows.sample_ids[0]) for batch in batches] == [0, 12]
    assert local_share(PLAN, batches[1], 1).rows.sample_ids.tolist() == list(range(18, 24))


def test_batches_do_not_depend_on_the_layout() -> None:
    other = make_plan(dp=3, micro=4)
    for one, two in zip(global_batches(PLAN, 2), global_batches(other, 2), strict=True):
        assert np.array_equal(one.inputs, two.inputs)
        assert np.array_equal(one.labels, two.labels)


def test_documents_where_masks_stop_at_them() -> None:
    plan = replace(PLAN, data=replace(PLAN.data, documents=Documents.MASKED))
    documents = global_batches(plan, 1)[0].rows.document_ids
    assert documents is not None
    assert (np.diff(documents, axis=1) >= 0).all()
    assert len({tuple(row) for row in documents.tolist()}) > 6
