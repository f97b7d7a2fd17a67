"""The fingerprints of what a rank loads: that the right elements ended in the right places.

Of a piece whose memory nothing else reaches they are taken part by part as it lands, while the part is in a core's
cache. Of memory that might be written twice they are taken in the end: two pieces that land on each other would both
have been right when they came.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from meshwright.checkpoint.fingerprint import Fingerprints, Signing
from meshwright.checkpoint.landing import Landed, nobody
from meshwright.checkpoint.manifest import Manifest, TensorEntry
from meshwright.checkpoint.subject import Subject
from meshwright.checkpoint.views import alone
from meshwright.comm.views import Held, Views
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import Rectangle

__all__ = ["Arrival"]


class Arrival:
    """One load of one rank into the views `held`. `watch` is for `source.fill`, `sums` for after it."""

    def __init__(self, subject: Subject, held: Held, manifest: Manifest) -> None:
        known = subject.known
        self.tensors: list[TensorEntry] = [
            each for each in manifest.tensors if each.name in known and known[each.name][1] is each.dtype
        ]
        """Those loaded in the type in which they are stored: the others have other bits."""
        self._views, self._prints = Views(held), Fingerprints()
        self._now: dict[str, list[tuple[Rectangle, Signing]]] = defaultdict(list)
        self._later: list[Piece] = []
        settled = frozenset() if subject.stale() else frozenset(alone(held))
        names = {each.name for each in self.tensors}
        for own in subject.mine():
            if own.tensor not in names:
                continue
            if own in settled and Signing.can(held[own]):
                self._now[own.tensor].append((own.rectangle, Signing(own.rectangle, held[own])))
            else:
                self._later.append(own)

    def watch(self, piece: Piece, view: Tensor) -> Landed:
        """Who is to hear of a part of what this rank holds; other ranks take what is theirs."""
        for own, signing in self._now.get(piece.tensor, ()):
            if own.intersect(piece.rectangle) == piece.rectangle:
                return _at(piece.rectangle.within(own).start, signing)
        return nobody

    def sums(self) -> list[int]:
        """What this rank's own elements add to the fingerprint of each of `tensors`; to be asked once."""
        for tensor, pieces in self._now.items():
            for _, signing in pieces:
                self._prints.add(tensor, signing.value())
        for piece in self._later:
            self._prints.take(piece, self._views.view(piece))
        return [self._prints.of(each.name) for each in self.tensors]


def _at(corner: tuple[int, ...], signing: Signing) -> Landed:
    """`signing.took` for what is counted from a corner inside its piece."""

    def landed(inner: Rectangle) -> None:
        signing.took(inner.offset_by(corner))

    return landed if any(corner) else signing.took
