"""Celery's own words against a whole stack: tasks as actions, results, chains, inspect, Flower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery, chain, group
from celery.exceptions import TaskRevokedError

from app import celery as celery_module
from app.routing import install_routing
from tangram import Action, ActionFailed, ActionRejected, Client, Cost
from tangram.wire import INGRESS_QUEUE
from tests.live import live_tasks
from tests.live.support import Live
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def app(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Point the application of the tasks at the stack, as TANGRAM_* would in a process of its own."""
    celery = celery_module.app
    celery.conf.update(broker_url=live.stack.broker_url, result_backend=live.stack.result_url)
    celery.conf.broker_write_url = celery.conf.broker_read_url = live.stack.broker_url
    celery._pool = None
    celery._local.__dict__.pop("backend", None)
    yield celery
    celery.close()


def test_a_task_that_declares_its_cores_is_an_action(live: Live, app: Celery) -> None:
    result = live_tasks.add.delay(2, 3)
    assert result.get(timeout=60) == 5
    assert live_tasks.cores.delay().get(timeout=60) in (1, 2)
    # And the journal knows it as any other
    live.until(lambda: live.rows(f"select kind, status from actions where id = '{result.id}'") == [("live.add", "succeeded")])


def test_a_task_that_fails_says_why_and_by_its_own_fault(live: Live, app: Celery) -> None:
    result = live_tasks.fail.delay()
    with pytest.raises(ValueError, match="what nobody wants"):
        result.get(timeout=60)
    ended = f"select status, cause, fault from actions where id = '{result.id}'"
    live.until(lambda: live.rows(ended) == [("failed", "error", "program")])


def test_actions_can_be_chained_and_grouped(app: Celery) -> None:
    assert chain(live_tasks.add.s(1, 2), live_tasks.add.s(10))().get(timeout=60) == 13
    assert group(live_tasks.add.s(n, n) for n in range(5))().get(timeout=60) == [0, 2, 4, 6, 8]


def test_a_chain_whose_head_is_refused_ends_as_a_whole(app: Celery) -> None:
    head = live_tasks.add.s(1, 2).set(headers={"tangram": {"cost": {"cores": [64]}}})
    result = chain(head, live_tasks.add.s(10))()
    with pytest.raises(ActionRejected, match="needs 64 cores"):
        result.parent.get(timeout=60)
    with pytest.raises(ActionRejected, match="needs 64 cores"):
        result.get(timeout=60)


def test_any_celery_client_gets_the_result_of_an_action(live: Live) -> None:
    with live.client() as client, client.open(trajectory="t") as env:
        handle = env.submit("echo hello")
        handle.result(60)
        with Celery(broker=live.stack.broker_url, backend=live.stack.result_url, set_as_current=False) as plain:
            payload = plain.AsyncResult(handle.id).get(timeout=60)
            assert payload["value"]["stdout"] == "hello\n"
            # And may send actions itself where the routing layer is installed
            install_routing(plain)
            header = {"kind": "cpu.exec", "environment": env.id, "cost": {"cores": [1]}, "session": "main"}
            sent = plain.send_task("cpu.exec", kwargs={"environment": env.id, "command": "echo foreign"}, headers={"tangram": header})
            assert sent.get(timeout=60)["value"]["stdout"] == "foreign\n"


def test_a_message_without_a_description_is_refused(live: Live) -> None:
    with Celery(broker=live.stack.broker_url, backend=live.stack.result_url, set_as_current=False) as plain:
        plain.conf.task_routes = None
        sent = plain.send_task("cpu.exec", kwargs={"environment": "e", "command": "echo"}, queue=INGRESS_QUEUE)
        with pytest.raises(Exception, match=r"environment|header") as caught:
            sent.get(timeout=60)
        assert type(caught.value).__name__ in ("ActionRejected", "ActionFailed")


@pytest.mark.parametrize(
    "header", ["nonsense", {"kind": "cpu.exec", "colour": "red"}, {"kind": "other"}, {"kind": "live.add", "cost": {"cores": [0]}}]
)
def test_a_message_with_a_wrong_description_is_refused(live: Live, header: object) -> None:
    with Celery(broker=live.stack.broker_url, backend=live.stack.result_url, set_as_current=False) as plain:
        sent = plain.send_task("live.add", (1, 2), queue=INGRESS_QUEUE, headers={"tangram": header})
        with pytest.raises(ActionRejected, match="header tangram"):
            sent.get(timeout=60)


def test_rubbish_on_the_queues_harms_nobody(live: Live, client: Client) -> None:
    import redis

    with redis.Redis(unix_socket_path=str(live.stack.state_dir / "redis.sock")) as server:
        for queue in (INGRESS_QUEUE, "scheduler.events", "scheduler.control"):
            for rubbish in (b"", b"\xff\xfe", b"{}", b"[]", b"null", b'{"body": "e30=", "headers": {"id": 1}, "properties": {}}'):
                server.lpush(queue, rubbish)
    with client.open(trajectory="t") as env:
        assert env.exec("echo fine").stdout == "fine\n"
    assert live.stack.dead() == []


def test_a_task_that_no_worker_knows_fails_and_its_node_lives(live: Live, client: Client) -> None:
    with pytest.raises(ActionFailed, match=r"no\.such\.task"):
        client.submit(Action(kind="no.such.task", cost=Cost.of(cores=1))).result(60)
    with client.open(trajectory="t") as env:
        env.exec("echo > file; sleep 1")
        assert env.read_file("file") == b"\n"
    live.until(lambda: live.rows("select status, reason from actions where kind = 'no.such.task'")[0][0] == "failed")
    assert "knows no task" in live.rows("select reason from actions where kind = 'no.such.task'")[0][0]


def test_revoking_through_celery_cancels(live: Live, app: Celery) -> None:
    # Given an action that waits for both cores
    with live.client() as client, client.open(trajectory="t") as env:
        blocker = env.submit("while [ ! -e go ]; do sleep 0.05; done", units=[2], preemptible=False)
        live.until(lambda: live.rows(f"select status from actions where id = '{blocker.id}'") == [("running",)])
        sent = time.time()
        result = live_tasks.add.apply_async((1, 2), expires=0.05)
        live.until(lambda: live.rows(f"select status from actions where id = '{result.id}'") == [("waiting",)] and time.time() > sent + 1.0)
        env.write_file("go", b"")
        with pytest.raises((TaskRevokedError, Exception), match="expired"):
            result.get(timeout=60)
        assert blocker.result(60).exit_code == 0
    live.until(lambda: live.rows(f"select status from actions where id = '{result.id}'") == [("cancelled",)])


def celery_command(live: Live, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "celery", "-A", "app", *words]
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, **live.environment}, capture_output=True, text=True, timeout=200, check=False)


def test_celery_inspect_sees_the_workers(live: Live) -> None:
    def answering() -> set[str]:
        done = celery_command(live, "inspect", "ping", "--json", "--timeout", "3")
        return {name.partition("@")[0] for name in json.loads(done.stdout)} if done.returncode == 0 else set()

    # A worker that is slow to answer is not heard.
    live.until(lambda: answering() == set(live.plan.node_names()))


def test_celery_worker_helps(live: Live) -> None:
    done = celery_command(live, "worker", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--concurrency" in done.stdout


def test_flower_shows_the_workers(live: Live) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "celery", "-A", "app", "flower", f"--port={port}", "--address=127.0.0.1"]
    env = {**os.environ, **live.environment, "FLOWER_UNAUTHENTICATED_API": "true"}
    flower = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:

        def ask(path: str) -> str:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                    return str(answer.read().decode())
            except OSError:
                return ""

        live.until(lambda: ask("/healthcheck") == "OK")
        live.until(lambda: "cpu-0" in ask("/api/workers?refresh=1"))
    finally:
        flower.terminate()
        flower.wait(60)


def test_a_full_queue_refuses_at_once(own_stack: object, services_file: Path) -> None:
    live = own_stack(variables={"TANGRAM_QUEUE_LIMIT": "3"})  # type: ignore[operator]
    with live.client() as client, client.open(trajectory="t") as env:
        running = env.submit("sleep 300")
        live.until(lambda: live.rows(f"select status from actions where id = '{running.id}'") == [("running",)])
        waiting = [env.submit("echo", session="main") for _ in range(3)]
        with pytest.raises(ActionRejected, match="has 3 actions waiting already"):
            env.exec("echo")
        assert not running.done()
        # And other jobs are none the worse for it
        with live.client("other") as other, other.open(trajectory="t") as theirs:
            assert theirs.exec("echo fine").stdout == "fine\n"
        running.cancel()
        assert [handle.result(60).exit_code for handle in waiting] == [0, 0, 0]
