"""What an operator may want to see of a command that has ended: its text, its exit code and its last lines.

The worker sends it with the report of the end, and the journal keeps it with the action. Values of the caller's variables are blanked out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal

from workers.cpu.abstract import ExecOutcome

Kept = Literal["all", "failed", "none"]

LINES: Final = 20
STREAM_CHARACTERS, COMMAND_CHARACTERS = 2000, 1000
SHORTEST_SECRET: Final = 6
"""Characters below which a value is no secret: `1` or `yes` stands everywhere."""
BLANK: Final = "[variable]"


def excerpt_of(outcome: ExecOutcome, command: str, secrets: Collection[str], kept: Kept) -> dict[str, Any] | None:
    """Return the excerpt of a command, None where its kind of end is not `kept`: `failed` keeps all but exit code 0."""
    if kept == "none" or (kept == "failed" and outcome.status == "succeeded" and outcome.exit_code == 0):
        return None
    longest_first = sorted((secret for secret in secrets if len(secret) >= SHORTEST_SECRET), key=len, reverse=True)

    def blanked(text: str) -> str:
        for secret in longest_first:
            text = text.replace(secret, BLANK)
        return text

    def end_of(stream: bytes) -> str:
        # All of it, where values are to be looked for: one may begin before what is kept.
        whole = stream if longest_first else stream[-STREAM_CHARACTERS * 4 :]
        return "\n".join(blanked(whole.decode(errors="replace")).splitlines()[-LINES:])[-STREAM_CHARACTERS:]

    shown = blanked(command)
    return {
        "command": shown if len(shown) <= COMMAND_CHARACTERS else f"{shown[: COMMAND_CHARACTERS - 1]}…",
        "exit_code": outcome.exit_code,
        "stdout": end_of(outcome.stdout),
        "stderr": end_of(outcome.stderr),
    }
