"""Celery's own words through a whole stack: tasks as actions, results, chains, revocations, `celery inspect`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from celery import Celery, chain, group
from celery.exceptions import TaskRevokedError

from app import celery as celery_module
from app.routing import install_routing
from tangram import Action, ActionCancelled, ActionFailed, ActionRejected, Client, Cost
from tangram.wire import INGRESS_QUEUE
from tests.live import live_tasks
from tests.live.support import Live

pytestmark = pytest.mark.real


@pytest.fixture
def app(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Point the application of the tasks at the stack, as TANGRAM_* would in a process of its own."""
    celery = celery_module.app
    monkeypatch.setattr(celery.conf, "broker_url", live.stack.broker_url)
    monkeypatch.setattr(celery.conf, "result_backend", live.stack.result_url)
    for part, name in ((celery, "_backend_cache"), (celery, "_pool"), (celery.amqp, "_producer_pool")):
        monkeypatch.setattr(part, name, None)
    yield celery
    celery.close()


@pytest.fixture
def plain(live: Live) -> Iterator[Celery]:
    """Return an application that knows nothing of this system."""
    with Celery(broker=live.stack.broker_url, backend=live.stack.result_url, set_as_current=False) as plain:
        yield plain


def test_a_task_that_declares_its_cores_is_an_action(live: Live, app: Celery) -> None:
    good, bad = live_tasks.add.delay(2, 3), live_tasks.fail.delay()
    assert good.get(timeout=60) == 5
    assert live_tasks.cores.delay().get(timeout=60) in (1, 2)
    with pytest.raises(ValueError, match="what nobody wants"):
        bad.get(timeout=60)
    # And the journal knows it as any other
    query = f"select kind, status, cause, fault from actions where id in ('{good.id}', '{bad.id}') order by kind"
    ends = [("live.add", "succeeded", "", ""), ("live.fail", "failed", "error", "program")]
    live.until(lambda: [tuple(row) for row in live.rows(query)] == ends)


def test_actions_can_be_chained_and_grouped_and_a_chain_whose_head_is_refused_ends_as_a_whole(app: Celery) -> None:
    assert chain(live_tasks.add.s(1, 2), live_tasks.add.s(10))().get(timeout=60) == 13
    assert group(live_tasks.add.s(n, n) for n in range(5))().get(timeout=60) == [0, 2, 4, 6, 8]
    result = chain(live_tasks.add.s(1, 2).set(headers={"tangram": {"cost": {"cores": [64]}}}), live_tasks.add.s(10))()
    for end in (result.parent, result):
        with pytest.raises(ActionRejected, match="needs 64 cores"):
            end.get(timeout=60)


def test_any_celery_client_gets_the_result_of_an_action_and_sends_its_own(client: Client, plain: Celery) -> None:
    with client.open(trajectory="t") as env:
        handle = env.submit("echo hello")
        handle.result(60)
        assert plain.AsyncResult(handle.id).get(timeout=60)["value"]["stdout"] == "hello\n"
        # And may send actions itself where the routing layer is installed
        install_routing(plain)
        header = {"kind": "cpu.exec", "environment": env.id, "cost": {"cores": [1]}, "session": "main", "job": "tests"}
        sent = plain.send_task("cpu.exec", kwargs={"environment": env.id, "command": "echo foreign"}, headers={"tangram": header})
        assert sent.get(timeout=60)["value"]["stdout"] == "foreign\n"


@pytest.mark.parametrize(
    "header", ["nonsense", {"kind": "cpu.exec", "colour": "red"}, {"kind": "other"}, {"kind": "live.add", "cost": {"cores": [0]}}]
)
def test_a_message_with_a_wrong_description_is_refused(plain: Celery, header: object) -> None:
    sent = plain.send_task("live.add", (1, 2), queue=INGRESS_QUEUE, headers={"tangram": header})
    with pytest.raises(ActionRejected, match="header tangram"):
        sent.get(timeout=60)


def test_a_task_that_no_worker_knows_fails_and_its_node_lives(live: Live, client: Client) -> None:
    with pytest.raises(ActionFailed, match=r"no\.such\.task"):
        client.submit(Action(kind="no.such.task", cost=Cost.of(cores=1))).result(60)
    with client.open(trajectory="t") as env:
        assert env.exec("echo fine").stdout == "fine\n"
    live.until(lambda: "knows no task" in live.rows("select reason from actions where kind = 'no.such.task'")[0][0])


def test_a_task_that_expires_while_it_waits_is_cancelled(live: Live, client: Client, app: Celery) -> None:
    # Given an action that waits for both cores
    with client.open(trajectory="t") as env:
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


def test_a_revoke_reaches_what_waits_and_ends_what_runs_where_it_terminates(
    live: Live, client: Client, plain: Celery, api_node: None
) -> None:
    with client.open(trajectory="t") as env, client.open(trajectory="t") as other:
        # Given a command that runs, and one that waits, while a worker is there that has neither
        running = env.submit("touch begun; while [ ! -e go ]; do sleep 0.05; done", units=[2], preemptible=False)
        live.until(lambda: env.files.exists("begun"))
        waiting = other.submit("true", preemptible=False)
        live.until(lambda: live.rows(f"select status from actions where id = '{waiting.id}'") == [("waiting",)])
        workers = len(live.plan.node_names())
        for revoked in (running, waiting):
            assert len(plain.control.revoke(revoked.id, reply=True, timeout=60, limit=workers)) == workers
        # When the first one ends
        env.write_file("go", b"")
        # Then what ran has its result, and the other one never begins
        assert running.result(60).exit_code == 0
        with pytest.raises(ActionCancelled, match="revoked"):
            waiting.result(60)
        # And what is terminated ends
        endless = env.submit("touch endless; sleep 1000")
        live.until(lambda: env.files.exists("endless"))
        plain.control.revoke(endless.id, terminate=True)
        with pytest.raises(ActionCancelled, match="terminated through Celery"):
            endless.result(60)
        assert env.exec("echo fine").stdout == "fine\n"
    ids = f"('{running.id}', '{waiting.id}', '{endless.id}')"
    ends = {("succeeded", ""), ("cancelled", "revoked through Celery"), ("cancelled", "terminated through Celery")}
    live.until(lambda: {tuple(row) for row in live.rows(f"select status, reason from actions where id in {ids}")} == ends)


def test_celery_inspect_sees_the_workers(live: Live, plain: Celery) -> None:
    def answering() -> set[str]:
        return {name.partition("@")[0] for name in plain.control.inspect(timeout=3.0).ping() or ()}

    # A worker that is slow to answer is not heard.
    live.until(lambda: answering() == set(live.plan.node_names()))
