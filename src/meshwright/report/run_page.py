"""A run folder as one page: curves, predicted beside measured, the run file. One file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from meshwright.price.times import PARTS
from meshwright.report.style import style

__all__ = ["run_page"]

_SHOWN = ("step_seconds", *PARTS, "data")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860, 220, 64, 24
_POINTS = 600  # a curve is thinned to about as many

_Points = Sequence[tuple[float, float]]


def run_page(folder: Path) -> str:
    """The page of a run folder, as HTML: its metrics.jsonl, ledger.json and run.toml, whichever are there."""
    lines = [json.loads(line) for line in _read(folder / "metrics.jsonl").splitlines()]
    ledger = json.loads(_read(folder / "ledger.json") or "{}")
    body = [*_curves(lines), *_time(ledger), *_traffic(ledger), *_memory(ledger), "<h2>Run file</h2>",
            f"<pre>{escape(_read(folder / 'run.toml'))}</pre>"]  # fmt: skip
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(folder.name)}</title>'
    )
    return f"<!doctype html><html lang=en><head>{head}<style>{style()}</style></head><body><main>" + (
        f"<h1>{escape(folder.name)}</h1>{''.join(body)}</main></body></html>\n"
    )


def _read(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _curves(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Loss with evaluations over it, gradient norm, learning rate, tokens a second: each over the steps."""
    steps = [line for line in lines if "loss" in line]
    evaluations = _points([line for line in lines if "eval_loss" in line], "eval_loss")
    for key, title in (
        ("loss", "Loss, nats a token (dots: evaluation)"),
        ("grad_norm", "Gradient norm before clipping"),
        ("learning_rate", "Learning rate"),
        ("tokens_per_second", "Tokens a second"),
    ):
        points = _points(steps, key)
        if points:
            yield f"<h2>{title}</h2>{_chart(points, evaluations if key == 'loss' else ())}"


def _points(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]


def _chart(points: _Points, dots: _Points) -> str:
    """A line through `points` and circles at `dots`, on one scale, as SVG."""
    every = max(len(points) // _POINTS, 1)
    shown = [*points[:-1:every], points[-1]]
    lowest, highest = (pick(y for _, y in (*shown, *dots)) for pick in (min, max))
    last = max(x for x, _ in (*shown, *dots)) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        share = (y - lowest) / ((highest - lowest) or 1)
        return _LEFT + x / last * (_WIDTH - _LEFT - 8), 8 + (1 - share) * (_HEIGHT - _BOTTOM - 8)

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in shown))
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in (at(*dot) for dot in dots))
    texts = [(4, 16, f"{highest:.4g}"), (4, _HEIGHT - _BOTTOM, f"{lowest:.4g}"), (_LEFT, _HEIGHT - 6, "step 0"),
             (_WIDTH - 60, _HEIGHT - 6, f"{last:.0f}")]  # fmt: skip
    words = "".join(f'<text x="{x}" y="{y}" font-size="12" fill="currentColor">{text}</text>' for x, y, text in texts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" style="width:100%;max-width:{_WIDTH}px">{words}'
        f'<polyline points="{path}" fill="none" stroke="#3b6fd4" stroke-width="1.6"/>'
        f'<g fill="#d46a3b">{circles}</g></svg>'
    )


def _traffic(ledger: dict[str, Any]) -> Iterator[str]:
    """Calls and bytes of a step on rank 0, as predicted and as measured."""
    sides = [ledger.get(side, {}).get("traffic", []) for side in ("predicted", "measured")]
    found = [{(r["group"], r["operation"], r["phase"]): r for r in rows} for rows in sides]
    if any(found):
        header = ("group", "operation", "phase", "calls", "sent bytes, predicted", "measured")
        rows = []
        for key in {**found[0], **found[1]}:
            said, seen = (side.get(key, {"calls": 0, "sent_bytes": 0}) for side in found)
            rows.append((*key, said["calls"], f"{said['sent_bytes']:,}", f"{seen['sent_bytes']:,}"))
        yield f"<h2>Traffic of a step, rank 0</h2>{_table(header, rows)}"


def _time(ledger: dict[str, Any]) -> Iterator[str]:
    """Seconds of a step by part, and each part's share of it; the parts add up to the step."""
    said, seen = (ledger.get(side, {}).get("time", {}) for side in ("predicted", "measured"))
    rows = [
        (name.removesuffix("_seconds"), *_timed(said, name), *_timed(seen, name))
        for name in _SHOWN
        if said.get(name) or seen.get(name)
    ]
    if rows:
        header = ("part", "predicted, s", "share", "measured, s", "share")
        yield f"<h2>Time of a step, rank 0</h2>{_table(header, rows)}"


def _timed(side: dict[str, Any], name: str) -> tuple[str, str]:
    seconds, whole = side.get(name), side.get("step_seconds")
    return ("-", "-") if seconds is None or not whole else (f"{seconds:.4g}", f"{seconds / whole:.1%}")


def _memory(ledger: dict[str, Any]) -> Iterator[str]:
    """Bytes by category on rank 0."""
    said, seen = (ledger.get(side, {}).get("memory", {}) for side in ("predicted", "measured"))
    rows = [
        (name, *(f"{side[name]:,}" if isinstance(side.get(name), int) else "-" for side in (said, seen)))
        for name in said
        if isinstance(said[name], int)
    ]
    if rows:
        yield f"<h2>Memory, bytes</h2>{_table(('category', 'predicted', 'measured'), rows)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
