"""Making a scenario that breaks a law as short as possible: fewer faults, rollouts, nodes and steps that break the same law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.virtual.scenario import Scenario


def law_of(broken: str) -> str:
    """Return the law that a sentence about a breach names."""
    return broken.partition(":")[0]


def shortest(scenario: Scenario, laws: Callable[[Scenario], list[str]], most: int = 300) -> tuple[Scenario, list[str]]:
    """Return the shortest scenario found within `most` runs that breaks the same law, and what it breaks."""
    broken = laws(scenario)
    law, runs = law_of(broken[0]), 0
    found = True
    while found and runs < most:
        found = False
        for shorter in _shorter(scenario):
            runs += 1
            now = laws(shorter)
            if now and law_of(now[0]) == law:
                scenario, broken, found = shorter, now, True
                break
            if runs >= most:
                break
    return scenario, broken


def _shorter(scenario: Scenario) -> Iterator[Scenario]:
    if scenario.starved:
        yield replace(scenario, starved=0.0)
    for number in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:number] + scenario.faults[number + 1 :])
    for number in range(len(scenario.rollouts)):
        yield replace(scenario, rollouts=scenario.rollouts[:number] + scenario.rollouts[number + 1 :])
    if scenario.shards > 1:
        yield replace(scenario, shards=1)
    if len(scenario.cores) > scenario.shards:
        yield replace(scenario, cores=scenario.cores[:-1])
    if len(scenario.cells) > 1:
        yield replace(scenario, cells=scenario.cells[:-1])
    if scenario.apis > 1:
        yield replace(scenario, apis=scenario.apis - 1)
    for number, rollout in enumerate(scenario.rollouts):
        for step in range(len(rollout.steps)):
            fewer = replace(rollout, steps=rollout.steps[:step] + rollout.steps[step + 1 :])
            yield replace(scenario, rollouts=(*scenario.rollouts[:number], fewer, *scenario.rollouts[number + 1 :]))
        for step, one in enumerate(rollout.steps):
            if len(one.commands) > 1:
                fewer = replace(rollout, steps=(*rollout.steps[:step], replace(one, commands=one.commands[:1]), *rollout.steps[step + 1 :]))
                yield replace(scenario, rollouts=(*scenario.rollouts[:number], fewer, *scenario.rollouts[number + 1 :]))
