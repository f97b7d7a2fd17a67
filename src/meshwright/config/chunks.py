"""How many chunks of the model a pipeline stage holds under each schedule: the one rule."""

from __future__ import annotations

from meshwright.config.choices import Schedule
from meshwright.config.errors import RequestError

__all__ = ["check_chunks", "chunk_limits"]


def chunk_limits(schedule: Schedule) -> tuple[int, int | None]:
    """The least number of chunks, and the most where there is one."""
    return {Schedule.INTERLEAVED: (2, None), Schedule.ZB_V: (2, 2)}.get(schedule, (1, 1))


def check_chunks(schedule: Schedule, chunks: int) -> None:
    """Raise a ``RequestError`` where a schedule does not run with so many chunks."""
    least, most = chunk_limits(schedule)
    if least <= chunks and (most is None or chunks <= most):
        return
    other = Schedule.ONE_F_ONE_B if chunks == 1 else Schedule.INTERLEAVED
    raise RequestError(
        f'parallel.chunks = {chunks} with parallel.schedule = "{schedule}"',
        "interleaved takes chunks of at least 2, zb-v exactly 2, every other schedule 1",
        (f"parallel.chunks = {least}", f'parallel.schedule = "{other}"'),
    )
