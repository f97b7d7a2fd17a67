"""Who holds which rectangle of every logical tensor, and who owns each element.

A tensor is cut along dimensions by factors of the mesh, lives on some pipeline stages, and is copied over everything
else. The *owner* of an element is coordinate 0 on every copy: it counts in the norm, writes the file, and signs the
fingerprint. Whether a gradient is whole or partial on an axis follows from the same data: it is partial over the
replica group, since its ranks saw different tokens, and over the groups named in `partial`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.arch.tensors import Tensor
from meshwright.layout.axes import Axis, Coordinates, Degrees, Factor
from meshwright.layout.groups import REPLICA_AXES, GroupName
from meshwright.layout.rectangles import Rectangle


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension `dim` is divided in equal blocks by a factor; the last blocks of an uneven cut are short or empty."""

    dim: int
    factor: Factor


@dataclass(frozen=True, slots=True)
class Ownership:
    """Raises ValueError where a factor cuts what the replica group takes for copies, or where two cuts share an axis
    but not the index over it."""

    tensor: Tensor
    stages: tuple[int, ...]  # pipeline coordinates that hold it
    cuts: tuple[Cut, ...] = ()
    replicas: GroupName = GroupName.DENSE  # whose ranks hold equal copies and see different tokens
    partial: tuple[GroupName, ...] = ()  # further groups over which the gradient is a partial sum

    def __post_init__(self) -> None:
        copied = {Axis.PP, *REPLICA_AXES[self.replicas]}
        runs = {frozenset(cut.factor.axes) for cut in self.cuts}
        for run in runs:
            if wrong := copied & run:
                raise ValueError(f"{self.tensor.name}: {' and '.join(sorted(wrong))} cannot both cut and copy it")
            if any(run & other for other in runs - {run}):
                raise ValueError(f"{self.tensor.name}: its cuts share {' and '.join(sorted(run))}, but not one index")

    def holds(self, at: Coordinates) -> bool:
        return at.pp in self.stages

    def rectangle(self, degrees: Degrees, at: Coordinates) -> Rectangle:
        """The rectangle of the logical tensor that a rank at `at` holds: shape of the tensor, cut by every factor."""
        start, extent = [0] * len(self.tensor.shape), list(self.tensor.shape)
        for cut in self.cuts:
            size = extent[cut.dim]
            block = -(-size // cut.factor.degree)
            begin = min(cut.factor.of(degrees, at) * block, size)
            start[cut.dim] += begin
            extent[cut.dim] = min(block, size - begin)
        return Rectangle(tuple(start), tuple(extent))

    def local_shape(self, degrees: Degrees) -> tuple[int, ...]:
        """The shape of what a rank stores: equal on all ranks, padded where the cut is uneven."""
        shape = list(self.tensor.shape)
        for cut in self.cuts:
            shape[cut.dim] = -(-shape[cut.dim] // cut.factor.degree)
        return tuple(shape)

    def owns(self, degrees: Degrees, at: Coordinates, shared: tuple[Axis, ...] = ()) -> bool:
        """True on coordinate 0 of every copy: each element has exactly one owner.

        Copies along the axes in `shared` are not asked: there the caller divides the elements among them.
        """
        axes = [axis for axis in Axis if axis is not Axis.PP and axis not in shared]
        return at.pp == self.stages[0] and all(copy == 0 for copy in self._copies(degrees, at, axes))

    def _copies(self, degrees: Degrees, at: Coordinates, axes: Sequence[Axis]) -> Iterator[int]:
        """Which copy a rank holds along `axes`: what is left of each index once the digits that cut it are taken out.

        Axes that are cut as one index are asked as one: of experts laid out over ep x tp, no coordinate alone tells.
        """
        read_with = {axis: cut.factor.axes for cut in self.cuts for axis in cut.factor.axes}
        for run in dict.fromkeys(read_with.get(axis, (axis,)) for axis in axes):
            digits = (cut.factor for cut in self.cuts if set(cut.factor.axes) == set(run))
            yield degrees.index(run, at) - sum(digit.of(degrees, at) * digit.stride for digit in digits)
