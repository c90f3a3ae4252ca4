"""Writes `examples/rollouts.jsonl` from `examples/scripts/*.toml`, without a running system.

Run it from the project's root: `python -m examples.record_locally`. Commands run as processes of this machine; the
scores and searches keep the times that their scripts estimate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.replay.recorder import record_trace
from app.replay.scripts import Script, read_script
from app.replay.traces import write_trace
from examples.subprocess_executor import SubprocessExecutor

HERE = Path(__file__).resolve().parent
TARGET = HERE / "rollouts.jsonl"


@contextmanager
def _in_fresh_folder(script: Script) -> Iterator[SubprocessExecutor]:
    with tempfile.TemporaryDirectory(prefix=f"{script.trajectory.trajectory}-") as folder:
        yield SubprocessExecutor(Path(folder))


def main() -> None:
    """Record every script."""
    scripts = [read_script(path) for path in sorted((HERE / "scripts").glob("*.toml"))]
    trace = record_trace(scripts, _in_fresh_folder, HERE)
    with TARGET.open("w", encoding="utf-8") as stream:
        write_trace(trace, stream)
    for trajectory in trace.trajectories:
        actions = list(trajectory.actions())
        print(f"{trajectory.trajectory}: {len(actions)} actions, {sum(action.work_s for action in actions):.2f} s of work")


if __name__ == "__main__":
    main()
