"""Figures as people read them: bytes, durations, rates, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "duration_text", "rate_text", "table_lines"]


def bytes_text(num_bytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    return _scaled(num_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate_text(per_second: float, unit: str) -> str:
    """5.2e10, "FLOP/s" -> "52.0 GFLOP/s"."""
    return _scaled(per_second, 1000.0, tuple(f"{prefix}{unit}" for prefix in ("", "k", "M", "G", "T", "P", "E")))


def duration_text(seconds: float) -> str:
    """0.25 -> "250 ms", 75 -> "1m 15s", 7260 -> "2h 01m"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """An aligned table: the first `left` columns flush left, the others right, a rule under the headers."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        padded = [
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(cells[0]), "  ".join("-" * width for width in widths), *(line(row) for row in cells[1:])]


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < base:
            return f"{value:.0f} {unit}" if unit == units[0] else f"{value:.1f} {unit}"
        value /= base
    return f"{value:.1f} {units[-1]}"
