"""The mesh of programs of one's own: what a launcher started, it joins as the commands do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

from meshwright.comm import mesh
from meshwright.launch.environment import detect
from meshwright.launch.join import join as join_ranks

__all__ = ["Mesh"]


class Mesh(mesh.Mesh):
    """Degrees of the five axes, and after `start` the communicators of this rank.

        mesh = Mesh(dp=2, tp=2)          # plain data
        mesh.start()                     # joins the default process group, which must have 4 ranks

    Where there is none yet, ranks that torchrun or Slurm started make it: NCCL and a device each with CUDA, else gloo.
    A mesh of one rank needs no process group.
    """

    def start(self, join: Callable[[], bool] | None = None) -> Self:
        """Create every communicator of this rank. Collective over all ranks; a second call is an error.

        Raises JoinError where the ranks do not meet, in one line: see `launch.join`.
        """
        return super().start(join or _join_launcher)


def _join_launcher() -> bool:
    """Meet the other ranks of the launcher, a restart of theirs among them; False outside every launcher."""
    place = detect()
    if place is None:
        return False
    join_ranks(place, "cuda" if torch.cuda.is_available() else "cpu")
    return True
