"""One server process with torch imported, from which ranks are forked.

Eight ranks start in 0.2 s this way; each importing torch for itself they need 17 s on two cores. Nothing here imports
torch, so a caller may start the server first and import torch beside it.
"""

import multiprocessing
from collections.abc import Iterable
from multiprocessing import forkserver

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing.api",
    "torch._dynamo",  # torch imports it at the first backward of a custom operation: 1.2 CPU seconds in every rank
    "meshwright.launch.rank",
)


def start_server(modules: Iterable[str] = ()) -> None:
    """Starts this process's fork server if it does not run yet. Returns at once; the server imports on its own.

    The server lives as long as this process or one of its ranks. It does not see what changes in this process's
    environment or `sys.path` after its start: ranks receive both with their arguments.

    Args:
        modules: what the ranks will import besides torch. Only the call that starts the server can name them.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *modules])
    forkserver.ensure_running()
