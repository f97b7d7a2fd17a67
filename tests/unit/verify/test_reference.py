"""The reference against arithmetic written out by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from meshwright.arch.parameters import tensors
from meshwright.config.choices import OptimizerKind
from meshwright.data.batch import IGNORED
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, full
from meshwright.model import build_decoder, initialise, rows_to_torch
from meshwright.verify.batches import global_batches
from meshwright.verify.reference import run_reference
from meshwright.verify.settings import CLIP_NORM, RATES, STEPS, optimizer_of
from meshwright.verify.trace import Kind, ReferenceFile
from tests.unit.plan.plans import make_plan

SGD, ADAMW = OptimizerKind.SGD, OptimizerKind.ADAMW
PLAN = replace(make_plan(micro=5), optimizer=optimizer_of(SGD))
BATCHES = global_batches(PLAN, STEPS)


def whole(reference: ReferenceFile, kind: Kind, name: str) -> torch.Tensor:
    return reference.read(kind, Piece(name, full(reference.figures.shapes[f"{kind}/{name}"])))


def test_one_step_of_sgd_by_hand(tmp_path: Path) -> None:
    figures = run_reference(PLAN, BATCHES, RATES[SGD], tmp_path / "sgd")
    reference = ReferenceFile(tmp_path / "sgd")
    assert reference.figures == figures
    assert figures.counts == tuple(int((batch.labels != IGNORED).sum()) for batch in BATCHES)
    names = [tensor.name for tensor in tensors(PLAN.arch)]
    gradients = {name: whole(reference, Kind.GRADIENT, name) for name in names}
    norm = float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())
    assert abs(norm / figures.norms[0] - 1) < 1e-14
    assert norm > CLIP_NORM, "clipping must be at work"
    for name, gradient in gradients.items():
        expected = whole(reference, Kind.START, name) - RATES[SGD] * CLIP_NORM / (norm + 1e-6) * gradient
        assert torch.allclose(whole(reference, Kind.FIRST, name), expected, rtol=1e-14, atol=1e-16)


def test_weights_are_written_after_the_first_step_and_the_last_of_any_number(tmp_path: Path) -> None:
    for steps, told in ((1, {Kind.FIRST}), (2, {Kind.FIRST, Kind.LAST}), (STEPS, {Kind.FIRST, Kind.LAST})):
        figures = run_reference(PLAN, BATCHES[:steps], RATES[SGD], tmp_path / str(steps))
        assert len(figures.losses) == steps
        assert {kind for kind in (Kind.FIRST, Kind.LAST) if figures.largest_of(kind)} == told


def test_the_loss_is_the_mean_over_trained_tokens(tmp_path: Path) -> None:
    figures = run_reference(PLAN, BATCHES[:1], RATES[SGD], tmp_path / "sgd")
    model = build_decoder(PLAN.arch, dtype=torch.float64, device="cpu")
    initialise(model, PLAN.arch, PLAN.seed)
    batch = BATCHES[0]
    rows = rows_to_torch(batch.rows, PLAN.arch, dtype=torch.float64)
    scores = model(torch.from_numpy(batch.inputs), rows).detach().numpy()
    labels = batch.labels.reshape(-1)
    losses = np.log(np.exp(scores).sum(1))[labels >= 0] - scores[labels >= 0, labels[labels >= 0]]
    assert abs(losses.mean() / figures.losses[0] - 1) < 1e-14
    assert figures.evaluation == figures.losses[0]  # no dropout: training and evaluation see one function


def test_adamw_decays_matrices_and_no_gains(tmp_path: Path) -> None:
    """Without a trained token nothing but decay moves a weight: (1 - rate · 0.1)^5."""
    empty = [replace(batch, labels=np.full_like(batch.labels, IGNORED)) for batch in BATCHES]
    plan = replace(PLAN, optimizer=optimizer_of(ADAMW))
    figures = run_reference(plan, empty, RATES[ADAMW], tmp_path / "adamw")
    assert figures.losses == figures.norms == (0.0,) * STEPS
    reference = ReferenceFile(tmp_path / "adamw")
    for tensor in tensors(PLAN.arch):
        start, last = (whole(reference, kind, tensor.name) for kind in (Kind.START, Kind.LAST))
        factor = (1 - RATES[ADAMW] * 0.1) ** STEPS if tensor.decays else 1.0
        assert torch.allclose(last, start * factor, rtol=1e-13, atol=0)


def test_a_rectangle_is_read_as_it_lies_in_the_whole(tmp_path: Path) -> None:
    run_reference(PLAN, BATCHES[:1], RATES[SGD], tmp_path / "sgd")
    reference = ReferenceFile(tmp_path / "sgd")
    activation = whole(reference, Kind.ACTIVATION, "layers.1")
    assert activation.shape == (5, 32, 64)
    box = Rectangle((1, 30, 8), (3, 2, 4))
    assert torch.equal(reference.read(Kind.ACTIVATION, Piece("layers.1", box)), activation[1:4, 30:32, 8:12])
