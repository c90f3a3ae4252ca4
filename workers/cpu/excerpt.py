"""What an operator may want to see of a command that has ended: its text, its exit code and its last lines.

The worker sends it with the report of the end, and the journal keeps it with the action. Values of the caller's variables are blanked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

from workers.cpu.abstract import ExecOutcome

Kept = Literal["all", "failed", "none"]

LINES: Final = 20
STREAM_CHARACTERS, COMMAND_CHARACTERS = 2000, 1000
SHORTEST_SECRET: Final = 6
"""Characters below which a value is no secret: `1` or `yes` stands everywhere."""
BLANK: Final = "[variable]"


def excerpt_of(outcome: ExecOutcome, command: str, given: Iterable[str], kept: Kept) -> dict[str, Any] | None:
    """Return the excerpt of a command, None where its kind of end is not `kept`: `failed` keeps all but exit code 0.

    `given` are the values of the caller's variables.
    """
    if kept == "none" or (kept == "failed" and outcome.status == "succeeded" and outcome.exit_code == 0):
        return None
    secrets = _secrets(given)
    shown = _blanked(command, 0, COMMAND_CHARACTERS, secrets)
    if max(len(command), len(shown)) > COMMAND_CHARACTERS:
        shown = f"{shown[: COMMAND_CHARACTERS - 1]}…"
    return {
        "command": shown.encode(errors="replace").decode(),  # a lone surrogate makes no report
        "exit_code": outcome.exit_code,
        "stdout": _last_lines(outcome.stdout, secrets),
        "stderr": _last_lines(outcome.stderr, secrets),
    }


def _secrets(values: Iterable[str]) -> list[str]:
    """Return values, and each of their lines: a terminal prints other ends of lines, and shells leave out the last."""
    texts = {text.strip() for value in values for text in (value, *value.splitlines())}
    return [text for text in texts if len(text) >= SHORTEST_SECRET]


def _last_lines(stream: bytes, secrets: Sequence[str]) -> str:
    text = stream.decode(errors="replace")
    shown = _blanked(text, max(0, len(text) - STREAM_CHARACTERS * 2), len(text), secrets)
    return "\n".join(shown.splitlines()[-LINES:])[-STREAM_CHARACTERS:]


def _blanked(text: str, begin: int, end: int, secrets: Sequence[str]) -> str:
    """Return a part of a text without secrets, also those that begin before it. Only the part is read: texts and secrets may be many."""
    places = []
    for secret in secrets:
        at = max(0, begin - len(secret) + 1) - 1
        while (at := text.find(secret, at + 1, end + len(secret) - 1)) >= 0:
            places.append((at, at + len(secret)))
    pieces: list[str] = []
    here = begin
    for first, after in sorted(places):
        if first >= here or not pieces:
            pieces += [text[here:first], BLANK]
        here = max(here, after)
    return "".join([*pieces, text[here:end]])
