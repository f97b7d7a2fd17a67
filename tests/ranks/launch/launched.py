"""Commands as ranks of a launcher: a real torchrun, and processes with the variables that Slurm sets."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_LIMIT_S = 150.0


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    code: int
    out: str
    err: str


def torchrun(ranks: int, *words: str) -> Ended:
    """`python -m meshwright words` on each rank of torchrun on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "-m", "meshwright", *words], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def srun(ranks: int, *words: str, program: Sequence[str] = ("-m", "meshwright")) -> list[Ended]:
    """The same on ranks that have nothing but Slurm's variables in common; nobody ends them but themselves."""
    job = random.randrange(10**6)
    shared = {
        **os.environ,
        "SLURM_NTASKS": str(ranks),
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NODELIST": "localhost",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [Ended(process.returncode, out, err) for process, (out, err) in zip(processes, told, strict=True)]
