"""Writes the table of `docs/metrics.md`: `python -m app.metrics.page`."""

from __future__ import annotations

from app.metrics.families import FAMILIES


def table() -> str:
    """Return the table of all metrics, in Markdown."""
    lines = ["| process | metric | kind | labels | what it is |", "|---|---|---|---|---|"]
    for family in FAMILIES.values():
        labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
        lines.append(f"| {family.process} | `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
