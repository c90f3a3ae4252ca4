"""Recording scripts with processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.replay.recorder import Outcome, RecordError, record, record_trace
from app.replay.scripts import Script, read_script
from app.replay.trace_lines import TraceError
from examples.subprocess_executor import SubprocessExecutor
from scheduler.sim.trace import Step, TraceAction, Trajectory

HEADER = "[services.rm]\ncells = 1\nmemory_mb = 10\n[quotas.q]\nrate_per_s = 1\nconcurrency = 1\n"
BUSY = "python3 -c 'import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass'"


class Scoring(SubprocessExecutor):
    """Also carries out gpu and api actions: always in a quarter of a second."""

    def outside(self, action: TraceAction) -> Outcome:
        """Take the time it takes."""
        return Outcome(execution_s=0.25)


def script(folder: Path, *steps: str, name: str = "t", header: str = HEADER) -> Script:
    (folder / "repo").mkdir(exist_ok=True)
    (folder / "repo" / "start.txt").write_text("at the start\n")
    (folder / f"{name}-services.toml").write_text(header)
    path = folder / f"{name}.toml"
    head = f'trajectory = "{name}"\nfiles = "repo"\nheader = "{name}-services.toml"\nnote = "kept"\n'
    path.write_text(head + "".join(f"[[steps]]\nthink_s = 2.0\n{step}\n" for step in steps))
    return read_script(path)


def exec_step(command: str, more: str = "") -> str:
    return f"[steps.action]\nkind = \"cpu.exec\"\ncommand = '''{command}'''\n{more}"


def executor(folder: Path) -> SubprocessExecutor:
    (folder / "work").mkdir()
    return SubprocessExecutor(folder / "work")


def recorded(folder: Path, *steps: str) -> Trajectory:
    return record(script(folder, *steps), executor(folder), folder)


def test_a_command_is_timed(tmp_path: Path) -> None:
    (action,) = recorded(tmp_path, exec_step(BUSY)).actions()
    assert action.cpu_s is not None
    assert action.observed_s is not None
    assert action.cpu_s >= 0.3
    assert action.observed_s >= 0.3
    assert action.work_s == action.observed_s, "on one unit both are the same"
    assert action.action_class == "python3"


def test_work_on_the_least_of_several_units_is_brought_to_one(tmp_path: Path) -> None:
    (action,) = recorded(tmp_path, exec_step('test "$TANGRAM_DOP" = 2', "units = [2, 4]\nefficiency = { 2 = 0.75, 4 = 0.5 }")).actions()
    assert action.observed_s is not None
    assert action.work_s == pytest.approx(1.5 * action.observed_s, abs=2e-4)


def test_commands_find_the_starting_files_and_what_was_written(tmp_path: Path) -> None:
    written = '[steps.action]\nkind = "cpu.write_file"\npath = "folder/new.txt"\ntext = "written\\n"'
    read = '[steps.action]\nkind = "cpu.read_file"\npath = "folder/new.txt"'
    trajectory = recorded(tmp_path, written, exec_step('test "$(cat start.txt folder/new.txt)" = "at the start\nwritten"'), read)
    assert [action.kind for action in trajectory.actions()] == ["cpu.write_file", "cpu.exec", "cpu.read_file"]
    assert all(action.observed_s is not None for action in trajectory.actions())


def test_the_starting_files_are_named_relative_to_the_trace(tmp_path: Path) -> None:
    trajectory = record(script(tmp_path, exec_step("true")), executor(tmp_path), tmp_path / "traces")
    assert trajectory.extra == {"files": "../repo", "note": "kept"}


def test_an_expected_failure_is_recorded_with_its_exit_code(tmp_path: Path) -> None:
    (action,) = recorded(tmp_path, exec_step("exit 3", "exit_code = 3")).actions()
    assert action.extra == {"exit_code": 3}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (exec_step("echo out; echo on the way >&2; exit 3"), r"t\.toml: steps\[1\]: cpu\.exec ended with exit code 3, not 0: on the way$"),
        (exec_step("true", "exit_code = 3"), "exit code 0, not 3"),
        ('[steps.action]\nkind = "cpu.write_file"\npath = "../../x"\ntext = ""', "outside of the environment"),
    ],
)
def test_what_goes_otherwise_than_the_script_says_is_refused_by_its_step(tmp_path: Path, step: str, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        recorded(tmp_path, exec_step("true"), step)


OUTSIDE = '[steps.action]\nkind = "gpu.score"\nservice = "rm"\nwork_s = 0.1\nitems = []'


@pytest.mark.parametrize(("carries_out", "work_s", "observed_s"), [(SubprocessExecutor, 0.1, None), (Scoring, 0.25, 0.25)])
def test_a_score_is_timed_where_it_can_be_had_and_keeps_its_estimate_elsewhere(
    tmp_path: Path, carries_out: type[SubprocessExecutor], work_s: float, observed_s: float | None
) -> None:
    (tmp_path / "work").mkdir()
    (action,) = record(script(tmp_path, OUTSIDE), carries_out(tmp_path / "work"), tmp_path).actions()
    assert (action.work_s, action.observed_s, action.cpu_s, action.extra) == (work_s, observed_s, None, {"items": []})


@contextmanager
def fresh(made: Script) -> Iterator[SubprocessExecutor]:
    folder = made.path.parent / f"work-{made.trajectory.trajectory}"
    folder.mkdir()
    yield SubprocessExecutor(folder)


def test_scripts_become_one_trace_each_in_an_environment_of_its_own(tmp_path: Path) -> None:
    more = HEADER + "[quotas.r]\nrate_per_s = 1\nconcurrency = 1\n"
    scripts = [
        script(tmp_path, exec_step("test ! -e left && touch left")),
        script(tmp_path, exec_step("test ! -e left && touch left"), name="u", header=more),
    ]
    seen: list[Step] = []
    trace = record_trace(scripts, fresh, tmp_path, seen.append)
    assert [each.trajectory for each in trace.trajectories] == ["t", "u"]
    assert (sorted(trace.services), sorted(trace.quotas), len(seen)) == (["rm"], ["q", "r"], 2)


def test_scripts_that_describe_a_service_differently_are_refused(tmp_path: Path) -> None:
    scripts = [script(tmp_path, exec_step("true")), script(tmp_path, exec_step("true"), name="u", header=HEADER.replace("= 10", "= 20"))]
    with pytest.raises(TraceError, match=r"u\.toml: services: 'rm' is described otherwise"):
        record_trace(scripts, fresh, tmp_path)


def test_scripts_of_the_same_name_are_refused(tmp_path: Path) -> None:
    made = script(tmp_path, exec_step("true"))
    with pytest.raises(TraceError, match=r"t\.toml: trajectory: another script has the name 't'"):
        record_trace([made, made], fresh, tmp_path)
