"""Text of trainers and programs as a page may show it, and figures as a person reads them."""

from __future__ import annotations

import html
from typing import Final

MOST_LETTERS: Final = 120


def plain(text: str, most: int = MOST_LETTERS) -> str:
    """Return a text in one line, without control and direction characters, and not longer than `most` letters."""
    line = text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= most else line[: most - 1] + "…"


def in_picture(text: str, most: int = 60) -> str:
    """Return a text for plotly.js, which reads labels as a small HTML."""
    return html.escape(plain(text, most), quote=False)


def seconds(value: float | None) -> str:
    """Return seconds with as many digits as say something."""
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def count(value: float) -> str:
    """Return a whole number with its thousands apart."""
    return f"{value:,.0f}"


def share(part: float, whole: float) -> str:
    """Return a part in per cent; nothing of nothing is empty."""
    return f"{part / whole:.1%}" if whole else ""


def change(value: float, before: float) -> str:
    """Say how a figure differs from another one."""
    if value == before:
        return "the same"
    if value <= 0 or before <= 0:
        return ""
    factor = max(value / before, before / value)
    if factor < 1.005:
        return "the same"
    shown = f"{factor:.2f}" if factor < 10 else f"{factor:,.0f}"
    return f"{shown} × {'lower' if value < before else 'higher'}"
