"""What the core expects of durations: seconds on each amount of units.

A declared `work_s` is taken at its word; an action that declares none is given the usual duration of its kind.
"""

from __future__ import annotations

from typing import Final

from tangram.action import Action

USUAL_S: Final[dict[str, float]] = {
    "cpu.open": 0.05,
    "cpu.exec": 1.0,
    "cpu.read_file": 0.005,
    "cpu.write_file": 0.005,
    "cpu.close": 0.02,
    "gpu.score": 0.6,
    "gpu.logprobs": 0.6,
    "gpu.generate": 3.0,
    "api.call": 0.8,
}
"""Seconds on one unit by kind, for actions of which nothing is known."""

USUAL_OTHER_S: Final = 1.0


def expected_s(action: Action) -> tuple[float, ...]:
    """Return the expected duration in seconds on each of the action's amounts, ascending in units."""
    work_s = action.work_s if action.work_s is not None else USUAL_S.get(action.kind, USUAL_OTHER_S)
    speedup = action.curve.speedup
    return tuple(work_s / speedup(amount) for amount in action.elasticity.units)
