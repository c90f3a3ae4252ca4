"""The simulation itself: it is exact, it finds a planted defect, and it says how to see it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.virtual.run import broken_laws, running
from tests.virtual.scenario import Fault, Scenario, scenario
from tests.virtual.shrink import law_of, shortest
from tests.virtual.trainer import Rollout, Step
from workers.node import Node

COMMAND = {"work_s": 5.0, "parallel": 0.0, "exit": 0, "print": 7, "units": (1,)}
ROLLOUT = Rollout("t0", "a", 0.0, (Step(0.0, "open"), Step(0.1, "exec", (COMMAND,)), Step(0.0, "close")))


def story(one: Scenario) -> list[Any]:
    with running(one) as run:
        broken = run.go()
        return [
            broken,
            run.log,
            run.world.now,
            [(told.action, told.status, told.told_at) for trainer in run.trainers for told in trainer.told],
        ]


def test_a_seed_is_one_story() -> None:
    for seed in (3, 40, 85):
        assert story(scenario(seed)) == story(scenario(seed))


def test_without_a_fault_everything_succeeds() -> None:
    broken, _, _, told = story(Scenario(1, (2,), (ROLLOUT,), ()))

    assert broken == [] and [status for _, status, _ in told] == ["succeeded"] * 3


def test_a_lost_node_is_told_as_what_it_is() -> None:
    broken, _, _, told = story(Scenario(1, (2,), (ROLLOUT,), (Fault(3.0, "kill node", lasts_s=5.0),)))

    assert broken == [] and [status for _, status, _ in told] == ["succeeded", "lost", "lost"]


def test_a_scheduler_may_die_at_each_of_its_calls() -> None:
    for call in range(1, 40):
        broken, log, _, told = story(Scenario(call, (2,), (ROLLOUT,), (Fault(0.02, "kill scheduler", 0, amount=call),)))

        assert broken == [], log
        assert [status for _, status, _ in told] == ["succeeded"] * 3


def test_a_planted_defect_is_found_and_made_short() -> None:
    """Given nodes that claim nothing, when messages come twice, then a command runs twice, and a short schedule shows it."""
    faults = (Fault(0.01, "messages doubled", lasts_s=9.0, amount=0.3), Fault(0.3, "slow network", lasts_s=1.0))
    rollouts = (replace(ROLLOUT, name="t0"), replace(ROLLOUT, name="t1"))

    with patch.object(Node, "_may_claim", lambda *_: True), patch.object(Node, "_claim_in_store", lambda *_: True):
        short, why = shortest(Scenario(11, (2,), rollouts, faults), broken_laws)

    assert law_of(why[0]) == "nothing runs twice"
    assert [fault.kind for fault in short.faults] == ["messages doubled"]
    assert sum(len(rollout.steps) for rollout in short.rollouts) < 6
