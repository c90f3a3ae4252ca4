"""How many machines the last hour would have needed: `python -m app.planning.last_hour`, which the live page runs.

It reads the journal of `TANGRAM_DATABASE_URL` and prints one JSON document: the answer, or `problem` in one line. Who runs it bounds its
time. The answer is the fewest machines with which the mean ACT is at most `WITHIN` above that on machines for all actions at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final

from app.journal.database import open_latest
from app.journal.figures import Selection
from app.journal.history import declarations
from app.planning.cases import with_limits
from app.planning.document import plan_document
from app.planning.planner import Planner, most_units
from app.planning.pool import Simulations
from app.planning.request import Request
from app.replay.export import export
from app.replay.replay_command import ReplayOptions
from tangram.errors import TangramError

HOUR_S: Final = 3600
WITHIN: Final = 0.1
LEAST_ACTIONS: Final = 20
"""Fewer actions say nothing of a load."""

_KEYS: Final = ("cores", "gpus", "memory_mb", "mean_act")


def plan_last_hour(database_url: str, now: float) -> dict[str, Any]:
    """Return the answer for what was submitted in the hour before `now`. Raises `TangramError` where there is none."""
    engine = open_latest(database_url)
    found = declarations(engine, Selection(since=now - HOUR_S, until=now))
    engine.dispose()
    if len(found.actions) < LEAST_ACTIONS:
        raise TangramError(f"{len(found.actions)} actions in the last hour say nothing of its load: {LEAST_ACTIONS} do")
    exported = export(found, {})
    trace = with_limits(exported.trace)
    labels = tuple(dict.fromkeys(label for action in trace.actions() for label in action.requires))
    than_cores = most_units(trace, "cpu.", "elastic")
    base = ReplayOptions(labels=labels)
    request = Request(base=base, no_worse_than="elastic", than_cores=than_cores, within=WITHIN, extras=False)
    with Simulations(trace, 1) as simulations:
        document = plan_document(Planner(request, simulations).plan(), trace, simulations.done)
    of_load = {"actions": sum(1 for _ in trace.actions()), "trajectories": len(trace.trajectories), "notes": exported.notes}
    return {**{key: document[key] for key in _KEYS}, **of_load, "at": now}


if __name__ == "__main__":
    os.nice(10)
    try:
        answer = plan_last_hour(os.environ["TANGRAM_DATABASE_URL"], time.time())
    except TangramError as error:
        answer = {"problem": str(error)}
    json.dump(answer, sys.stdout)
