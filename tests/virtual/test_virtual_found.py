"""Schedules that have found a defect, as short as they got. Each broke a law before the defect was mended.

What a test of the scheduler or a node alone holds, too, has no schedule here: other draws may lead it past the defect at any time.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.virtual.run import running
from tests.virtual.scenario import Fault, Scenario
from tests.virtual.trainer import Rollout, Step


def run(work_s: float, print_: int, *units: int, **more: Any) -> dict[str, Any]:
    return {"work_s": work_s, "parallel": 0.0, "exit": 0, "print": print_, "units": units, **more}


OPEN = Step(0.0, "open")

FOUND = {
    "a client waited for ever for a result that the store had lost": Scenario(
        281,
        (1,),
        (Rollout("t1", "a", 10.0, (OPEN, Step(0.0, "exec", (run(2.0, 1, 1, 2, 4),)), Step(3.0, "exec", (run(5.0, 2, 1),)))),),
        (Fault(17.0, "cut trainer", lasts_s=20.0, amount=5.0), Fault(25.0, "broker comes back empty")),
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
    "a change of cores that the broker lost was not sent again": Scenario(
        14,
        (4,),
        (
            Rollout("t0", "a", 0.0, (OPEN, Step(0.0, "exec", (run(80.0, 1, 1, 2, 4, parallel=0.9),)))),
            Rollout("t1", "a", 2.0, (OPEN, Step(1.0, "exec", (run(20.0, 2, 1),)))),
        ),
        (Fault(2.5, "messages lost", lasts_s=1.0, amount=5.0),),
    ),
}


@pytest.mark.parametrize("defect", FOUND)
def test_what_was_mended_stays_so(defect: str) -> None:
    with running(FOUND[defect]) as world:
        assert world.go() == [], "\n".join(world.log)
