"""SWE-agent's `.traj` files as traces."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from app.replay.importers.swe_agent import import_swe_agent
from app.replay.trace_lines import TraceError
from app.replay.traces import read_trace_stream, write_trace

STEPS = [
    {"action": "create reproduce.py", "observation": "…", "thought": "…", "execution_time": 0.25, "state": {"open_file": "n/a"}},
    {"action": "/usr/bin/python reproduce.py\n", "observation": "…", "execution_time": 1.5},
    {"action": "", "observation": "Exit due to cost limit", "thought": "…"},
]


def traj(folder: Path, content: object, name: str = "issue-1.traj") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        import_swe_agent([path])
    said = str(caught.value)
    assert said.isprintable()
    return said.removeprefix(f"{path}: ")


def test_a_step_becomes_an_action_with_its_recorded_time(tmp_path: Path) -> None:
    trace = import_swe_agent([traj(tmp_path, {"trajectory": STEPS, "history": [], "info": {}})])
    (trajectory,) = trace.trajectories
    assert (trajectory.job, trajectory.trajectory) == ("swe-agent", "issue-1")
    found = [(each.kind, each.command, each.action_class, each.work_s, each.observed_s) for each in trajectory.actions()]
    assert found == [
        ("cpu.exec", "create reproduce.py", "create", 0.25, 0.25),
        ("cpu.exec", "/usr/bin/python reproduce.py\n", "python", 1.5, 1.5),
    ]
    assert [step.think_s for step in trajectory.steps] == [0.0, 0.0]


def test_an_import_can_be_written_and_read(tmp_path: Path) -> None:
    trace = import_swe_agent([traj(tmp_path, {"trajectory": STEPS}, "\x1b[1m" + "long" * 60 + ".traj")])
    stream = io.StringIO()
    write_trace(trace, stream)
    stream.seek(0)
    assert read_trace_stream(stream) == trace


def test_files_of_the_same_name_are_two_trajectories(tmp_path: Path) -> None:
    paths = [traj(tmp_path, {"trajectory": STEPS}, f"run-{number}/issue-1.traj") for number in (1, 2)]
    assert [each.trajectory for each in import_swe_agent(paths).trajectories] == ["issue-1", "issue-1#2"]


WRONG = {
    "": "not JSON",
    "[]": "should be an object",
    "{}": "trajectory: is missing",
    '{"trajectory": []}': "trajectory: must not be empty",
    '{"trajectory": [{"action": ""}]}': "trajectory: no step of it ran a command",
    '{"trajectory": [{"action": "", "execution_time": 1}, {"action": "ls"}]}': "trajectory[1].execution_time: is missing",
    '{"trajectory": [{"action": "ls", "execution_time": -1}]}': "trajectory[0].execution_time: should be greater",
    '{"trajectory": [{"action": "ls", "execution_time": NaN}]}': "trajectory[0].execution_time: should be a finite",
    '{"trajectory": [{"action": ["ls"], "execution_time": 1}]}': "trajectory[0].action: should be a valid string",
    '{"trajectory": [{"action": "l\\u0000", "execution_time": 1}]}': "trajectory[0].action: has characters",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_by_its_key(text: str, tmp_path: Path) -> None:
    assert refusal(traj(tmp_path, text)).startswith(WRONG[text])


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere.traj").startswith("cannot be read: no such file")
    assert refusal(tmp_path).startswith("cannot be read: is a directory")
    with pytest.raises(TraceError, match="no file to import"):
        import_swe_agent([])
