"""The embedded stack as a whole: what it starts, says, and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from app.journal.database import open_engine, require_latest
from app.local import embedded
from app.local.embedded import EmbeddedStack, Restarts, StackRunning
from app.local.processes import Command, Identity, StackError, wait_until
from tests.cli.support import leftovers

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
SLEEP = ("import time", "time.sleep(60)")
DEAF = ("import signal, subprocess", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
"""Begins a program that SIGTERM does not end."""


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Return a state folder that is not there yet."""
    return tmp_path / "state"


def python(name: str, *lines: str, **env: str) -> Command:
    """Return a command that is lines of Python."""
    return Command(name, (sys.executable, "-u", "-c", "\n".join(lines)), env)


SHOW = "print(json.dumps({name: os.environ[name] for name in os.environ if name.startswith(('TANGRAM_', 'EXTRA'))}))"


def pid_of(stack: EmbeddedStack, name: str) -> int:
    """Return the process of that name, as the stack's file has it."""
    return int(json.loads(stack.stack_file.read_text())["pids"][name])


def log_of(stack: EmbeddedStack, name: str) -> str:
    """Return what a process has printed, once there is any of it."""
    log = stack.state_dir / "logs" / f"{name}.log"
    stack.wait_ready(lambda: bool(log.read_text().strip()), 60)
    return log.read_text()


def test_a_stack_is_redis_a_migrated_database_and_processes(state_dir: Path) -> None:
    with EmbeddedStack(state_dir, [python("worker", "import os, json", SHOW, *SLEEP, EXTRA="1")]) as stack:
        # Then the process knows where all is
        assert {**stack.environment, "EXTRA": "1"}.items() <= json.loads(log_of(stack, "worker")).items()
        assert stack.broker_url == stack.result_url == f"redis+socket://{state_dir}/redis.sock?virtual_host=0"
        assert redis.Redis(unix_socket_path=str(state_dir / "redis.sock")).ping()
        engine = open_engine(stack.database_url)
        require_latest(engine)
        engine.dispose()
        assert stack.dead() == []
        # And whoever reads stack.json does, too, if it is the owner
        said = json.loads(stack.stack_file.read_text())
        assert (said["broker_url"], said["result_url"], said["database_url"]) == (stack.broker_url, stack.result_url, stack.database_url)
        assert list(said["pids"]) == ["redis", "worker"]
        assert stat.S_IMODE(stack.stack_file.stat().st_mode) == 0o600
        # And all that it has made is for its owner alone, so that nothing shows if the folder was there before and is everybody's
        assert not [path for path in (state_dir, *state_dir.iterdir()) if path.stat().st_mode & 0o077]
    # And afterwards only files for the next time are left
    assert leftovers(state_dir.parent) == []
    assert sorted(path.name for path in state_dir.iterdir()) == ["lock", "logs", "redis", "tangram.sqlite"]


def test_a_process_that_will_not_end_is_killed_with_all_its_descendants(state_dir: Path) -> None:
    # Given a process deaf to SIGTERM, with a child in its group and one in a session of its own
    children = ("subprocess.Popen(['sleep', '60'])", "subprocess.Popen(['sleep', '60'], start_new_session=True)", "print('ready')")
    with EmbeddedStack(state_dir, [python("deaf", *DEAF, *children, *SLEEP)], stop_timeout_s=0.2) as stack:
        assert log_of(stack, "deaf") and wait_until(lambda: len(leftovers(state_dir.parent)) >= 3, 60)
    assert leftovers(state_dir.parent) == []


def test_processes_get_no_time_to_tell_a_redis_that_has_ended(state_dir: Path) -> None:
    # Given a process that has much time to end, and takes it
    with EmbeddedStack(state_dir, [python("deaf", *DEAF, "print('ready')", *SLEEP)], stop_timeout_s=3600) as stack:
        assert log_of(stack, "deaf")
        os.kill(pid_of(stack, "redis"), signal.SIGKILL)
        assert wait_until(lambda: stack.dead() == ["redis"], 60)
        # Then it does not get that
        began = time.monotonic()
    assert time.monotonic() - began < 45
    assert leftovers(state_dir.parent) == []


def test_a_second_stack_in_the_same_folder_is_told_about_the_first(state_dir: Path) -> None:
    with EmbeddedStack(state_dir) as first:
        with pytest.raises(StackRunning, match=rf"already \(pid {os.getpid()}\)") as caught, EmbeddedStack(state_dir):
            pass
        assert "\n" not in str(caught.value)
        assert first.dead() == []
        assert first.stack_file.exists()
    with EmbeddedStack(state_dir) as later:
        assert later.dead() == []


def test_a_process_that_dies_while_one_waits_is_reported_with_its_last_lines(state_dir: Path) -> None:
    dying = python("dying", "print('loading')", "raise SystemExit('no such model: x')")
    with pytest.raises(StackError, match="dying ended with exit code 1") as caught, EmbeddedStack(state_dir, [dying]) as stack:
        stack.wait_ready(lambda: False, 60)
    assert str(caught.value).splitlines()[-2:] == ["loading", "no such model: x"]
    assert leftovers(state_dir.parent) == []


def test_waiting_has_an_end(state_dir: Path) -> None:
    with EmbeddedStack(state_dir) as stack:
        with pytest.raises(StackError, match=r"not ready after 0.05 s"):
            stack.wait_ready(lambda: False, 0.05)
        with pytest.raises(StackError, match=r"not ready after 0.05 s"):
            stack.supervise(threading.Event(), print, ready=lambda: False, timeout_s=0.05)


@contextmanager
def supervised(stack: EmbeddedStack) -> Iterator[list[str]]:
    """Supervise a stack beside a test; gives what is said."""
    said: list[str] = []
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(stack.supervise, stop, said.append)
        try:
            yield said
        finally:
            stop.set()
            done.result(30)


@pytest.mark.parametrize("name", ["redis", "worker"])
def test_a_process_that_dies_is_noticed_and_started_again(state_dir: Path, name: str) -> None:
    said: list[str] = []
    with EmbeddedStack(state_dir, [python("worker", *SLEEP)]) as stack:
        pid = pid_of(stack, name)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: stack.dead() == [name], 60)
        # Also while the stack starts
        stack.supervise(threading.Event(), said.append, ready=lambda: pid_of(stack, name) != pid, timeout_s=60)
        assert stack.dead() == []
    assert said == [f"{name} ended with signal SIGKILL and is started again: see {state_dir / 'logs' / name}.log"]


def test_processes_end_in_reverse_order_and_before_redis_after_restarts_too(state_dir: Path) -> None:
    # Given two processes that write down when they are asked to end, and whether Redis is still there
    lines = (
        "import os, pathlib, signal, sys, time, redis",
        "folder = pathlib.Path(os.environ['TANGRAM_STATE_DIR'])",
        "def end(*_):",
        "    alive = redis.Redis(unix_socket_path=str(folder / 'redis.sock')).ping()",
        "    print(os.environ['NAME'], alive, file=(folder / 'ends').open('a'))",
        "    sys.exit(0)",
        "signal.signal(signal.SIGTERM, end)",
        "(folder / os.environ['NAME']).touch()",
        "time.sleep(60)",
    )
    names = ("first", "second")
    with EmbeddedStack(state_dir, [python(name, *lines, NAME=name) for name in names]) as stack:
        stack.wait_ready(lambda: all((state_dir / name).exists() for name in names), 60)
        (state_dir / "first").unlink()
        os.kill(pid_of(stack, "first"), signal.SIGKILL)
        with supervised(stack):
            assert wait_until(lambda: (state_dir / "first").exists(), 60)
    assert (state_dir / "ends").read_text().splitlines() == ["second True", "first True"]


def test_a_process_that_always_dies_is_given_up_and_its_last_lines_are_said(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    dying = python("dying", "print('loading')", "raise SystemExit('no such model: x')")
    with pytest.raises(StackError) as caught, EmbeddedStack(state_dir, [python("fine", *SLEEP), dying]) as stack:
        stack.supervise(threading.Event(), said.append)
    log = state_dir / "logs" / "dying.log"
    assert str(caught.value) == f"dying ended with exit code 1 after 5 restarts within 60 s and is given up: see {log}"
    assert said[:5] == [f"dying ended with exit code 1 and is started again: see {log}"] * 5
    assert said[-2:] == ["dying: loading", "dying: no such model: x"]
    assert log.read_text().count("loading") == 6
    assert leftovers(state_dir.parent) == []


def test_a_process_that_refuses_what_it_is_given_while_a_stack_starts_is_given_up_at_once(state_dir: Path) -> None:
    said: list[str] = []
    refusing = python("refusing", "print('no such model: x')", "raise SystemExit(2)")
    with (
        pytest.raises(StackError, match="refusing ended with exit code 2 after 1 restart within 60 s and is given up"),
        EmbeddedStack(state_dir, [refusing]) as stack,
    ):
        stack.supervise(threading.Event(), said.append, ready=lambda: False, timeout_s=60)
    assert said[-1] == "refusing: no such model: x"


def test_a_stack_that_is_to_end_in_the_pause_before_a_restart_starts_nothing_again(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = threading.Event()
    monkeypatch.setattr(Restarts, "decide", lambda *_: paused.set() or "wait")
    with EmbeddedStack(state_dir, [python("dying", "print('loading')")]) as stack:
        with supervised(stack) as said:
            assert paused.wait(60)
        assert (said, stack.dead()) == ([], ["dying"])
    assert (state_dir / "logs" / "dying.log").read_text() == "loading\n"
    assert leftovers(state_dir.parent) == []


def test_pauses_grow_until_a_process_has_lived_for_a_minute() -> None:
    restarts, now = Restarts(), 1000.0
    for pause_s in (0.2, 0.4, 0.8, 1.6, 3.2):
        assert restarts.decide(now) == "wait"
        assert restarts.decide(now + 0.99 * pause_s) == "wait"
        now += pause_s
        assert restarts.decide(now) == "restart"
    assert restarts.decide(now) == "give up"
    assert restarts.decide(now + 60.0) == "wait"
    assert restarts.decide(now + 60.2) == "restart"


def test_a_program_that_is_not_there_stops_the_whole_start(state_dir: Path) -> None:
    commands = [python("fine", *SLEEP), Command("missing", ("/no/such/program",))]
    with (
        pytest.raises(StackError, match="cannot start missing: No such file or directory: /no/such/program"),
        EmbeddedStack(state_dir, commands),
    ):
        pass
    assert leftovers(state_dir.parent) == []
    assert not (state_dir / "stack.json").exists()


def lives(pid: int) -> bool:
    """Say whether a process runs; an orphaned zombie does not, however long init leaves it there."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


CRASHING = """
import os, signal, sys
from pathlib import Path
from app.local.embedded import EmbeddedStack
from app.local.processes import Command
EmbeddedStack(Path(sys.argv[1]), [Command("worker", ("sleep", "60"))]).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("name", "unknown"), [("state", {"boot", "booted_at"}), ("d" * 120, set())], ids=["of a version before", "long name"]
)
def test_what_a_crashed_stack_left_running_is_stopped_by_the_next(tmp_path: Path, name: str, unknown: set[str]) -> None:
    state_dir = tmp_path / name
    owner = subprocess.run([sys.executable, "-c", CRASHING, str(state_dir)], cwd=ROOT, timeout=200, check=False)
    assert owner.returncode == -signal.SIGKILL
    said = json.loads((state_dir / "stack.json").read_text())
    (state_dir / "stack.json").write_text(json.dumps({word: value for word, value in said.items() if word not in unknown}))
    assert all(lives(pid) for pid in said["pids"].values())
    with EmbeddedStack(state_dir) as stack:
        assert not any(lives(pid) for pid in said["pids"].values())
        assert said["socket_folder"] is None or not Path(said["socket_folder"]).exists()
        assert stack.dead() == []


@pytest.mark.parametrize("parts", [{"started_s": 1.0}, {"boot": "another"}])
def test_a_process_that_only_has_the_number_of_a_dead_one_is_spared(state_dir: Path, parts: dict[str, Any]) -> None:
    # Given a stack.json of long ago, or of before the machine was started, with a number that now is a stranger's
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        state_dir.mkdir()
        known = replace(Identity.of(stranger.pid), **parts)
        words = {"broker_url": "x", "result_url": "x", "database_url": "x", "pids": {"worker": known.pid}, "boot": known.boot}
        (state_dir / "stack.json").write_text(json.dumps({**words, "booted_at": 0.0, "started_at": {"worker": known.started_s}}))
        with EmbeddedStack(state_dir):
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_is_known_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Identity.of(os.getpid())
    booted_at = psutil.boot_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: booted_at + 3600.0)  # as /proc/stat has it then
    assert mine.find() is not None


@pytest.mark.parametrize("content", ["{", '{"pids": {"a": "b"}}'])
def test_a_stack_file_that_is_none_is_replaced(state_dir: Path, content: str) -> None:
    state_dir.mkdir()
    (state_dir / "stack.json").write_text(content)
    with EmbeddedStack(state_dir) as stack:
        assert json.loads(stack.stack_file.read_text())["broker_url"] == stack.broker_url


def test_a_state_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match="Not a directory") as caught, EmbeddedStack(tmp_path / "file" / "state"):
        pass
    assert "\n" not in str(caught.value)


FULL = """
import resource, sys
from pathlib import Path
from app.local.embedded import EmbeddedStack
from tangram.errors import TangramError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with EmbeddedStack(Path(sys.argv[1])):
        print("up")
except TangramError as error:
    print(error)
"""


@pytest.mark.parametrize("bytes_left", [0, 1, 4096, 32768])
def test_a_state_folder_without_room_is_one_clear_line_and_nothing_is_left(state_dir: Path, bytes_left: int) -> None:
    # Given that files may grow to so many bytes only: not the lock, nor the log of Redis, nor stack.json, nor the database
    outcome = subprocess.run(
        [sys.executable, "-c", FULL, str(state_dir), str(bytes_left)], cwd=ROOT, timeout=200, check=True, stdout=subprocess.PIPE, text=True
    )
    (line,) = outcome.stdout.splitlines()
    assert str(state_dir) in line
    assert line != "up"
    assert leftovers(state_dir.parent) == []
    assert not (state_dir / "stack.json").exists()
