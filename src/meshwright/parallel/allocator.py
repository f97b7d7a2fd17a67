"""The reporting allocator: every parameter, gradient, optimizer and buffer byte of a rank is made and freed here.

Dispatch-mode trackers do not see a storage change its size, so the engine's memory reports itself. A tensor keeps its
identity through `release` and `regrow`: views of it see the refilled storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.parallel.huge_pages import advise
from meshwright.plan.category import Category


@dataclass(frozen=True, slots=True)
class Event:
    """From action `action` of the step on (-1: before it), `num_bytes` more of a category are live; negative: fewer.

    `tensor` is the one whose storage was made or changed its size.
    """

    action: int
    category: Category
    num_bytes: int
    tensor: Tensor = field(compare=False, repr=False)


class Allocator:
    """Counts live and largest bytes by category, and the peak of all; `on_event` sees each change, for traces."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live: dict[Category, int] = dict.fromkeys(Category, 0)
        self.largest: dict[Category, int] = dict.fromkeys(Category, 0)
        self.peak = 0
        self.action = -1
        self.on_event: Callable[[Event], None] | None = None

    @property
    def total(self) -> int:
        return sum(self.live.values())

    def empty(self, numel: int, dtype: torch.dtype, category: Category) -> Tensor:
        """(numel,) without values."""
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        advise(tensor)
        self._count(category, tensor.untyped_storage().nbytes(), tensor)
        return tensor

    def zeros(self, numel: int, dtype: torch.dtype, category: Category) -> Tensor:
        """(numel,) of zeros."""
        return self.empty(numel, dtype, category).zero_()

    def adopt(self, tensor: Tensor, category: Category) -> Tensor:
        """Count what was made elsewhere and will live as long as the run."""
        self._count(category, tensor.untyped_storage().nbytes(), tensor)
        return tensor

    def release(self, tensor: Tensor, category: Category) -> None:
        """Give the bytes back; `tensor` and its views stay valid names for a later `regrow`."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        self._count(category, -num_bytes, tensor)

    def regrow(self, tensor: Tensor, category: Category) -> None:
        """Give a released tensor memory again, without values."""
        storage = tensor.untyped_storage()
        storage.resize_(tensor.numel() * tensor.element_size())
        advise(tensor)
        self._count(category, storage.nbytes(), tensor)

    def reset_peak(self) -> None:
        self.peak = self.total

    def _count(self, category: Category, num_bytes: int, tensor: Tensor) -> None:
        self.live[category] += num_bytes
        self.largest[category] = max(self.largest[category], self.live[category])
        self.peak = max(self.peak, self.total)
        if self.on_event is not None and num_bytes:
            self.on_event(Event(self.action, category, num_bytes, tensor))
