"""What a worker of the last release has left is read by this one. Its bytes are here, with the values of this machine in their places.

Whoever changes a format reads the one before it, too, and adds the new one here. What only the last release reads goes with the next one.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.journal.database import open_engine, sqlite_url
from app.journal.migrating import upgrade
from app.journal.writing import SqlJournal
from tests.scheduler.deployed import Deployment
from tests.workers_cpu.conftest import make
from tests.workers_cpu.support import open_one, printed, until, worker_to_be_killed
from workers.cpu.abstract import ExecRequest, Loss
from workers.cpu.handover import protocol
from workers.cpu.handover.protocol import VERSION, take_over
from workers.cpu.process.isolation import Folders
from workers.cpu.shell.run_memory import FORMAT, NAMES, RunMemory

KEEP_S = 120.0
RUNS = ExecRequest(
    action_id="a",
    session="runs",
    message="its message",
    command="echo runs; touch ~/runs; until [ -e ~/go ]; do sleep 0.02; done; echo on; (exit 5)",
)

RECORD = """\
{"spec": {"id": "e", "image": null, "memory_mb": null}, "made": {"isolation": "none", "shell": ["/bin/bash", "/usr/bin:/bin"], "limits": \
{"open_files": 4096, "file_size_mb": 16384, "processes": null}, "groups": [null, null, null], "has_users": false}, "own": {"user": null, \
"memory_mb": 8000}, "opened_at": 1795955179.5, "sessions": {}}
{"sessions": {"runs": {"control": "0123456789abcdef", "cwd": "/work"}}}"""
"""The record of an environment with a session, of release 0.1.0. More lines of sessions follow."""

STATE = """\
{"name": "0123456789abcdef", "action": "a", "message": "its message", "began": 77.5, "spent_s": 0.0, "spared": [[12, 345]], "baseline": \
[0.5, 0.0, 0.0]}"""
"""The state of a run, in format 1 and 0."""


def as_it_was(example: Any, now: Any) -> Any:
    """Return what is said now in the words of an older example."""
    return {name: as_it_was(value, now[name]) for name, value in example.items()} if isinstance(example, dict) and example else now


def older_record(text: str) -> str:
    """Return a record as it was written before."""
    example, session = map(json.loads, RECORD.splitlines())
    first, *changes = map(json.loads, text.splitlines())
    of_one = session["sessions"]["runs"]
    said = [{"sessions": {name: as_it_was(of_one, one) for name, one in change["sessions"].items()}} for change in changes]
    return "\n".join(map(json.dumps, [as_it_was(example, first), *said]))


def format_0(file: int, state: str, figures: bytes) -> None:
    """Write the state of a run as before 0.1.0: the length, figures at 64, the report at 128, the state at 512."""
    os.pwrite(file, struct.pack("<I", len(state)).ljust(64, b"\0") + figures.ljust(448, b"\0") + state.encode(), 0)


def format_1(file: int, state: str, figures: bytes) -> None:
    """Write the state of a run as 0.1.0: the length, the place, and the format."""
    os.pwrite(file, struct.pack("<3I", len(state), 60_000, 1).ljust(64, b"\0") + figures.ljust(448, b"\0"), 0)
    os.pwrite(file, state.encode(), 60_000)


def unknown(file: int, state: str, figures: bytes) -> None:
    """Write it in a format of a later release."""
    os.pwrite(file, struct.pack("<3I", 1, 1, FORMAT + 1), 0)


def nonsense(file: int, state: str, figures: bytes) -> None:
    """Write no state at all."""
    os.pwrite(file, struct.pack("<3I", 9, 512, FORMAT), 0)


def memory_files() -> int:
    """Return how many files in memory this process has open."""
    return sum(os.path.realpath(f"/proc/self/fd/{descriptor}").startswith("/memfd:") for descriptor in os.listdir("/proc/self/fd"))


Write = Callable[[int, str, bytes], None]


def left_by_another_release(base: Path, write: Write) -> None:
    """Have a worker be killed that runs a command, and rewrite what it left: the record, and the state of the run."""
    folders = Folders(f"{base}/environments/e")
    with worker_to_be_killed(base, ("e", "main", "kept=1"), side_by_side=[RUNS], keep_s=KEEP_S, isolation="none") as worker:
        assert until(Path(folders.work, "runs").exists)
        worker.kill()
    record = Path(folders.record)
    record.write_text(older_record(record.read_text()))
    kept = take_over(base, KEEP_S, print)
    assert kept is not None
    for control in {end.control for end in kept.ends if end.name == NAMES[0]}:
        memory = RunMemory({end.name: end.fileno() for end in kept.ends if end.control == control and end.name in NAMES})
        if (left := memory.left()) is not None:
            written = json.dumps(as_it_was(json.loads(STATE), left))
            write(memory.descriptors[NAMES[0]], written, struct.pack("<5d", *left["figures"]))
    for end in kept.ends:
        end.close()
    os.close(kept.lock)
    kept.channel.close()


@pytest.mark.parametrize("write", [format_0, format_1])
def test_a_command_and_its_environment_go_on_that_the_last_release_has_left(tmp_path: Path, write: Write) -> None:
    left_by_another_release(tmp_path, write)
    with closing(make(tmp_path, "none", keep_s=KEEP_S)) as box:
        env = box.get("e")
        assert box.left_messages == [RUNS.message]
        execution = env.start(RUNS)
        env.write_file("go", b"")
        outcome = execution.wait()
        assert (outcome.exit_code, outcome.stdout) == (5, b"runs\non\n")
        assert printed(env, "echo $kept") == "1\n"


@pytest.mark.parametrize(("write", "told"), [(unknown, f"has format {FORMAT + 1}"), (nonsense, "Expecting value")])
def test_a_worker_starts_and_says_so_where_it_cannot_read_what_was_left(
    tmp_path: Path, write: Write, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    left_by_another_release(tmp_path, write)
    before = memory_files()
    with closing(make(tmp_path, "none", keep_s=KEEP_S)) as box:
        assert memory_files() == before
        assert not box.environments() and told in caplog.text and [loss.environment for loss in box.losses()] == ["e"]
        assert printed(open_one(box, "e"), "echo works") == "works\n"


def test_a_worker_says_which_version_it_cannot_adopt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with worker_to_be_killed(tmp_path, ("e", "main", "kept=1"), keep_s=KEEP_S, isolation="none") as worker:
        assert worker.is_idle()
        worker.kill()
    # Given a next release, which speaks another version
    monkeypatch.setattr(protocol, "VERSION", VERSION + 1)
    with closing(make(tmp_path, "none", keep_s=KEEP_S)) as box:
        reason = f"what the worker before this one has left was kept in version {VERSION}, and this release adopts {VERSION + 1}"
        assert not box.environments() and reason in caplog.text and box.losses() == (Loss("e", reason),)


def test_a_scheduler_goes_on_with_the_journal_and_the_messages_of_the_last_release(tmp_path: Path) -> None:
    # Given the journal of a scheduler of the last release, and what its trainer and worker sent before the next one begins
    left = json.loads((Path(__file__).parent / "left.json").read_text())
    runs, parked, sent = (left["ids"][name] for name in ("runs", "parked", "sent"))
    with closing(sqlite3.connect(tmp_path / "journal")) as journal:
        journal.executescript("\n".join(left["journal"]))
    upgrade(url := sqlite_url(tmp_path / "journal"))
    with SqlJournal(open_engine(url)) as written:
        one = Deployment(written, left["now"])
        # When the next one begins; then it has the environment, and the command that runs there has its core
        one.start("elastic")
        (environment,) = one.core.state.environments.values()
        assert (environment.id, environment.node, environment.memory_mb) == (left["ids"]["environment"], "node", 100)
        assert one.running == [runs] and one.waiting == [parked]
        # And takes the messages: the command has ended, the others begin
        for queue, messages in left["queues"].items():
            for message in messages:
                one.broker.put(queue, json.dumps(message).encode())
        one.service.step()
        assert one.ends() == {runs: ("succeeded", True)} and sorted(one.running) == [parked, sent]
        assert sorted(one.broker.grants("node")) == [(parked, 1), (sent, 1)]
