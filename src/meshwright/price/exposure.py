"""What of the replicas' traffic nothing hides, over arrays of layouts.

Once a step. Legacy stacks wait for all of it. Usual ones hide most of a sum under the last micro-batch's backward and
most of a gather under the next forward. The literal program sums a unit when its last backward is done, and gathers
what an update has changed while the next update runs:

    backward   head | L | L-1 | ... | 1 | emb |          late: what of the sums is left then, at least the last one
    sums              head    L   L-1   ...     1    emb

A micro-batch. ZeRO-3 gathers a unit ahead; the outer units are larger than blocks, so that theirs show where a block's
would not, and the first gather and the last scatter of a step have nothing to hide behind.
"""

from __future__ import annotations

import numpy as np

from meshwright.price.compute import Units
from meshwright.price.layouts import Array, Layouts
from meshwright.price.replicas import Replicas, largest
from meshwright.price.schedule import Stages
from meshwright.price.target import Target


def step_exposed(
    target: Target, layouts: Layouts, replica: Replicas, stages: Stages, units: Units, behind: Array
) -> Array:
    """Seconds once a step; `behind` is a block's backward (with recomputation) alone."""
    if target.legacy:
        return np.asarray(largest(replica.sums) + largest(replica.gathers) + replica.closing)
    if target.is_literal:
        return _literal(target, layouts, replica, stages, units, behind)
    share, exposed, slack = target.values["overlap.reduce"], np.zeros_like(behind), np.zeros_like(behind)
    for sums, gathers, own in zip(
        replica.sums, replica.gathers, (stages.first, stages.inner, stages.last), strict=True
    ):
        left = sums - share * np.minimum(sums, 0.8 * own[1]) + gathers - share * np.minimum(gathers, 0.8 * own[0])
        exposed = np.maximum(exposed, left - slack)
        slack = slack + np.where(layouts.pp > 1, own[1] / layouts.chunks, 0.0)
    return np.asarray(exposed + replica.closing)


def _literal(target: Target, layouts: Layouts, replica: Replicas, stages: Stages, units: Units, behind: Array) -> Array:
    slow = target.values["overlap.slow"]
    lone, exposed, slack = layouts.pp == 1, np.zeros_like(behind), np.zeros_like(behind)
    started = (np.where(lone, units.head_backward, behind), behind, units.head_backward)
    blocks = (layouts.first, layouts.most, layouts.last)
    chain = layouts.first + np.where(lone, 0.0, layouts.last + layouts.inner)
    tails = _tails(replica, units)
    for place, own in enumerate((stages.first, stages.inner, stages.last)):
        sums, window = replica.sums[place], own[1] / layouts.chunks - started[place]
        slowed = slow * np.minimum(replica.block.sum, behind) / layouts.chunks  # a block of the last micro-batch
        late = np.maximum(sums - np.maximum(window + blocks[place] * slowed, 0.0), tails[place]) + chain * slowed
        exposed = np.maximum(exposed, late - slack)
        slack = slack + np.where(lone, np.inf, own[1] / layouts.chunks)
    # Updates and gathers of updated parameters take turns; each overlaps the other's next.
    gathers, first = largest(replica.gathers), replica.optimizer / (np.maximum(layouts.first, layouts.last) + 1)
    published = np.where(gathers > 0, np.maximum(gathers - (replica.optimizer - first), 0.0), 0.0)
    return np.asarray(exposed + published + replica.closing)


def _tails(replica: Replicas, units: Units) -> tuple[Array, Array, Array]:
    """What starts after the last backward of a stage: the embedding's sum, and what the last block's leaves to it."""
    block = replica.block.sum + replica.block.scatter
    embedding = replica.embedding.sum + replica.embedding.scatter
    left = np.maximum(replica.block.sum - units.embedding_backward, 0.0)
    return embedding + left, block, block
