"""How an account reacts to a server that refuses: back off for the whole fleet, then come back step by step.

An answer *refuses* when it is 429, or 503 with `Retry-After` (RFC 6585, RFC 9110). Each account has one throttle, so a refusal to
one worker counts for all.

| state | on | to | what happens |
|---|---|---|---|
| `open` | a refusal | `paused` | the factor is halved; nothing starts until `Retry-After` is over |
| `paused` | a refusal of a request from before the halving | `paused` | the pause grows to the later end; the factor stays |
| `paused` | its end | `lowered` | requests start at factor × rate, without bursts |
| `lowered` | a refusal of a request from after the halving | `paused` | the factor is halved again, down to `FLOOR` |
| `lowered` | success of a request from after the halving | `lowered` | the factor grows by `RISE_PER_S` × the seconds since it last grew |
| `lowered` | the factor reaches 1 | `open` | |

Many requests under way may notice an overload, but it halves the rate only once. Multiplicative decrease and additive increase let
independent fleets share an API fairly (Chiu and Jain, 1989). Growth counts seconds, not successes. So recovery takes equally long
at every rate: at most `1 / RISE_PER_S` = 10 seconds after the last refusal's pause, if a request succeeds every second. There is no
clock here: times come in.
"""

from __future__ import annotations

from typing import Final, Literal

DECREASE: Final = 0.5
"""The part of the factor that remains after a refusal."""

FLOOR: Final = 0.05
"""Least factor. Some requests must go on, to notice that the server allows more again."""

RISE_PER_S: Final = 0.1
"""The gain of the factor for each second in which requests succeed."""

LONGEST_STEP_S: Final = 1.0
"""Most seconds that a single success may stand for. Silence does not show that the server allows more."""

DEFAULT_PAUSE_S: Final = 1.0
"""Pause after a refusal without `Retry-After`."""

LONGEST_PAUSE_S: Final = 3600.0
"""Longest pause. A server that asks for more has a wrong clock, or the account needs a person's attention."""

ThrottleState = Literal["open", "paused", "lowered"]


class Throttle:
    """The factor on an account's rate, from `FLOOR` to 1, and the end of its pause, `until_s`."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.until_s = float("-inf")
        self._lowered_at = float("-inf")
        self._rose_at = float("-inf")

    def state(self, now: float) -> ThrottleState:
        """Return the state's word."""
        if now < self.until_s:
            return "paused"
        return "open" if self.factor == 1.0 else "lowered"

    def refused(self, granted_at: float, now: float, retry_after_s: float | None) -> None:
        """Take in the refusal of a request that was granted at `granted_at`."""
        pause_s = DEFAULT_PAUSE_S if retry_after_s is None else min(retry_after_s, LONGEST_PAUSE_S)
        self.until_s = max(self.until_s, now + pause_s)
        self._rose_at = self.until_s
        # Requests that were granted before the last lowering went out at the old rate. Their refusals do not lower it again.
        if granted_at > self._lowered_at:
            self.factor = max(FLOOR, self.factor * DECREASE)
            self._lowered_at = now

    def succeeded(self, granted_at: float, now: float) -> None:
        """Take in the success of a request that was granted at `granted_at`."""
        if self.factor == 1.0 or granted_at <= self._lowered_at or now <= self._rose_at:
            return
        self.factor = min(1.0, self.factor + RISE_PER_S * min(now - self._rose_at, LONGEST_STEP_S))
        self._rose_at = now
