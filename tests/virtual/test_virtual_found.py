"""Schedules that have found a defect, as short as they got. Each broke a law before the defect was mended."""

from __future__ import annotations

from typing import Any

import pytest

from tests.virtual.run import running
from tests.virtual.scenario import Fault, Scenario, scenario
from tests.virtual.trainer import Rollout, Step


def run(work_s: float, print_: int, *units: int, **more: Any) -> dict[str, Any]:
    return {"work_s": work_s, "parallel": 0.0, "exit": 0, "print": print_, "units": units, **more}


def work(work_s: float, number: int, quota: bool) -> dict[str, Any]:
    return {"work_s": work_s, "number": number, "quota": quota}


OPEN = Step(0.0, "open")

FOUND = {
    "an open whose success was stored was told as lost with its node": Scenario(
        191,
        (4, 1),
        (
            Rollout("t0", "b", 0.0, (OPEN, Step(0.0, "exec", (run(0.05, 1, 1, 2),)), Step(0.0, "exec", (run(8.0, 2, 1, 2, 4),)))),
            Rollout("t1", "a", 2.0, (OPEN, Step(3.0, "exec", (run(8.0, 3, 1, timeout_s=0.2),)), Step(3.0, "exec", (run(8.0, 4, 1, 2),)))),
            Rollout("t2", "a", 10.0, (OPEN,)),
        ),
        (Fault(3.148, "messages lost", lasts_s=20.0, amount=0.5),),
    ),
    "a client waited for ever for a result that the store had lost": Scenario(
        281,
        (1,),
        (Rollout("t1", "a", 10.0, (OPEN, Step(0.0, "exec", (run(2.0, 1, 1, 2, 4),)), Step(3.0, "exec", (run(5.0, 2, 1),)))),),
        (Fault(17.0, "cut trainer", lasts_s=20.0, amount=5.0), Fault(25.0, "broker comes back empty")),
    ),
    "a node that missed one request to close an environment kept it": Scenario(
        435,
        (2, 2),
        (Rollout("t4", "a", 10.0, (OPEN, Step(0.1, "exec", (run(0.05, 1, 1),)), Step(3.0, "exec", (run(2.0, 2, 1, 2, 4),)))),),
        (Fault(13.677, "messages lost", target=3, lasts_s=20.0, amount=5.0),),
    ),
    "a node that could not look at its claim kept a result that the scheduler had given up": Scenario(
        2554,
        (4,),
        (
            Rollout(
                "t0",
                "a",
                0.0,
                (
                    OPEN,
                    Step(1.0, "exec", (run(8.0, 1, 1, 2, 4, parallel=0.9, timeout_s=3.0),)),
                    Step(3.0, "exec", (run(0.0, 2, 1, 2, 4, timeout_s=0.2, idempotent=True),)),
                    Step(0.1, "exec", (run(8.0, 3, 1, idempotent=True),)),
                ),
            ),
        ),
        (Fault(9.747, "cut node", lasts_s=8.0, amount=5.0), Fault(10.686, "answers lost", lasts_s=20.0, amount=5.0)),
    ),
    "a close that the broker lost was not sent again": Scenario(
        4,
        (4, 2),
        (
            Rollout(
                "t0",
                "b",
                0.0,
                (OPEN, Step(0.0, "exec", (run(0.05, 0, 1),)), Step(3.0, "cancel"), Step(0.1, "work", (work(4.0, 0, False),))),
            ),
        ),
        (Fault(3.0, "messages lost", lasts_s=20.0, amount=0.3),),
    ),
    "a change of cores that the broker lost was not sent again": Scenario(
        14,
        (4,),
        (
            Rollout("t0", "a", 0.0, (OPEN, Step(0.0, "exec", (run(80.0, 1, 1, 2, 4, parallel=0.9),)))),
            Rollout("t1", "a", 2.0, (OPEN, Step(1.0, "exec", (run(20.0, 2, 1),)))),
        ),
        (Fault(2.5, "messages lost", lasts_s=1.0, amount=5.0),),
    ),
    "a node's word that it does not know an action came late and ended the action, which ran": Scenario(
        554,
        (2, 2),
        (
            Rollout("t0", "b", 10.0, (OPEN, Step(3.0, "exec", (run(2.0, 1, 1),)))),
            Rollout("t1", "b", 2.0, (OPEN, Step(3.0, "exec", (run(8.0, 2, 1, 2, parallel=0.9),)), Step(0.1, "close"))),
        ),
        (
            Fault(3.35, "freeze trainer", 2, 8.0, 0.2),
            Fault(3.513, "messages late", 3, 20.0, 5.0),
            Fault(16.779, "freeze scheduler", 4, 20.0, -20.0),
            Fault(17.279, "freeze node", 0, 8.0, 0.5),
        ),
    ),
    "a node whose report of an end was lost counted as one that takes up nothing": Scenario(
        1349,
        (4, 4),
        (
            Rollout(
                "t0",
                "b",
                10.0,
                (
                    OPEN,
                    Step(1.0, "exec", (run(200.0, 1, 1, 2, 4, parallel=0.9, cancel_s=0.0),)),
                    Step(0.0, "exec", (run(0.05, 2, 1, 2, 4, parallel=0.9, idempotent=True),)),
                    Step(1.0, "exec", (run(2.0, 3, 1, 2),)),
                    Step(
                        0.0,
                        "exec",
                        (
                            run(8.0, 4, 1, 2, 4, parallel=0.9, timeout_s=3.0, idempotent=True),
                            run(200.0, 5, 1, 2, 4, parallel=0.9, timeout_s=0.2, cancel_s=0.5),
                        ),
                    ),
                ),
                lease_s=4.0,
            ),
            Rollout("t2", "a", 2.0, (OPEN, Step(1.0, "exec", (run(0.05, 6, 1, 2, exit=137),)))),
            Rollout("t3", "a", 0.0, (Step(3.0, "exec", (run(2.0, 7, 1, parallel=0.9, timeout_s=3.0),)), Step(1.0, "file")), lease_s=15.0),
        ),
        (
            Fault(5.96, "broker away", 5, 0.2, -20.0),
            Fault(13.517, "messages lost", 5, 2.5, 5.0),
            Fault(18.775, "broker comes back empty", 3, 4.0, 0.2),
        ),
    ),
    "a client asked again before the report of an end came, whose result the store had lost": scenario(1071, memory=False),
    "a cancel came before its action, which a replaced scheduler had taken from the broker": scenario(2304, memory=False),
}


@pytest.mark.parametrize("defect", FOUND)
def test_what_was_mended_stays_so(defect: str) -> None:
    with running(FOUND[defect]) as world:
        assert world.go() == [], "\n".join(world.log)
