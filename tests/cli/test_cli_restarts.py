"""A stack whose processes are killed under the commands of a client: `tangram up` starts them again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from celery import Celery

from app.local.kept_environments import end_kept
from app.local.processes import wait_until
from tangram import ActionCancelled, ActionLost, Client, Environment, Handle, Settings
from tangram.wire import EVENTS_QUEUE
from tests.cli.forked import environment, forked
from tests.cli.support import leftovers, started
from tests.conftest import RedisServer
from tests.freezing import freeze
from tests.live.support import SERVICES, SLOW_BEATS
from tests.ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RESULT_S = 60.0
LARGE = 300_000
"""Bytes that travel beside the messages, in the result store."""


class Up:
    """`tangram up` in a folder, and a look at its processes and its journal."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.state = folder / "state"

    def pid(self, name: str) -> int:
        return int(json.loads((self.state / "stack.json").read_text())["pids"][name])

    def kill(self, name: str) -> int:
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextmanager
    def away(self, name: str) -> Iterator[None]:
        """Kill a process, which is started again after the block."""
        freeze(self.process.pid)
        before = self.kill(name)
        yield
        self.process.send_signal(signal.SIGCONT)
        self.until_restarted(name, before)
        assert f"{name} ended with signal SIGKILL and is started again" in self.said()

    def until_restarted(self, name: str, before: int) -> None:
        assert wait_until(lambda: self.pid(name) != before, RESULT_S)

    def terminate(self, name: str) -> int:
        pid = self.pid(name)
        os.kill(pid, signal.SIGTERM)
        return pid

    def until_found(self, query: str, *values: str) -> None:
        def found() -> bool:
            with closing(sqlite3.connect(f"file:{self.state / 'tangram.sqlite'}?mode=ro", uri=True)) as connection:
                return bool(connection.execute(query, values).fetchall())

        assert wait_until(found, RESULT_S)

    def until_node_is(self, name: str, state: str) -> None:
        self.until_found("select 1 from nodes where name = ? and state = ?", name, state)

    def until_running(self, handle: Handle[object]) -> None:
        self.until_found("select 1 from actions where id = ? and status = 'running'", handle.id)

    def client(self, **settings: float) -> Client:
        return Client(job="restarts", settings=Settings(state_dir=self.state, broker_url=None, result_url=None, **settings))

    def work(self, environment: str) -> Path:
        """Return the folder in which the commands of an environment begin."""
        return self.state / "environments" / "cpu-0" / "environments" / environment / "work"

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Run `tangram up`."""
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "services.toml").write_text(SERVICES)
    with started(folder, "up", "--cores", "4", **SLOW_BEATS, TANGRAM_HAND_OVER_S="600") as process:
        running = Up(folder, process)
        line = running.said()
        assert line.startswith("the stack is up"), line
        yield running


@pytest.mark.parametrize("name", ["redis", "scheduler"])
def test_a_client_does_not_notice_that_redis_or_the_scheduler_is_killed(up: Up, name: str) -> None:
    large, log = os.urandom(LARGE), up.state / "logs" / "cpu-0.log"
    with up.client(connect_timeout_s=RESULT_S) as client, client.open(trajectory="t", queue_timeout_s=RESULT_S) as env:
        # Given a command that runs, and prints what travels beside the messages, and others that wait for it
        work = up.work(env.id)
        runs = env.submit(f"touch begun; until [ -e go ]; do sleep 0.02; done; head -c {LARGE} /dev/zero | tr '\\0' x; touch ended")
        queued = [env.submit(f"echo queued-{number} >> marks") for number in range(20)]
        assert wait_until((work / "begun").exists, RESULT_S)
        logged = log.stat().st_size
        with ThreadPoolExecutor(1) as threads:
            # When a process is killed, and away until the command has ended and its worker has found nobody to tell
            with up.away(name):
                late = [env.submit(f"echo late-{number} >> marks", session="late") for number in range(20)]
                written = threads.submit(env.write_file, "written", large)
                (work / "go").touch()
                assert wait_until((work / "ended").exists, RESULT_S)
                assert name != "redis" or wait_until(lambda: b"reports cannot be sent yet" in log.read_bytes()[logged:], RESULT_S)
            written.result(RESULT_S)
        # Then everything runs once, and a client that comes afterwards finds the stack
        assert runs.result(RESULT_S).stdout == "x" * LARGE and env.read_file("written") == large
        assert all(handle.result(RESULT_S).exit_code == 0 for handle in [*queued, *late])
        marks = env.read_file("marks").decode().split()
        assert sorted(marks) == sorted(f"{word}-{number}" for word in ("queued", "late") for number in range(20))
        with up.client() as other, other.open(trajectory="other", queue_timeout_s=RESULT_S) as second:
            assert second.exec("echo fine").stdout == "fine\n"


STATE = "kept=1; cd /tmp; sleep 1000 & echo $! > ~/pid"
LOOK = "kill -0 $(cat ~/pid) && echo $PWD $kept"
"""What a shell remembers and a server, and what shows that both are there."""

WAITS = "touch ~/begun; until [ -e ~/go ]; do sleep 0.05; done; echo waited >> ~/marks"


def with_state(client: Client, trajectory: str) -> list[Environment]:
    """Open three environments with what a shell remembers and a server."""
    opened = [client.open(trajectory=f"{trajectory}-{number}", queue_timeout_s=RESULT_S) for number in range(3)]
    for env in opened:
        env.exec(STATE)
    return opened


def test_environments_and_what_runs_in_them_outlive_their_worker(up: Up) -> None:
    with up.client() as client:
        opened = with_state(client, "killed")
        works = [up.work(env.id) for env in opened]
        runs = [env.submit(WAITS, session="runs") for env in opened]
        assert wait_until(lambda: all((work / "begun").exists() for work in works), RESULT_S)
        # When the worker is killed, and one of the commands ends while it is away, and others are asked for
        with up.away("cpu-0"):
            asked = [env.submit(f"{LOOK}; echo asked >> ~/marks") for env in opened]
            (works[0] / "go").touch()
        # Then each has its result and has run once, can be cancelled, and finds its environment as it was
        assert [handle.result(RESULT_S).stdout for handle in asked] == ["/tmp 1\n"] * 3
        (works[1] / "go").touch()
        assert [handle.result(RESULT_S).exit_code for handle in runs[:2]] == [0, 0]
        runs[2].cancel()
        with pytest.raises(ActionCancelled):
            runs[2].result(RESULT_S)
        marks = [sorted((work / "marks").read_text().split()) for work in works]
        assert marks == [["asked", "waited"], ["asked", "waited"], ["asked"]]


def test_a_worker_that_is_replaced_loses_nothing(up: Up) -> None:
    with up.client() as client, ThreadPoolExecutor() as threads:
        # Given environments, in one of which a command waits, and in one of which one does not end
        opened = with_state(client, "replaced")
        waits, runs_on = opened[0].submit(WAITS), opened[1].submit("touch ~/begun; sleep 1000", session="long")
        assert wait_until(lambda: all((up.work(env.id) / "begun").exists() for env in opened[:2]), RESULT_S)
        # When its worker is asked to end, in the middle of an open, of a write, and of commands that follow one another
        large = os.urandom(LARGE)
        opening = threads.submit(client.open, trajectory="late", queue_timeout_s=RESULT_S)
        writing = threads.submit(opened[0].write_file, "large", large)
        many = [opened[2].submit(f"echo {number} >> ~/marks") for number in range(30)]
        before = up.terminate("cpu-0")
        up.until_node_is("cpu-0", "silent")
        late = [env.submit(f"{LOOK} >> ~/marks") for env in opened]
        # Then what had begun ends by its result while the worker waits for it
        (up.work(opened[0].id) / "go").touch()
        assert waits.result(RESULT_S).exit_code == 0 and up.pid("cpu-0") == before
        # And when it waits no longer for the last one, the next one goes on, and each command has run once
        up.until_found("select 1 where (select count(*) from actions where status = 'running') = 1")
        up.terminate("cpu-0")
        up.until_restarted("cpu-0", before)
        assert "cpu-0 ended with exit code 0" in up.said()
        assert all(handle.result(RESULT_S).exit_code == 0 for handle in [*many, *late])
        first = (["waited"], [], [str(number) for number in range(30)])
        assert [env.read_file("marks").decode().splitlines() for env in opened] == [[*words, "/tmp 1"] for words in first]
        writing.result(RESULT_S)
        assert opened[0].read_file("large") == large
        assert opening.result(RESULT_S).exec("echo fine").stdout == "fine\n"
        runs_on.cancel()
        with pytest.raises(ActionCancelled):
            runs_on.result(RESULT_S)


def test_a_worker_that_celery_shuts_down_hands_over(up: Up) -> None:
    broker_url = json.loads((up.state / "stack.json").read_text())["broker_url"]
    with up.client() as client, Celery(broker=broker_url, set_as_current=False) as operator:
        env = client.open(trajectory="shut down", queue_timeout_s=RESULT_S)
        env.exec(STATE)
        waits, before = env.submit(WAITS), up.pid("cpu-0")
        assert wait_until((up.work(env.id) / "begun").exists, RESULT_S)
        operator.control.shutdown([f"cpu-0@{socket.gethostname()}"])
        up.until_node_is("cpu-0", "silent")
        (up.work(env.id) / "go").touch()
        assert waits.result(RESULT_S).exit_code == 0
        up.until_restarted("cpu-0", before)
        assert "cpu-0 ended with exit code 0" in up.said()
        assert env.exec(LOOK).stdout == "/tmp 1\n"


def test_a_worker_without_environments_leaves_and_one_that_is_interrupted_closes_its_own(up: Up) -> None:
    log = up.state / "logs" / "scheduler.log"
    for signals in ([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]):
        up.until_found("select 1 where not exists (select 1 from environments where state not in ('closed', 'lost'))")
        with up.client() as client:
            logged = log.stat().st_size
            if len(signals) > 1:
                # Given a worker that waits for a command before it hands over
                env = client.open(trajectory="interrupted", queue_timeout_s=RESULT_S)
                runs = env.submit("sleep 1000")
                up.until_running(runs)
            before = up.pid("cpu-0")
            os.kill(before, signals[0])
            if len(signals) > 1:
                up.until_node_is("cpu-0", "silent")
                os.kill(before, signals[1])
                with pytest.raises(ActionLost):
                    runs.result(RESULT_S)
            up.until_restarted("cpu-0", before)
            assert f"cpu-0 ended with exit code {len(signals) - 1}" in up.said()
            # The scheduler may hear that the node has left only after the next worker has begun.
            assert wait_until(lambda since=logged: b"node cpu-0 is left" in log.read_bytes()[since:], RESULT_S)
            up.until_node_is("cpu-0", "up")
            assert wait_until(lambda: not list((up.state / "environments" / "cpu-0" / "environments").iterdir()), RESULT_S)


def test_a_worker_whose_terminal_is_closed_keeps_its_environments_for_the_next_one(tmp_path: Path, redis_urls: RedisServer) -> None:
    # Given a worker in a terminal, that serves
    urls = {"TANGRAM_BROKER_URL": redis_urls.broker, "TANGRAM_RESULT_URL": redis_urls.result}
    master, terminal = os.openpty()
    words = ["env", "--default-signal=HUP", sys.executable, "-m", "tangram", "worker", "cpu"]
    worker = subprocess.Popen(words, env={**environment(tmp_path), **urls}, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        with redis_urls.client() as store:
            assert wait_until(lambda: store.llen(EVENTS_QUEUE) > 0, RESULT_S)
        # When the terminal is closed; then it ends as by kill -9, which closes nothing
        worker.send_signal(signal.SIGHUP)
        assert worker.wait(RESULT_S) == -signal.SIGHUP
    finally:
        worker.kill()
        worker.wait()
        os.close(master)
        end_kept(tmp_path / "state")


def test_a_killed_stack_leaves_its_port_to_the_next_and_one_whose_terminal_is_closed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "services.toml").write_text("[quotas.search]\nrate_per_s = 10\n")
    port = {"TANGRAM_WEB_PORT": str(free_port())}
    with started(tmp_path, "up", "--cores", "1", **port) as first:
        assert first.stderr is not None and first.stderr.readline().startswith("the stack is up")
        # Given a stack that runs; when another one is started there; then that is what is said
        second = forked("up", cwd=tmp_path, **port)
        assert (second.returncode, "a stack runs in" in second.stderr) == (2, True), second.stderr
        # Given that it was killed, and has left its processes; when it is started again; then it takes their place
        first.kill()
        first.wait()
        with started(tmp_path, "up", "--cores", "1", **port) as again:
            assert again.stderr is not None
            assert any(line.startswith("the stack is up") for line in again.stderr)
            # When its terminal is closed; then it ends as by Ctrl-C
            again.send_signal(signal.SIGHUP)
            assert again.wait(200) == 0
    assert wait_until(lambda: not leftovers(tmp_path), RESULT_S), leftovers(tmp_path)
