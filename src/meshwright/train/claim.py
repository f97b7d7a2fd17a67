"""One run at a time in a folder.

Two would cut each other's figures back, remove what the other is just saving, and go on from its checkpoints. The claim
is a lock of the file system on a file beside the run folders: it goes with its process, however that ends, so nothing
is ever left to be removed by hand. Where a file system has no locks, nobody is stopped.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from meshwright.config.errors import RequestError
from meshwright.train.job import Job

__all__ = ["claimed"]


@contextmanager
def claimed(job: Job) -> Iterator[None]:
    """Have the run folder to oneself. Raises RequestError, naming who has it, where another process does."""
    file = job.cache / "claims" / job.folder.name
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that takes no file is told where the run's own are opened
            file.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(file.open("a+"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                holder = stream.read(200).strip() or "another process"
                raise RequestError(
                    str(job.folder), f"{holder} is training there", ("another name", "to wait")
                ) from None
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {platform.node()}")
            stream.flush()
        yield
