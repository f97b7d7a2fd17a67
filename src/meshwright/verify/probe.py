"""Looks at an engine while it takes a step, and compares each piece with the reference where it lies.

Nothing is gathered: a rank reads from the reference the rectangle that it holds. What a step communicates is what it
communicates without a probe, and a difference is known by the rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.checkpoint.fingerprint import fingerprint
from meshwright.checkpoint.held import gradients, masters, parameters, published
from meshwright.comm.views import Held
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle, full
from meshwright.model.rows import Rows
from meshwright.parallel.engine import Engine, StepResult
from meshwright.plan.action import Action, Op
from meshwright.plan.stages import stage_units
from meshwright.verify.bands import Band
from meshwright.verify.figure import figure, scale
from meshwright.verify.trace import Kind, Quantity, ReferenceFile
from meshwright.verify.traits import Traits, largest_difference, traits_of

__all__ = ["Finding", "Probe"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One piece on one rank: its largest absolute difference, its bits, and traits where it differs too much."""

    quantity: Quantity
    rectangle: Rectangle
    difference: float
    digest: int
    traits: Traits | None


@dataclass(slots=True)
class Probe:
    """Collects the findings of one engine. `watch` around the first step, `weights` between steps."""

    engine: Engine
    reference: ReferenceFile
    band: Band
    findings: list[Finding] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)
    """Sample ids that do not belong to the step."""
    stale: list[Quantity] = field(default_factory=list)
    """Weights of which what computes is not the master, rounded."""
    _looked: bool = False

    def watch(self, step: Callable[[], StepResult]) -> StepResult:
        """Run `step`, looking at what leaves each unit and at the summed gradients before the first update.

        One that overflows is none: it is forgotten and run again, under the loss scale that fell.
        """
        hooks = [unit.register_forward_hook(self._border(name)) for name, unit in self._units()]
        self.engine.observe(self._before)
        seen, strayed = len(self.findings), len(self.strays)
        try:
            while True:
                self._looked = False
                result = step()
                if not result.overflowed:
                    return result
                del self.findings[seen:], self.strays[strayed:]
        finally:
            self.engine.observe(None)
            for hook in hooks:
                hook.remove()

    def weights(self, kind: Kind) -> None:
        """Compare the parameters as they are now."""
        held, balancer = parameters(self.engine), self.engine.balancer
        if balancer is not None and kind is not Kind.START:
            held = {**held} | {Piece(name, full(tuple(bias.shape))): bias for name, bias in balancer.biases.items()}
        self._compare(kind, held)
        if self.engine.plan.precision.has_master:
            computes = published(self.engine)
            for piece, master in masters(self.engine).items():
                expected = self.reference.read(kind, piece) if kind is Kind.START else master
                begun = torch.equal(master, expected.to(master.dtype))
                if not begun or not torch.equal(master.to(computes[piece].dtype), computes[piece]):
                    self.stale.append(Quantity(kind, piece.tensor))

    def _before(self, action: Action) -> None:
        if action.op is Op.UPDATE and not self._looked:
            self._looked = True
            scale, summed = self.engine.loss_scale.value, gradients(self.engine)
            self._compare(Kind.GRADIENT, summed if scale == 1.0 else {p: g.double() / scale for p, g in summed.items()})

    def _units(self) -> Iterator[tuple[str, nn.Module]]:
        """Units of this stage whose output leaves them as an activation: all but the head."""
        plan, model = self.engine.plan, self.engine.model
        for unit in stage_units(plan, self.engine.mesh.coordinates.pp):
            if unit != plan.arch.head_unit:
                yield plan.arch.unit_name(unit), model.units[unit]

    def _border(self, name: str) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
        def look(_module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
            rows = inputs[1]
            assert isinstance(rows, Rows)
            self._compare(Kind.ACTIVATION, dict(self._placed(name, rows, output.detach())))

        return look

    def _placed(self, name: str, rows: Rows, x_ND: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """The output of a unit as rectangles (sequence, positions, features): one a run of neighbouring tokens."""
        samples_N = rows.sample_ids.repeat_interleave(rows.offsets.shape[1])
        offsets_N = rows.offsets.flatten()
        if len(x_ND) < len(offsets_N):  # sequence parallel: this rank's chunk of the stream
            degrees, at = self.engine.plan.degrees, self.engine.mesh.coordinates
            samples_N, offsets_N = samples_N.chunk(degrees.tp)[at.tp], offsets_N.chunk(degrees.tp)[at.tp]
        for low, high in _runs(samples_N, offsets_N):
            sample, first = int(samples_N[low]), int(offsets_N[low])
            if 0 <= sample < self.engine.plan.batch.sequences:
                box = Rectangle((sample, first, rows.first_feature), (1, high - low, x_ND.shape[1]))
                yield Piece(name, box), x_ND[low:high].unsqueeze(0)
            else:
                self.strays.append(sample)

    def _compare(self, kind: Kind, held: Held) -> None:
        for piece, view in held.items():
            quantity = Quantity(kind, piece.tensor)
            expected = self.reference.read(kind, piece)
            difference = largest_difference(view, expected)
            divisor, allowed = scale(self.reference.figures, quantity), self.band.of(kind)
            traits = None
            if figure(difference, divisor) > allowed:
                traits = self._traits(quantity, piece, view, expected, allowed * divisor)
            digest = fingerprint(view, piece.rectangle)
            self.findings.append(Finding(quantity, piece.rectangle, difference, digest, traits))

    def _traits(self, quantity: Quantity, piece: Piece, view: Tensor, expected: Tensor, allowed: float) -> Traits:
        """Of weights that were updated, traits of what the updates did: a factor of those is none of the weights."""
        along, start = self._extended(quantity, piece.rectangle), Quantity(Kind.START, quantity.name)
        if quantity.kind in (Kind.FIRST, Kind.LAST) and start.key in self.reference.figures.shapes:
            at_start, before = self.reference.read(Kind.START, piece), self._extended(start, piece.rectangle)
            updated, by_updates = along, (view.double() - at_start, expected - at_start)
            return traits_of(*by_updates, piece.rectangle.start, allowed, lambda dim: updated(dim) - before(dim))
        return traits_of(view, expected, piece.rectangle.start, allowed, along)

    def _extended(self, quantity: Quantity, box: Rectangle) -> Callable[[int], Tensor]:
        """The reference's box, all of one dimension."""
        shape = self.reference.figures.shapes[quantity.key]

        def along(dim: int) -> Tensor:
            start = (*box.start[:dim], 0, *box.start[dim + 1 :])
            extent = (*box.extent[:dim], shape[dim], *box.extent[dim + 1 :])
            return self.reference.read_key(quantity.key, Rectangle(start, extent))

        return along


def _runs(samples_N: Tensor, offsets_N: Tensor) -> Iterator[tuple[int, int]]:
    """Runs of tokens that are neighbours in one sequence: (first, last + 1)."""
    apart = (torch.diff(samples_N) != 0) | (torch.diff(offsets_N) != 1)
    bounds = [0, *apart.nonzero().flatten().add(1).tolist(), len(offsets_N)]
    yield from pairwise(bounds)
