"""Losses worked on some tokens at a time: the tiny models of all other tests never reach a second run of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.communicator import Communicator
from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Mesh
from meshwright.comm.registry import registered
from meshwright.layout.groups import GroupName
from meshwright.model.loss import IGNORED, token_losses
from meshwright.parallel import direct, tensor_vocabulary
from meshwright.parallel.runs import token_runs
from meshwright.plan.folds.traffic import Transport
from meshwright.verify.ladder import Rung
from meshwright.verify.rung import climb
from meshwright.verify.settings import DOUBLE, OPTIMIZERS, optimizer_of
from meshwright.verify.verify import judge, make_references
from tests.unit.plan.plans import make_plan


@given(st.integers(0, 300), st.integers(1, 50), st.integers(1, 400), st.integers(0, 9))
def test_runs_are_every_token_once_and_no_larger_than_asked(
    tokens: int, vocabulary: int, elements: int, first: int
) -> None:
    runs = token_runs(tokens, vocabulary, elements, first)
    assert [token for low, high in runs for token in range(low, high)] == list(range(first, first + tokens))
    assert all((high - low) * vocabulary <= max(elements, vocabulary) for low, high in runs)
    assert token_runs(tokens, 0, elements, first) == []


def test_a_loss_in_many_runs_is_the_references(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make_plan(micro=4, layers=1, precision=DOUBLE, optimizer=optimizer_of(OPTIMIZERS[0]))
    references = make_references(plan, tmp_path)
    asked: list[int] = []

    def counted(*arguments: Any) -> list[tuple[int, int]]:
        runs = token_runs(*arguments)
        asked.append(len(runs))
        return runs

    monkeypatch.setattr(direct, "_CHUNK_ELEMENTS", 7 * plan.arch.vocab)
    monkeypatch.setattr(direct, "token_runs", counted)
    found = judge(Rung((), plan), references, [climb(plan, Mesh.of(plan).start(), "cpu", references)])
    assert found.ok, found.first
    assert set(asked) == {19}  # 128 tokens


def test_a_vocabulary_parallel_loss_in_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by one rank of one, with padding: its kernels alone, no message."""
    monkeypatch.setattr(tensor_vocabulary, "LOSS_CHUNK_ELEMENTS", 80)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=random, dtype=torch.float64)
    weight = torch.randn(24, 8, generator=random, dtype=torch.float64)
    labels = torch.randint(0, 23, (50,), generator=random)
    labels[::7] = IGNORED
    over = Communicator(GroupName.TP, (0,), 0, None, Ledger(Transport.DIRECT))  # type: ignore[arg-type]  # no message
    with registered({"alone": over}):
        total, _, raised, factor = tensor_vocabulary.loss_forward(x, weight, labels, (0, 23), "alone", False)
    logits = (x @ weight[:23].t()).requires_grad_()
    expected = token_losses(logits, labels).sum()
    torch.autograd.backward((2.5 * expected,))
    assert logits.grad is not None
    torch.testing.assert_close(total, expected.detach(), rtol=1e-13, atol=0)
    gradient = tensor_vocabulary.loss_gradient_(torch.tensor(2.5, dtype=torch.float64), labels, raised, factor, (0, 23))
    torch.testing.assert_close(gradient[:, :23], logits.grad, rtol=1e-12, atol=1e-14)
    assert not gradient[:, 23:].any()
