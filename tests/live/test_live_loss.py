"""Nothing lost, nothing twice: processes are killed, stopped and started again in the middle of work."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from celery import Celery

from app.local.stack import StackPlan
from scheduler.model.lifecycle import MISSED_BEATS
from tangram import Action, ActionCancelled, ActionFailed, ActionLost, Cost, EnvironmentLost
from tangram.connection import open_store
from tangram.wire import (
    BLOB_KEY_PREFIX,
    BLOB_THRESHOLD_BYTES,
    BLOB_TTL_S,
    CLAIM_KEY_PREFIX,
    CLAIM_TTL_S,
    GRANT_HEADER,
    INGRESS_QUEUE,
    node_queue,
)
from tests.freezing import freeze
from tests.live.support import FAST_BEATS, INCLUDE, Live, running
from tests.workers_cpu.support import RUN

GRANT = {
    "units": 1,
    "core_ids": [0],
    "background": False,
    "cell_ids": [],
    "evict": [],
    "restore": False,
    "submitted_at": 0.0,
    "received_at": 0.0,
    "granted_at": 0.0,
}
"""What the header of a grant has beside node, attempt and epoch."""


def mark(path: Path, word: str, until: Path | None = None, **fields: object) -> Action:
    """Return an action without an environment that adds a line to a file, and waits for another."""
    arguments = {"path": str(path), "word": word, "until": str(until or "")}
    return Action(kind="live.mark", cost=Cost.of(cores=1), **{"idempotent": True, **fields}).with_arguments(**arguments)  # type: ignore[arg-type]


def words(path: Path) -> Counter[str]:
    """Count the words that were marked."""
    return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()


def runs(marker: str) -> bool:
    """Return whether a process of the host has `marker` in its command line: ids inside of an environment are its own."""
    return any(marker in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def publish(live: Live, action_id: str, path: Path) -> None:
    """Send an ordinary Celery message under a chosen id."""
    with Celery(broker=live.stack.broker_url, set_as_current=False) as app:
        header = {"kind": "live.mark", "cost": {"cores": [1]}}
        app.send_task("live.mark", (str(path), "word"), task_id=action_id, queue=INGRESS_QUEUE, headers={"tangram": header})


@pytest.fixture(scope="module")
def impatient_stack(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack of `impatient`."""
    plan = StackPlan(cores=4, memory_mb=4096, api_nodes=0, include=INCLUDE, variables=FAST_BEATS)
    with running(tmp_path_factory.mktemp("impatient"), plan) as started:
        yield started


@pytest.fixture
def impatient(impatient_stack: Live) -> Live:
    """Return a stack as `repaired` is one, which soon gives up a silent worker."""
    impatient_stack.repair()
    return impatient_stack


def test_a_message_that_comes_twice_runs_once(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "marks"
    # When the same message comes twice at once, and once more after its end
    publish(live, "twice", path)
    publish(live, "twice", path)
    live.until(lambda: live.rows("select status from actions where id = 'twice'") == [("succeeded",)])
    publish(live, "twice", path)
    with live.client() as client:
        client.submit(mark(path, "later")).result(60)
    # Then
    assert words(path) == {"word": 1, "later": 1}


def test_a_grant_that_comes_twice_is_dropped(live: Live, tmp_path: Path) -> None:
    # Given a running action
    path, go = tmp_path / "marks", tmp_path / "go"
    with live.client() as client:
        handle = client.submit(mark(path, "word", go))
        live.until(lambda: words(path))
        attempt, epoch, node = live.rows(
            "select g.attempt, l.epoch, g.node from grants g, leases l where g.action = '" + handle.id + "' and l.name = 'scheduler'"
        )[0]
        # When its message comes to the node again
        grant = {**GRANT, "node": node, "attempt": attempt, "epoch": epoch}
        with Celery(broker=live.stack.broker_url, set_as_current=False) as app:
            app.conf.task_create_missing_queues = True
            app.send_task("live.mark", (str(path), "word"), task_id=handle.id, queue=node_queue(node), headers={GRANT_HEADER: grant})
        # Then it is not run again, and the running one is not taken for ended
        assert client.submit(mark(path, "other")).result(60) == "other"
        assert live.rows(f"select status from actions where id = '{handle.id}'") == [("running",)]
        go.touch()
        assert handle.result(60) == "word"
    assert words(path) == {"word": 1, "other": 1}


def test_a_claim_outlives_the_timeout_of_its_action(live: Live, tmp_path: Path) -> None:
    # Given an action that may run for longer than claims are kept beyond that
    path, go, timeout_s = tmp_path / "marks", tmp_path / "go", 3.0 * CLAIM_TTL_S
    with live.client() as client, open_store(str(live.settings.result_url), 5.0) as store:
        handle = client.submit(mark(path, "word", go, timeout_s=timeout_s))
        # When it runs
        live.until(lambda: words(path))
        # Then its claim is kept until after its timeout
        assert store.ttl(f"{CLAIM_KEY_PREFIX}{handle.id}:1") > timeout_s + CLAIM_TTL_S / 2
        go.touch()
        assert handle.result(60) == "word"


def test_grants_of_a_scheduler_that_was_replaced_are_refused(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "marks"
    grant = {**GRANT, "node": "cpu-0", "attempt": 1, "epoch": 0}
    with live.client() as client, Celery(broker=live.stack.broker_url, set_as_current=False) as app:
        client.submit(mark(path, "first")).result(60)
        app.send_task("live.mark", (str(path), "old"), task_id="old-epoch", queue=node_queue("cpu-0"), headers={GRANT_HEADER: grant})
        client.submit(mark(path, "last")).result(60)
    # The two run in threads of their own, and either may come first.
    live.until(lambda: "grant of action old-epoch is out of date" in live.log("cpu-0"))
    assert words(path) == {"first": 1, "last": 1}


def test_a_scheduler_killed_in_the_middle_loses_and_repeats_nothing(repaired: Live) -> None:
    # Given 200 commands in 4 environments
    live, count = repaired, 200
    with live.client("middle") as client:
        environments = [client.open(trajectory=f"t{n}") for n in range(4)]
        killed = threading.Event()

        def submit() -> list[object]:
            handles = []
            for n in range(count):
                handles.append(environments[n % 4].submit(f"echo w{n} 0 >> $HOME/marks", session=f"s{n % 8}"))
                if n == count // 2:
                    # When the scheduler is killed while they come in
                    live.process("scheduler").kill()
                    killed.set()
            return handles

        handles = submit()
        live.until(lambda: "scheduler" in live.stack.dead())
        live.stack.restart("scheduler")
        # Then all end, and each has run once
        results = [handle.result(60) for handle in handles]  # type: ignore[attr-defined]
        assert all(result.exit_code == 0 for result in results)
        marks = b"".join(env.read_file("marks") for env in environments).decode().splitlines()
        for env in environments:
            env.close()
    assert Counter(marks) == {f"w{n} 0": 1 for n in range(count)}
    # Trainers learn of ends a moment before the journal.
    live.until(lambda: live.rows("select count(*) from actions where job = 'middle' and ended_at is null") == [(0,)])
    done = "select count(*) from actions where job = 'middle' and kind = 'cpu.exec' and status = 'succeeded'"
    assert live.rows(done) == [(count,)]


def test_large_arguments_outlive_a_scheduler(repaired: Live) -> None:
    # Given a large command that waits for its session, and whose text beside its message would soon be gone
    live = repaired
    store = open_store(str(live.settings.result_url), 5.0)
    with live.client() as client, client.open(trajectory="t") as env:
        before = set(store.keys(f"{BLOB_KEY_PREFIX}*"))
        holds = env.submit("while [ ! -e go ]; do sleep 0.05; done")
        large = env.submit(f"echo done #{'x' * 2 * BLOB_THRESHOLD_BYTES}")
        live.until(lambda: set(store.keys(f"{BLOB_KEY_PREFIX}*")) - before and large.id in str(live.rows("SELECT id FROM actions")))
        (key,) = set(store.keys(f"{BLOB_KEY_PREFIX}*")) - before
        store.expire(key, 300)
        # When another scheduler takes over
        live.replace_scheduler()
        # Then it keeps the text, and the command runs when its turn comes
        live.until(lambda: store.ttl(key) > BLOB_TTL_S / 2)
        env.write_file("go", b"")
        assert (holds.result(60).exit_code, large.result(60).stdout) == (0, "done\n")
    store.connection_pool.disconnect()


def test_a_killed_worker_loses_environments_and_repeats_what_may_be_repeated(impatient: Live, tmp_path: Path) -> None:
    # Given a node with a command in an environment, one that may be repeated, and one that may not
    live = impatient
    path, go = tmp_path / "marks", tmp_path / "go"
    with live.client() as client:
        env = client.open(trajectory="t")
        command = env.submit(f"sleep 319.46875{RUN} & wait", idempotent=True)
        behind = env.submit("echo")
        live.until(lambda: runs(f"319.46875{RUN}"))
        again = client.submit(mark(path, "again", go))
        never = client.submit(mark(path, "never", go, idempotent=False))
        live.until(lambda: words(path) == {"again": 1, "never": 1})
        # When it is killed
        live.process("cpu-0").kill()
        # Then what may not be repeated is lost at once, with a reason, and so is all that ran and waited in its environment
        with pytest.raises(ActionLost, match="node cpu-0 was lost") as caught:
            never.result(60)
        assert type(caught.value) is ActionLost
        for handle in (command, behind):
            with pytest.raises(EnvironmentLost, match="node cpu-0 was lost: 3 beats missed") as lost:
                handle.result(60)
            assert lost.value.node == "cpu-0"
        # And whoever names the environment later is told the same, by the next scheduler, too
        for _ in range(2):
            with pytest.raises(EnvironmentLost, match=f"environment {env.id} is lost: node cpu-0 was lost: 3 beats missed"):
                env.exec("echo")
            live.replace_scheduler()
        # And its processes have not outlived it
        live.until(lambda: not runs(f"319.46875{RUN}"))
        # And the rest runs when the node returns, as its second try
        live.stack.restart("cpu-0")
        live.until(lambda: words(path) == {"again": 2, "never": 1})
        go.touch()
        assert again.result(60) == "again"
        live.until(lambda: live.rows(f"select attempts, status from actions where id = '{again.id}'") == [(2, "succeeded")])
        assert client.open(trajectory="next").exec("echo fine").stdout == "fine\n"
    assert not list((live.stack.state_dir / "environments" / "cpu-0" / "environments").glob(env.id))


def test_what_a_killed_worker_left_in_its_queue_is_not_run_after_it_was_lost(repaired: Live, tmp_path: Path) -> None:
    # Given actions that wait at a worker that stands still; it has asked for one message already, the others stay in the queue
    live = repaired
    path = tmp_path / "marks"
    with live.client() as client:
        worker = live.process("cpu-0")
        freeze(worker.pid)
        handles = [client.submit(mark(path, f"w{number}", idempotent=False)) for number in range(4)]
        live.until(lambda: live.rows("select count(*) from actions where status = 'running'") == [(4,)])
        # When it is killed and started again, before it has missed a beat
        worker.kill()
        live.until(lambda: "cpu-0" in live.stack.dead())
        live.stack.restart("cpu-0")
        for handle in handles:
            with pytest.raises(ActionLost, match="its worker was restarted"):
                handle.result(60)
        # Then what trainers know as lost has not run, nor will it
        assert client.submit(mark(path, "later")).result(60) == "later"
        assert words(path) == {"later": 1}


def test_a_frozen_worker_is_lost_and_what_it_says_later_does_not_count(impatient: Live, tmp_path: Path) -> None:
    live = impatient
    path, go = tmp_path / "marks", tmp_path / "go"
    with live.client() as client:
        env = client.open(trajectory="t")
        command = env.submit(f"sleep 319.484375{RUN}")
        live.until(lambda: runs(f"319.484375{RUN}"))
        never = client.submit(mark(path, "never", go, idempotent=False))
        live.until(lambda: words(path))
        worker = live.process("cpu-0")
        # When it is frozen
        freeze(worker.pid)
        try:
            with pytest.raises(ActionLost, match="3 beats missed"):
                command.result(60)
            with pytest.raises(ActionLost):
                never.result(60)
            # And what it did comes to an end before it can learn that it was given up
            go.touch()
        finally:
            worker.resume()
        # Then it comes back, what it still runs is stopped, and the environment is closed
        live.until(lambda: not runs(f"319.484375{RUN}"))
        live.until(lambda: live.rows("select state from nodes where name = 'cpu-0'") == [("up",)])
        with pytest.raises(EnvironmentLost, match="3 beats missed"):
            env.exec("echo")
        # And that it cannot be closed is nobody's fault
        with pytest.raises(EnvironmentLost):
            env.close()
        closed = f"select cause, fault from actions where kind = 'cpu.close' and environment = '{env.id}'"
        live.until(lambda: live.rows(closed) == [("environment_lost", "")])
        assert client.open(trajectory="next").exec("echo fine").stdout == "fine\n"
        # And nothing has ended twice
        assert live.rows(f"select status from actions where id in ('{command.id}', '{never.id}')") == [("lost",)] * 2
        with client._session._store as store:
            assert b'"FAILURE"' in (store.get(f"celery-task-meta-{never.id}") or b"")


def test_tries_are_counted_over_a_restart_of_the_scheduler(impatient: Live, tmp_path: Path) -> None:
    # Given an action that has killed its worker once, and waits for another
    live = impatient
    path, go = tmp_path / "marks", tmp_path / "never"
    with live.client() as client:
        handle = client.submit(mark(path, "word", go))
        live.until(lambda: words(path) == {"word": 1})
        live.process("cpu-0").kill()
        live.until(lambda: live.rows(f"select status from actions where id = '{handle.id}'") == [("waiting",)])
        # When the scheduler is started anew, and the action kills the next worker
        live.replace_scheduler()
        live.stack.restart("cpu-0")
        live.until(lambda: words(path) == {"word": 2})
        live.process("cpu-0").kill()
        # Then it is not tried a third time
        with pytest.raises(ActionLost, match="2nd node that this action lost"):
            handle.result(60)
        assert live.rows(f"select attempts from actions where id = '{handle.id}'") == [(2,)]


def suspend_between_transactions(live: Live, scheduler: psutil.Process) -> None:
    """Freeze a scheduler that does not hold the lock of SQLite: nobody else could write as long as it is frozen."""
    path = live.stack.state_dir / "tangram.sqlite"
    for _ in range(1000):
        freeze(scheduler.pid)
        with closing(sqlite3.connect(path, timeout=0.0)) as journal:
            try:
                journal.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError:
                scheduler.resume()
        time.sleep(0.01)
    raise AssertionError("the scheduler holds the lock of its journal all the time")


def test_a_standby_takes_over(own_stack: Callable[..., Live], tmp_path: Path) -> None:
    # Given a scheduler that leads, and one that stands by until that has been silent for longer than a busy machine holds it up
    live = own_stack(include=INCLUDE, variables={"TANGRAM_TAKEOVER_S": "10"})
    ((epoch,),) = live.rows("select epoch from leases where name = 'scheduler'")
    spare = live.command("scheduler")
    live.stack.spawn(type(spare)("standby", spare.argv, spare.env))
    path, go = tmp_path / "marks", tmp_path / "go"
    with live.client() as client:
        env = client.open(trajectory="t")
        env.exec("echo kept > file")
        running = client.submit(mark(path, "running", go))
        live.until(lambda: words(path))
        # When the first is frozen, so that it holds its connections but lets its lease run out
        first = live.process("scheduler")
        suspend_between_transactions(live, first)
        waiting = env.submit("cat file")
        # Then the other goes on with what runs and what waits
        assert waiting.result(60).stdout == "kept\n"
        # And the first, awake again, does no harm and stands by
        first.resume()
        live.until(lambda: "standing by" in live.log("scheduler"))
        go.touch()
        assert running.result(60) == "running"
        assert env.exec("cat file").stdout == "kept\n"
    assert words(path) == {"running": 1}
    assert live.rows("select epoch from leases where name = 'scheduler'") == [(epoch + 1,)]
    assert live.rows("select distinct state from nodes") == [("up",)]


def test_redis_may_go_away_and_come_back(impatient: Live) -> None:
    live = impatient
    logged = {name: len(live.log(name)) for name in ("scheduler", "cpu-0")}
    with live.client(connect_timeout_s=60.0) as client:
        env = client.open(trajectory="t")
        env.exec("echo kept > file")
        # When Redis is killed, and is there again after longer than three beats
        live.end("redis")
        sent = env.submit("cat file")
        time.sleep(MISSED_BEATS * float(FAST_BEATS["TANGRAM_BEAT_S"]) + 0.1)  # the outage itself; there is nothing to wait for in it
        live.stack.restart("redis")
        # Then all go on, and the environment still stands
        assert sent.result(60).stdout == "kept\n"
        assert live.rows("select distinct state from nodes") == [("up",)]
        for name in ("scheduler", "cpu-0"):
            assert "Traceback" not in live.log(name)[logged[name] :]


def test_a_worker_outlives_redis_with_a_message_that_is_not_acknowledged(repaired: Live) -> None:
    # Given a message that a worker keeps for later and acknowledges only then
    live = repaired
    with Celery(broker=live.stack.broker_url, set_as_current=False) as app:
        app.conf.task_create_missing_queues = True
        app.send_task("tangram.tell", kwargs={"id": "x", "attempt": 1}, queue=node_queue("cpu-0"), task_id="later", countdown=3600)
    store = open_store(live.stack.result_url, 5.0)
    live.until(lambda: any(b'"later"' in message for message in store.hvals("unacked")))
    # When Redis is killed and started again
    live.end("redis")
    live.stack.restart("redis")
    # Then the worker works on
    with live.client() as client, client.open(trajectory="t", queue_timeout_s=100) as env:
        assert env.exec("echo fine").stdout == "fine\n"
    assert live.stack.dead() == []
    store.connection_pool.disconnect()


def test_a_usual_run_logs_nothing_that_frightens(live: Live) -> None:
    names = ("scheduler", *live.plan.node_names())
    before = {name: len(live.log(name)) for name in names}
    # When commands fail, time out and are cancelled, and files are missing
    with live.client() as client, client.open(trajectory="t") as env:
        env.exec("exit 1")
        env.exec("sleep 9", timeout_s=0.1)
        handle = env.submit("sleep 9")
        handle.cancel()
        with pytest.raises(ActionCancelled):
            handle.result(60)
        with pytest.raises(ActionFailed, match="missing does not exist"):
            env.read_file("missing")
    # Then there is no traceback and no error in any log
    for name in names:
        logged = live.log(name)[before[name] :]
        assert "Traceback" not in logged, logged
        assert "ERROR" not in logged, logged
