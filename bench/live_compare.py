"""The summary of `bench.live`: figures by system, the ratios between `elastic` and the other systems, and the verdict.

Only pure functions of measured values live here. The keys of `compare` are those of `bench.live --json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.live_record import Replayed
from bench.spread import Spread

OURS = "elastic"
JUDGED = ("mean_act", "step_duration")
SHOWN = (*JUDGED, "p95_act", "p50_act", "mean_execution", "cpu_s", "machine_s", "short")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The largest ratios, `elastic` to each other system, of the medians over the rounds."""

    mean_act: float = 1.0
    step_duration: float = 1.0

    def text(self, met: bool) -> str:
        """Say for a person whether it was met."""
        if self == Goal():
            return f"{OURS} is {'' if met else 'not '}first in both"
        return (
            f"the goal, {OURS} below {self.mean_act:g} × each other's mean ACT and below {self.step_duration:g} × its step, "
            f"is {'' if met else 'not '}met"
        )


FIRST = Goal()
CLEARLY_AHEAD = Goal(mean_act=0.75, step_duration=1.03)
"""The goal for a trace that is given: mean ACT a quarter lower, and a step that is hardly longer."""


def compare(rounds: Sequence[Sequence[Replayed]], goal: Goal = FIRST) -> dict[str, Any]:
    """Return per system the spread of each figure over the rounds, its ratio to `elastic`, and the verdict.

    `ratio` is the system's median as a multiple of that of `elastic`. `ours` is the other way round and by round: the figure of
    `elastic` as a multiple of the system's in the same round, as a spread.
    """
    by_system: dict[str, list[Replayed]] = {}
    for replayed in (each for done in rounds for each in done):
        by_system.setdefault(replayed.system, []).append(replayed)
    systems: dict[str, dict[str, Any]] = {}
    for name, runs in sorted(by_system.items(), key=lambda item: median(run.mean_act for run in item[1])):
        spreads = {key: asdict(Spread.of([float(getattr(run, key)) for run in runs])) for key in SHOWN}
        beside = {key: asdict(_ours_to(by_system[OURS], runs, key)) for key in JUDGED}
        systems[name] = {**spreads, "actions": runs[0].actions, "failed": max(run.failed for run in runs), "ours": beside}
    for found in systems.values():
        found["ratio"] = {key: found[key]["median"] / systems[OURS][key]["median"] for key in JUDGED}
    # A system that loses actions has less to do: it does not count as faster.
    sound = all(found["failed"] == 0 for found in systems.values())
    others = [found for name, found in systems.items() if name != OURS]
    met = sound and all(found["ratio"][key] * getattr(goal, key) > 1.0 for found in others for key in JUDGED)
    return {
        "systems": systems,
        "goal": {**asdict(goal), "met": met},
        "first": sound and all(found["ratio"][key] > 1.0 for found in others for key in JUDGED),
        "rounds": [[asdict(each) for each in done] for done in rounds],
    }


def _ours_to(ours: Sequence[Replayed], other: Sequence[Replayed], key: str) -> Spread:
    return Spread.of([float(getattr(one, key)) / float(getattr(beside, key)) for one, beside in zip(ours, other, strict=True)])


def text(document: dict[str, Any]) -> str:
    """Return the tables for a person: medians, for the judged figures with the range over the rounds in brackets."""
    lines = [
        f"{'':9}{'mean ACT':>21}{'× elastic':>11}{'step duration':>21}{'× elastic':>11}"
        f"{'p95 ACT':>9}{'execution':>11}{'commands CPU':>14}{'machine CPU':>13}{'cores short':>13}{'failed':>8}"
    ]
    for name, found in document["systems"].items():
        middle = {key: found[key]["median"] for key in SHOWN}
        lines.append(
            f"{name:9}{_spread(found['mean_act'], 3):>21}{found['ratio']['mean_act']:>11.2f}"
            f"{_spread(found['step_duration'], 1):>21}{found['ratio']['step_duration']:>11.2f}"
            f"{middle['p95_act']:>9.2f}{middle['mean_execution']:>11.3f}{middle['cpu_s']:>14.1f}{middle['machine_s']:>13.1f}"
            f"{middle['short']:>13.0%}{found['failed']:>8}"
        )
    for name, found in document["systems"].items():
        if name != OURS:
            act, step = (_spread(found["ours"][key], 3) for key in JUDGED)
            lines.append(f"{OURS} ÷ {name}: mean ACT {act}, step duration {step}")
    met = document["goal"]["met"]
    goal = Goal(mean_act=document["goal"]["mean_act"], step_duration=document["goal"]["step_duration"])
    lines.append(f"seconds; median (least–most) of {len(document['rounds'])} rounds; {goal.text(met)}.")
    return "\n".join(lines)


def _spread(figure: dict[str, float], digits: int) -> str:
    return Spread(**figure).text(digits)
