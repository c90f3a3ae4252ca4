"""Prints the table of docs/ends.md, from `tangram/ends.py` and from what the gateway makes of each cause.

`python -m app.gateway.ends_page`; a test holds the page against it.
"""

from __future__ import annotations

from app.gateway.errors import classify
from tangram.ends import CAUSES, Cause
from tangram.errors import BY_STATUS, StackUnreachable, TangramError


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| cause | fault | the action ends | what it means | the trainer should | the gateway says |", "|---|---|---|---|---|---|"]
    for name, cause in CAUSES.items():
        ends = ", ".join(f"`{end}`" for end in cause.ends) or "–"
        lines.append(f"| `{name}` | {cause.fault} | {ends} | {cause.meaning} | {cause.advice} | {said(name)} |")
    return "\n".join(lines)


def said(name: str) -> str:
    """Return the kinds of the gateway's errors for a cause, each with its usual HTTP status; a result where it is one."""
    kinds = dict.fromkeys(f"`{kind}` {status}" for kind, status in map(_kind, _errors(name, CAUSES[name])))
    results = ["a result"] if "succeeded" in CAUSES[name].ends or name == "timeout" else []
    return ", ".join([*results, *kinds])


def _errors(name: str, cause: Cause) -> list[TangramError]:
    if not cause.ends:
        unreachable = StackUnreachable()
        unreachable.cause = name
        return [unreachable]
    return [BY_STATUS[end]("", name) for end in cause.ends if end in BY_STATUS]


def _kind(error: TangramError) -> tuple[str, int]:
    failure = classify(error)
    return failure.kind, failure.status


if __name__ == "__main__":
    print(table())
