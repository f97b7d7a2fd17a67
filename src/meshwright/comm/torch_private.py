"""Every private name of torch that the project uses: torch has no public way to these.

    FakeTensorMode       tensors of shapes alone, for dry runs
    FakeTensor           such a tensor: one thread at a time may work in its mode
    TorchDispatchMode    sees every operation
    tree_leaves          tensors inside whatever a module returns
    tree_map             the same with something else in their place
    group_timeout        how long a process group waits for a rank
    kernel_of            the Python function behind a custom operation
    storage_address      what tells storages apart, of fake tensors too: these have no address of data

Nobody else names a private one; a test reads the imports.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def group_timeout(group: dist.ProcessGroup, kind: str) -> timedelta:
    """How long `group` waits for a rank in collectives on devices of `kind`, "cpu" or "cuda"."""
    timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
    return timeout


def kernel_of(operation: Any) -> Callable[..., Any]:
    """The function that was registered as the custom operation `operation`. Raises KeyError for any other."""
    kernel: Callable[..., Any] = OPDEFS[operation._schema.name]._init_fn
    return kernel


def storage_address(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has."""
    address: int = storage._cdata
    return address
