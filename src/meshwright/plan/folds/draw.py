"""A timeline as text: one line a stage, one cell the shortest slot of the step or so.

stage 0  F0 F1 .  .  B0 -- F2 B1 -- .  .  B2 --       F forward, B backward, W weight products, number: micro-batch
stage 1  .  F0 B0 -- F1 B1 -- F2 B2 --  .  .  .       small letters: the second chunk; f2.3: micro-batch 2, chunk 3
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.folds.timeline import Bar, Timeline

__all__ = ["draw_text"]

_LONGEST = 8  # cells that one slot may take


def draw_text(timeline: Timeline, width: int = 0) -> Iterator[str]:
    """The lines; wrapped into blocks of at most `width` characters where it is not 0."""
    bars = [bar for stage in timeline.stages for bar in stage if bar.end > bar.start]
    if not bars:
        return
    lengths = [bar.end - bar.start for bar in bars]
    cell = max(min(lengths), max(lengths) / _LONGEST)
    cells = [_cells(stage, cell) for stage in timeline.stages]
    columns = max(map(len, cells))
    size = max(len(word) for row in cells for word in row) + 1
    label = len(f"stage {len(cells) - 1}") + 2
    at_once = max((width - label) // size, 1) if width else columns
    for first in range(0, columns, at_once):
        if first:
            yield ""
        for stage, row in enumerate(cells):
            shown = (row + ["."] * (columns - len(row)))[first : first + at_once]
            yield (f"stage {stage}".ljust(label) + "".join(word.ljust(size) for word in shown)).rstrip()


def _cells(bars: tuple[Bar, ...], cell: float) -> list[str]:
    """Words of one stage: a slot takes a cell at least, and begins where it began or after the one before it."""
    row: list[str] = []
    for bar in bars:
        if bar.end <= bar.start:
            continue
        row += ["."] * (round(bar.start / cell) - len(row))
        row += [_word(bar), *["--"] * (max(round((bar.end - bar.start) / cell), 1) - 1)]
    return row


def _word(bar: Bar) -> str:
    letter = bar.work.value if bar.chunk == 0 else bar.work.value.lower()
    return f"{letter}{bar.micro}" + (f".{bar.chunk}" if bar.chunk > 1 else "")
