"""From what all ranks saw to a verdict: the figures of a rung, and the first thing that differs.

Order of execution
------------------
start values, forward: samples, trained tokens, what leaves each unit, the losses of training and of evaluation on step
0, backward: gradients from the head to the embedding, the norm, then weights after the first step, losses and norms of
later steps, weights after the last.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from meshwright.arch.parameters import tensors
from meshwright.layout.moves import Piece, owned
from meshwright.layout.rectangles import Rectangle
from meshwright.plan.norm import bias_names
from meshwright.plan.plan import Plan
from meshwright.verify.bands import Band
from meshwright.verify.figure import figure, relative, scale
from meshwright.verify.likely import Cause, Differing, Likely, likely_cause, likely_factor
from meshwright.verify.probe import Finding
from meshwright.verify.rung import RankReport
from meshwright.verify.trace import Figures, Kind, Quantity

__all__ = ["Comparison", "Verdict", "compare"]

_WEIGHTS = (Kind.START, Kind.FIRST, Kind.LAST)
_TERMS = ("auxiliary loss", "z loss")
_WHAT = {
    Kind.ACTIVATION: "what leaves it",
    Kind.GRADIENT: "gradient",
    Kind.START: "start value",
    Kind.FIRST: "weight after step 0",
    Kind.LAST: "weight after the last step",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first thing, in order of execution, that differs: `name` is a logical tensor, a unit, "loss" or "norm"."""

    name: str
    what: str
    figure: float
    rank: int | None
    likely: Likely

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.name}, {self.what}{where}: off by {self.figure:.3g}; {self.likely}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest figures of difference of one rung, the tensor with the worst, and the first that is too large."""

    loss: float
    gradient: float
    norm: float
    update: float
    activation: float
    worst: str
    first: Verdict | None

    @property
    def ok(self) -> bool:
        return self.first is None


def compare(plan: Plan, reports: Sequence[RankReport], reference: Figures, band: Band) -> Comparison:
    """Judge one rung with one optimizer. `reports` are of all ranks of the plan."""
    judge = _Judge(plan, reports, reference, band)
    first = next(judge.verdicts(), None)
    figures = {quantity: judge.figure_of(quantity) for quantity in judge.quantities()}

    def largest(*kinds: Kind) -> float:
        return max((value for quantity, value in figures.items() if quantity.kind in kinds), default=0.0)

    parameters = {quantity: value for quantity, value in figures.items() if quantity.kind is not Kind.ACTIVATION}
    worst = max(parameters, key=parameters.__getitem__, default=None)
    return Comparison(
        loss=max(judge.largest_number("losses", reference.losses), judge.evaluation_figure()),
        gradient=largest(Kind.GRADIENT),
        norm=judge.largest_number("norms", reference.norms),
        update=largest(*_WEIGHTS),
        activation=largest(Kind.ACTIVATION),
        worst=worst.name if worst else "",
        first=first,
    )


class _Judge:
    def __init__(self, plan: Plan, reports: Sequence[RankReport], reference: Figures, band: Band) -> None:
        self.plan, self.reports, self.reference, self.band = plan, reports, reference, band
        self._found: dict[Quantity, list[tuple[int, Finding]]] = defaultdict(list)
        for report in reports:
            for finding in report.findings:
                self._found[finding.quantity].append((report.rank, finding))

    def quantities(self) -> Iterator[Quantity]:
        """Every logical tensor of the comparison, in order of execution."""
        names = [tensor.name for tensor in tensors(self.plan.arch)]
        units = [self.plan.arch.unit_name(unit) for unit in range(self.plan.arch.head_unit)]
        yield from (Quantity(Kind.START, name) for name in names)
        yield from (Quantity(Kind.ACTIVATION, name) for name in units)
        yield from (Quantity(Kind.GRADIENT, name) for name in reversed(names))
        for kind in (Kind.FIRST, Kind.LAST):
            yield from (Quantity(kind, name) for name in (*names, *bias_names(self.plan).values()))

    def figure_of(self, quantity: Quantity) -> float:
        largest = max((finding.difference for _, finding in self._found[quantity]), default=math.inf)
        return figure(largest, scale(self.reference, quantity))

    def verdicts(self) -> Iterator[Verdict]:
        """Everything that differs, in order of execution."""
        checks: list[Callable[[], Verdict | None]] = [self._samples]
        kind = None
        for quantity in self.quantities():
            if quantity.kind is not kind:
                checks += self._between(kind)
                kind = quantity.kind
            checks.append(partial(self._tensor, quantity))
        checks += self._between(kind)
        yield from (verdict for check in checks if (verdict := check()) is not None)

    def _between(self, kind: Kind | None) -> list[Callable[[], Verdict | None]]:
        """The numbers that are known once all tensors of `kind` are."""
        later = range(1, len(self.reference.losses))
        match kind:
            case Kind.START:
                return [self._counts]
            case Kind.ACTIVATION:
                return [partial(self._number, "loss", 0), partial(self._terms, 0), self._evaluation]
            case Kind.GRADIENT:
                return [partial(self._number, "norm", 0)]
            case Kind.FIRST:
                loss, norm = (partial(self._number, name) for name in ("loss", "norm"))
                return [partial(check, step) for step in later for check in (loss, norm, self._terms)]
            case _:
                return []

    # ------------------------------------------------------------------ tensors

    def _tensor(self, quantity: Quantity) -> Verdict | None:
        found = self._found[quantity]
        missing = self._uncovered(quantity, found)
        if missing is not None:
            return missing
        size = self.figure_of(quantity)
        near = size <= self.band.of(quantity.kind)
        stale = next((report.rank for report in self.reports if quantity in report.stale), None)
        # A start value that is far off, or what is not finite, has a nearer cause than a copy that was not made.
        if stale is not None and (near or quantity.kind is not Kind.START) and math.isfinite(size):
            text = "what computes is not the master, rounded: an update did not reach it"
            if quantity.kind is Kind.START:
                text = "the master is not the start value to the bit, or what computes is not the master, rounded"
            likely = Likely(Cause.STALE, text)
            return Verdict(quantity.name, _WHAT[quantity.kind], size, stale, likely)
        if near:
            return self._unequal_copies(quantity, found)
        differing = [(rank, finding) for rank, finding in found if finding.traits is not None]
        rank, _ = max(differing, key=lambda each: each[1].difference)
        ordered = sorted(differing, key=lambda each: each[0] != rank)
        pieces = [Differing(r, f.rectangle, f.traits) for r, f in ordered if f.traits is not None]
        likely = likely_cause(self.plan, quantity.kind, size, pieces, self.band.of(quantity.kind))
        if quantity.name in bias_names(self.plan).values():
            text = "it was moved by other counts than those of the global batch"
            likely = Likely(Cause.MISSING_SUM, text)
        return Verdict(quantity.name, _WHAT[quantity.kind], size, rank, likely)

    def _uncovered(self, quantity: Quantity, found: list[tuple[int, Finding]]) -> Verdict | None:
        """Every element must lie on some rank."""
        layout: dict[int, list[Piece]] = defaultdict(list)
        for rank, finding in found:
            layout[rank].append(Piece(quantity.name, finding.rectangle))
        held = sum(piece.rectangle.numel for pieces in owned(layout).values() for piece in pieces)
        wanted = math.prod(self.reference.shapes[quantity.key])
        if held == wanted:
            return None
        text = f"{wanted - held} of {wanted} elements are on no rank"
        return Verdict(quantity.name, _WHAT[quantity.kind], math.inf, None, Likely(Cause.UNWRITTEN, text))

    def _unequal_copies(self, quantity: Quantity, found: list[tuple[int, Finding]]) -> Verdict | None:
        """Copies of a piece must be equal bit by bit: what is equal stays equal, what is not drifts apart."""
        if quantity.kind is Kind.ACTIVATION:
            return None
        first: dict[Rectangle, tuple[int, Finding]] = {}
        for rank, finding in found:
            one, other = first.setdefault(finding.rectangle, (rank, finding))
            if other.digest != finding.digest:
                largest = max(other.difference, finding.difference)
                text = f"ranks {one} and {rank} hold different bits of one piece: copies are not updated alike"
                size = figure(largest, scale(self.reference, quantity))
                return Verdict(quantity.name, _WHAT[quantity.kind], size, rank, Likely(Cause.ORDER, text))
        return None

    # ------------------------------------------------------------------ numbers

    def _samples(self) -> Verdict | None:
        """Every rank reads samples of the step, and each token is read."""
        for report in self.reports:
            if report.strays:
                text = f"samples {sorted(set(report.strays))[:8]} do not belong to the step"
                return Verdict("samples", "of step 0", math.inf, report.rank, Likely(Cause.ROWS, text))
        read = {finding.rectangle.start[0] for _, finding in self._found[Quantity(Kind.ACTIVATION, "embedding")]}
        unread = sorted(set(range(self.plan.batch.sequences)) - read)
        if unread:
            text = f"samples {unread[:8]} are read by no rank"
            return Verdict("samples", "of step 0", math.inf, None, Likely(Cause.ROWS, text))
        return None

    def _evaluation(self) -> Verdict | None:
        for report in self.reports:
            size = relative(report.evaluation, self.reference.evaluation)
            if size > self.band.loss:
                likely = self._likely_number(report.evaluation, self.reference.evaluation, self.band.loss)
                return Verdict("evaluation loss", "of step 0", size, report.rank, likely)
        return None

    def _counts(self) -> Verdict | None:
        for step, expected in enumerate(self.reference.counts):
            for report in self.reports:
                if report.counts[step] != expected:
                    text = f"{report.counts[step]} trained tokens were counted in step {step}, {expected} there are"
                    size = relative(report.counts[step], expected)
                    return Verdict(
                        "trained tokens", f"of step {step}", size, report.rank, Likely(Cause.MISSING_SUM, text)
                    )
        return None

    def _number(self, name: str, step: int) -> Verdict | None:
        attribute, allowed = ("losses", self.band.loss) if name == "loss" else ("norms", self.band.norm)
        expected = (self.reference.losses if name == "loss" else self.reference.norms)[step]
        for report in self.reports:
            actual: float = getattr(report, attribute)[step]
            size = relative(actual, expected)
            if size > allowed:
                likely = self._likely_number(actual, expected, allowed)
                return Verdict(name, f"of step {step}", size, report.rank, likely)
        return None

    def _terms(self, step: int) -> Verdict | None:
        """What routers add to the loss; a square among them doubles what rounding does."""
        for place, expected in enumerate(self.reference.terms[step]):
            for report in self.reports:
                actual = report.terms[step][place] if place < len(report.terms[step]) else math.nan
                size = relative(actual, expected)
                if size > 2 * self.band.loss:
                    likely = self._likely_number(actual, expected, 2 * self.band.loss)
                    return Verdict(_TERMS[place], f"of step {step}", size, report.rank, likely)
        return None

    def _likely_number(self, actual: float, expected: float, allowed: float) -> Likely:
        if not math.isfinite(actual):
            return Likely(Cause.NONFINITE, f"it is {actual}")
        return likely_factor(self.plan, actual / expected if expected else math.inf, max(allowed, 1e-7))

    def evaluation_figure(self) -> float:
        return max(relative(report.evaluation, self.reference.evaluation) for report in self.reports)

    def largest_number(self, attribute: str, expected: Sequence[float]) -> float:
        return max(
            relative(actual, wanted)
            for report in self.reports
            for actual, wanted in zip(getattr(report, attribute), expected, strict=True)
        )
