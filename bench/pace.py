"""How fast this machine is beside the one on which the bundled rollouts were recorded.

One rollout is recorded once more, without thinking, as many times at once as there are cores: cores that share an
execution unit or a cache are slower together. The pace is the sum of its commands' seconds over the recorded sum, so that
the long ones, which make the load, decide; and the median over the recordings.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from app.replay.recorder import record
from app.replay.scripts import Script
from app.replay.traces import BUNDLED, read_trace
from examples.subprocess_executor import SubprocessExecutor
from scheduler.sim.trace import Trajectory


def measured_pace(cores: int) -> float:
    """Return how many times as long as recorded commands take here while `cores` of them run, after some ten seconds.

    Raises `RecordError` when a command ends otherwise than it was recorded: then its seconds say nothing.
    """
    trace = read_trace(BUNDLED)
    longest = max(trace.trajectories, key=_work_s)
    script = Script(path=BUNDLED, trajectory=longest, header=trace, files=BUNDLED.parent / str(longest.extra["files"]))
    with ProcessPoolExecutor(cores) as pool:
        again = [pool.submit(_record_again, script) for _ in range(cores)]
        return median(_work_s(each.result()) for each in again) / _work_s(longest)


def _record_again(script: Script) -> Trajectory:
    with tempfile.TemporaryDirectory(prefix="tangram-pace-") as folder:
        return record(script, SubprocessExecutor(Path(folder)), BUNDLED.parent)


def _work_s(trajectory: Trajectory) -> float:
    return sum(action.work_s for action in trajectory.actions() if action.kind == "cpu.exec")
