"""Live bytes as operations make them: every storage from the operation that returns it until it dies.

It sees real and fake tensors alike. What the engine's allocator makes or resizes is told by the allocator, for a
storage that changes its size passes no dispatcher; everything else is what autograd keeps and what passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.torch_private import TorchDispatchMode, storage_address, tree_leaves
from meshwright.parallel import allocator
from meshwright.parallel.allocator import Allocator
from meshwright.plan.category import Category
from meshwright.plan.folds.memory import Event

__all__ = ["StorageWatch"]


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Within the block, `events` fills with the changes of live bytes, each at the action that is executed.

    `kernel` may give another function to run in an operation's place, inside the watch.
    """

    def __init__(self, memory: Allocator, kernel: Callable[[Any], Callable[..., Any] | None] = lambda op: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._allocator, self._kernel = memory, kernel
        self._depth = 0
        self._followed: set[int] = set()
        self._counted: dict[int, tuple[Category, int]] = {}

    def __enter__(self) -> StorageWatch:
        self._depth += 1  # a kernel in an operation's place runs inside the watch once more
        self._allocator.on_event = self._resized
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._allocator.on_event = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        instead = self._kernel(func)
        if instead is not None:
            with self:
                return instead(*args, **(kwargs or {}))
        for storage in _storages((args, kwargs)):  # where it is not known by now, no operation has made it
            self._track(storage)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if self._track(storage):
                self._become(storage, Category.ACTIVATIONS, 0)
        return out

    def _resized(self, event: allocator.Event) -> None:
        storage = event.tensor.untyped_storage()
        self._track(storage)
        self._become(storage, event.category, storage.nbytes() - event.num_bytes)

    def _track(self, storage: torch.UntypedStorage) -> bool:
        """Follow a storage, without counting it yet; False where it is followed already."""
        address = storage_address(storage)
        if address in self._followed:
            return False
        self._followed.add(address)
        weakref.finalize(storage, self._died, address).atexit = False
        return True

    def _become(self, storage: torch.UntypedStorage, category: Category, uncounted: int) -> None:
        """Count a storage as it is now; `uncounted` bytes of it were live before anybody counted it."""
        address = storage_address(storage)
        before = self._counted.get(address, (category, uncounted))
        self._counted[address] = category, storage.nbytes()
        self._change(before[0], -before[1])
        self._change(category, storage.nbytes())

    def _died(self, address: int) -> None:
        self._followed.remove(address)
        category, num_bytes = self._counted.pop(address, (Category.ACTIVATIONS, 0))
        self._change(category, -num_bytes)

    def _change(self, category: Category, num_bytes: int) -> None:
        if num_bytes:
            self.events.append(Event(self._allocator.action, category, num_bytes))


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
