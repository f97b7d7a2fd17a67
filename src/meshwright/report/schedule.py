"""A pipeline's step as a picture: planned above measured, on one axis of time.

planned    stage 0  |F0|F1|  |B0   |...
           stage 1  .  |F0|B0   |F1|...
measured   stage 0  ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from meshwright.plan.folds.timeline import Bar, Timeline
from meshwright.plan.schedules import Work

__all__ = ["colours_told", "draw_svg"]

_WIDTH, _LEFT, _ROW, _GAP, _TITLE = 1000.0, 70.0, 26.0, 3.0, 24.0  # pixels
_HUES = {Work.FORWARD: 212, Work.BACKWARD: 28, Work.WEIGHT: 140}
_NAMES = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.WEIGHT: "weight products"}


def draw_svg(timelines: Mapping[str, Timeline]) -> str:
    """One SVG of all timelines by title, to one scale; later chunks are lighter, each bar tells what it is."""
    longest = max(timeline.seconds for timeline in timelines.values())
    scale = (_WIDTH - _LEFT) / longest if longest else 0.0
    parts: list[str] = []
    top = 0.0
    for title, timeline in timelines.items():
        told = f"{title}: {timeline.seconds:.4g} s, bubble {timeline.bubble:.1%}"
        parts.append(f'<text x="0" y="{top + 16:.1f}" class="title">{escape(told)}</text>')
        top += _TITLE
        for stage, bars in enumerate(timeline.stages):
            parts.append(f'<text x="0" y="{top + 17:.1f}">stage {stage}</text>')
            parts += [_bar(bar, top, scale) for bar in bars if bar.end > bar.start]
            top += _ROW
        top += _GAP
    style = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}rect{stroke:#fff;stroke-width:.5}"
    size = f'viewBox="0 0 {_WIDTH:.0f} {top:.0f}" width="{_WIDTH:.0f}" height="{top:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>'


def colours_told(works: Iterable[Work]) -> str:
    """What the colours mean, as HTML."""
    items = "".join(
        f'<span><i style="background:hsl({_HUES[work]},60%,50%)"></i>{_NAMES[work]}</span>' for work in works
    )
    return f'<p class="legend">{items}<span>numbers: micro-batches; lighter: later chunks</span></p>'


def _bar(bar: Bar, top: float, scale: float) -> str:
    x, wide = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    light = min(50 + 14 * bar.chunk, 88)
    told = f"{_NAMES[bar.work]}, micro-batch {bar.micro}, chunk {bar.chunk}: {bar.start:.4g} to {bar.end:.4g} s"
    place = f'x="{x:.2f}" y="{top:.1f}" width="{wide:.2f}" height="{_ROW - _GAP:.1f}"'
    rect = f'<rect {place} fill="hsl({_HUES[bar.work]},60%,{light}%)"><title>{told}</title></rect>'
    if wide < 14:
        return rect
    return f'{rect}<text x="{x + 3:.2f}" y="{top + 16:.1f}">{bar.micro}</text>'
