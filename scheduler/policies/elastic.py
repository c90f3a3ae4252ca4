"""`elastic`: ours. Priority, then order of arrival; spare units where they save most; resized in flight.

The units of a group are shared out again whenever something in it changes, among the actions that start and those
that run and could use another amount: a running action grows into units that fall free and gives its extra ones
back when others wait. A change that would save less than `LEAST_GAIN_S` is not made, and units are taken from a
running action only as far as somebody gets them, so that nothing flaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from scheduler.model import Running, Waiting
from scheduler.policies.abstract import Change, Choice, Group, Plan, Policy
from scheduler.policies.allocation import Demand, allocate

LEAST_GAIN_S: Final = 0.05
"""Seconds that growing a running action must be expected to save: some hundred times what a resize costs."""


class Elastic(Policy):
    """Start as many as fit, give the spare units to whom they help most, and keep it so while they run."""

    name = "elastic"
    resizes = True

    def order_key(self, waiting: Waiting) -> tuple[float, ...]:
        """Order by priority class, then arrival."""
        return (-waiting.action.priority, waiting.seq)

    def choose(self, candidates: Sequence[Waiting], behind: Sequence[Waiting], free: int, group: Group, now: float) -> list[Choice]:
        """Start every candidate, on the amounts with the least total duration."""
        return self.plan(candidates, behind, [], free, group, now).choices

    def plan(
        self,
        candidates: Sequence[Waiting],
        behind: Sequence[Waiting],
        elastic: Sequence[Running],
        free: int,
        group: Group,
        now: float,
    ) -> Plan:
        """Share out the free units and those of elastic running actions for the least total of remaining seconds."""
        small = [running for running in elastic if running.units < running.waiting.best]
        wished = sum(waiting.best for waiting in candidates) + sum(running.waiting.best - running.units for running in small)
        if wished <= free:
            growing = [Change(running, running.waiting.best) for running in small if _worth(running, running.waiting.best, now)]
            return Plan([Choice(waiting, waiting.best) for waiting in candidates], growing)
        demands = [Demand(waiting.units, waiting.durations_s, 1.0, waiting.steps) for waiting in candidates]
        demands.extend(Demand(r.waiting.units, r.waiting.durations_s, r.left_at(now), r.waiting.steps) for r in elastic)
        amounts = allocate(demands, free + sum(running.units for running in elastic))
        choices = [Choice(waiting, units) for waiting, units in zip(candidates, amounts, strict=False)]
        targets = [(r, units) for r, units in zip(elastic, amounts[len(candidates) :], strict=True) if units != r.units]
        growing = [Change(r, units) for r, units in targets if units > r.units and _worth(r, units, now)]
        needed = sum(c.units for c in choices) + sum(c.units - c.running.units for c in growing) - free
        return Plan(choices, [*_shrinking(targets, needed, now), *growing])


def _saved_s(running: Running, units: int, now: float) -> float:
    return running.left_at(now) * (running.whole_s - running.waiting.duration_s(units))


def _worth(running: Running, units: int, now: float) -> bool:
    return _saved_s(running, units, now) >= LEAST_GAIN_S


def _shrinking(targets: Sequence[tuple[Running, int]], needed: int, now: float) -> list[Change]:
    """Take `needed` units from those that the allocation wants smaller, the least harmed first."""
    if needed <= 0:
        return []
    able = [
        (-_saved_s(running, units, now) / (running.units - units), number, running, units)
        for number, (running, units) in enumerate(targets)
        if units < running.units
    ]
    changes = []
    for _, _, running, units in sorted(able, key=lambda entry: entry[:2]):
        if needed <= 0:
            break
        changes.append(Change(running, units))
        needed -= running.units - units
    return changes
