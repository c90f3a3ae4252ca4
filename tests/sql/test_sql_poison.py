"""Messages on which schedulers fail: the second failure sets one aside, and the third scheduler goes on without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import Engine

from app.cli import output
from app.journal.status import status
from app.journal.writing import SqlJournal
from scheduler.core.core import Core
from scheduler.live.entries import MessageFailed
from scheduler.live.poison import CONTENT_S, CoreBroken
from scheduler.live.service import Service
from scheduler.model import events
from scheduler.model.commands import Command
from scheduler.policies import make_policy
from tangram.action import Action, Cost
from tangram.wire import CLAIM_KEY_PREFIX
from tests.scheduler.deployed import Broker

NODE: dict[str, Any] = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 128, "memory_mb": 0, "cells": 0, "cell_memory_mb": 0}
NODE |= {"incarnation": "1", "running": [], "environments": []}


class FragileCore(Core):
    """A core with a bug: it fails on some events, after it has changed its state."""

    fails_on: Callable[[events.Event], bool]

    def handle(self, event: events.Event, now: float) -> list[Command]:
        out = super().handle(event, now)
        if self.fails_on(event):
            raise ZeroDivisionError("the bug")
        return out


class Deployment:
    """Schedulers one after another over one journal and one broker."""

    def __init__(self, engine: Engine, fails_on: Callable[[events.Event], bool]) -> None:
        self.engine, self.fails_on = engine, fails_on
        self.broker, self.epoch, self.now = Broker(), 0, 1000.0
        self.succeed()

    def succeed(self) -> None:
        """Have the next scheduler begin. Raises what it fails on."""
        self.epoch += 1
        core = FragileCore(make_policy("fcfs"))
        core.fails_on = self.fails_on
        self.journal = SqlJournal(self.engine)
        self.service = Service(core, self.broker.transport(self.epoch), self.journal, epoch=self.epoch, clock=lambda: self.now)
        self.core = core
        self.service.recover()

    def fail_and_succeed(self, times: int) -> None:
        """Have so many schedulers fail on what is in the queue, or on its reload, each followed by the next."""
        for _ in range(times):
            with pytest.raises(CoreBroken):
                self.service.step()
            self.journal.close()
            self.succeed()

    def told(self, *reports: object) -> None:
        self.broker.report(*reports)

    def submit(self, *ids: str, **fields: Any) -> None:
        action = Action(**{"kind": "my.task", "cost": Cost.of(cores=1), "job": "coding", **fields})
        for one in ids:
            self.broker.submit(one, {**action.to_header(), "submitted_at": self.now})

    def rows(self, query: str) -> list[Any]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(query)]

    def ends(self) -> dict[str, str]:
        return dict(self.rows("SELECT id, status FROM actions WHERE ended_at IS NOT NULL"))


@pytest.fixture
def deploy(engine: Engine) -> Any:
    """Return what makes a deployment whose core fails on some events, with a node of many cores."""
    deployments = []

    def make(fails_on: Callable[[events.Event], bool]) -> Deployment:
        deployments.append(Deployment(engine, lambda event: False))
        deployment = deployments[-1]
        deployment.told({"type": "joined", "node": NODE})
        deployment.service.step()
        deployment.fails_on = deployment.core.fails_on = fails_on
        return deployment

    yield make
    for deployment in deployments:
        deployment.journal.close()


def finished(action_id: str) -> dict[str, Any]:
    return {"type": "finished", "id": action_id, "attempt": 1, "status": "succeeded"}


def is_poison(kind: type[events.Event]) -> Callable[[events.Event], bool]:
    return lambda event: isinstance(event, kind) and getattr(event, "id", "") == "poison"


def test_the_third_scheduler_goes_on_without_an_action_on_which_two_have_failed(deploy: Any) -> None:
    # Given a core with a bug that one of 101 actions of a batch meets
    deployment = deploy(is_poison(events.Submitted))
    good = [f"a{number}" for number in range(100)]
    deployment.submit(*good[:50], "poison", *good[50:])
    # When two schedulers have failed on it, and a third begins
    deployment.fail_and_succeed(2)
    deployment.service.step()
    # Then that one has the others run, and has acknowledged all
    assert sorted(deployment.core.state.running) == sorted(good)
    assert deployment.broker.is_done()
    # And they come to their ends
    deployment.told(*(finished(one) for one in good))
    deployment.service.step()
    assert deployment.ends() == {**dict.fromkeys(good, "succeeded"), "poison": "failed"}
    # And the trainer is told of the other one, with where the traceback is
    assert deployment.broker.end("poison") == ("failed", "set_aside")
    ((job, reason),) = deployment.rows("SELECT job, reason FROM actions WHERE id = 'poison'")
    assert job == "coding"
    assert "failed on it 2 times" in reason and "failed_messages" in reason and "'action poison'" in reason


def test_one_failure_sets_nothing_aside(deploy: Any) -> None:
    # Given a scheduler that fails on an action once
    deployment = deploy(is_poison(events.Submitted))
    deployment.submit("poison")
    deployment.fail_and_succeed(1)
    # When the next one has no such bug
    deployment.core.fails_on = lambda event: False
    deployment.service.step()
    # Then the action runs
    assert list(deployment.core.state.running) == ["poison"]
    assert status(deployment.engine, 0.0).set_aside == ()


def test_an_action_whose_report_breaks_schedulers_has_failed_and_its_node_is_told(deploy: Any) -> None:
    # Given two actions that run, and a message with the ends of both
    deployment = deploy(is_poison(events.Finished))
    deployment.submit("poison", "good")
    deployment.service.step()
    deployment.told(finished("poison"), finished("good"))
    # When two schedulers have failed on one of them
    deployment.fail_and_succeed(2)
    deployment.service.step()
    # Then the other one counts, and what its node still may run of the first is stopped, and its result is void
    assert deployment.ends() == {"poison": "failed", "good": "succeeded"}
    assert deployment.broker.end("poison") == ("failed", "set_aside")
    assert ("tangram.stop", "poison") in deployment.broker.orders()
    assert deployment.broker.value(f"{CLAIM_KEY_PREFIX}poison:1") == b"disowned"
    assert deployment.broker.is_done() and deployment.core.state.running == {}


def test_a_result_that_a_worker_has_stored_stands_though_its_report_is_set_aside(deploy: Any) -> None:
    deployment = deploy(is_poison(events.Finished))
    deployment.submit("poison")
    deployment.service.step()
    # Given an end whose result the trainer has
    deployment.broker.app.backend.store_result("poison", 7, "SUCCESS")
    deployment.told(finished("poison"))
    deployment.fail_and_succeed(2)
    # Then that is its only end
    assert deployment.ends() == {"poison": "succeeded"}
    assert deployment.broker.app.backend.get_result("poison") == 7
    assert deployment.broker.keys(CLAIM_KEY_PREFIX) == []


def test_an_action_whose_reload_breaks_schedulers_is_set_aside(deploy: Any) -> None:
    # Given an action that waits, and runs into a bug only where it is loaded from the journal
    deployment = deploy(lambda event: is_poison(events.Submitted)(event) and event.received_at is not None)
    deployment.submit("good", cost=Cost.of(cores=NODE["cores"]))
    deployment.submit("poison")
    deployment.service.step()
    # When two schedulers cannot begin for it
    for _ in range(2):
        with pytest.raises(CoreBroken):
            deployment.succeed()
    # Then the third can
    deployment.succeed()
    assert deployment.ends() == {"poison": "failed"}
    assert list(deployment.core.state.running) == ["good"]
    assert deployment.broker.end("poison") == ("failed", "set_aside")


def test_an_environment_whose_opening_is_set_aside_is_lost(deploy: Any) -> None:
    # Given an environment that is being opened, and a command that waits for it
    deployment = deploy(lambda event: isinstance(event, events.Resumed))
    deployment.submit("open", kind="cpu.open", environment="e", cost=Cost())
    deployment.submit("exec", kind="cpu.exec", environment="e")
    deployment.service.step()
    for _ in range(2):
        with pytest.raises(CoreBroken):
            deployment.succeed()
    # When its opening is set aside
    deployment.succeed()
    # Then it is gone, and nobody waits for it
    assert deployment.rows("SELECT state FROM environments") == [("lost",)]
    assert deployment.ends() == {"open": "failed", "exec": "lost"}


def test_a_node_whose_beats_break_schedulers_is_lost_until_its_worker_is_started_anew(deploy: Any) -> None:
    # Given a node with an environment and an action, whose beats a core cannot bear
    deployment = deploy(lambda event: False)
    deployment.submit("open", kind="cpu.open", environment="e", cost=Cost())
    deployment.submit("a", idempotent=True)
    deployment.service.step()
    deployment.told(finished("open"))
    deployment.service.step()
    deployment.core.fails_on = deployment.fails_on = lambda event: isinstance(event, events.NodeBeat)
    for number in range(2):
        deployment.told({"type": "beat", "node": {**NODE, "running": [f"beats-differ-{number}"]}})
        with pytest.raises(CoreBroken):
            deployment.service.step()
        deployment.succeed()
    # Then the third scheduler goes on without it
    deployment.service.step()
    assert deployment.broker.is_done()
    assert deployment.rows("SELECT state FROM nodes") == deployment.rows("SELECT state FROM environments") == [("lost",)]
    assert list(deployment.core.state.waiting) == ["a"]
    # And when its worker is started anew, it is heard again
    deployment.core.fails_on = lambda event: False
    deployment.told({"type": "joined", "node": {**NODE, "incarnation": "2"}})
    deployment.service.step()
    assert list(deployment.core.state.running) == ["a"]


def test_a_cancel_of_a_job_is_set_aside_for_a_while(deploy: Any) -> None:
    deployment = deploy(lambda event: isinstance(event, events.Cancelled))
    deployment.submit("a")
    deployment.service.step()
    cancel = {"cancel": {"job": "coding"}}
    deployment.broker.request(cancel)
    # Given a cancel that two schedulers could not take
    deployment.fail_and_succeed(2)
    deployment.service.step()
    assert deployment.broker.is_done() and list(deployment.core.state.running) == ["a"]
    deployment.broker.orders()
    # When the same is asked for much later, of a scheduler without the bug
    deployment.core.fails_on = lambda event: False
    deployment.now += CONTENT_S + 1.0
    deployment.broker.request(cancel)
    deployment.service.step()
    # Then it is done
    assert ("tangram.stop", "a") in deployment.broker.orders()


def fails_on_jobs(event: events.Event) -> bool:
    return isinstance(event, events.Cancelled) and event.job is not None


@pytest.mark.parametrize("cancel", [{"job": "coding"}, {"job": "coding", "trajectory": "t"}])
def test_a_cancel_of_a_job_that_is_set_aside_ends_its_actions_and_environments(deploy: Any, cancel: dict[str, str]) -> None:
    # Given a job with an environment, an action that runs and one that waits, beside those of another one
    deployment = deploy(lambda event: False)
    for job in ("coding", "other"):
        deployment.submit(f"open-{job}", kind="cpu.open", environment=f"e-{job}", cost=Cost(), job=job, trajectory="t")
        deployment.service.step()
        deployment.told(finished(f"open-{job}"))
        deployment.submit(f"runs-{job}", cost=Cost.of(cores=NODE["cores"] // 2), job=job, trajectory="t")
        deployment.service.step()
    for job in ("coding", "other"):
        deployment.submit(f"waits-{job}", cost=Cost.of(cores=NODE["cores"]), job=job, trajectory="t")
    deployment.service.step()
    # When two schedulers have failed on the cancel of the job, and a third gets it
    deployment.core.fails_on = deployment.fails_on = fails_on_jobs
    deployment.broker.request({"cancel": cancel})
    deployment.fail_and_succeed(2)
    deployment.broker.orders()
    deployment.service.step()
    # Then what waits is cancelled, what runs is stopped, and the environment closes
    assert deployment.broker.is_done()
    assert deployment.ends() == {"open-coding": "succeeded", "open-other": "succeeded", "waits-coding": "cancelled"}
    assert deployment.broker.orders() == [("tangram.stop", "runs-coding"), ("tangram.close_environment", "e-coding")]
    # And with the reports of the node, nothing of the job is left
    deployment.told({**finished("runs-coding"), "status": "cancelled"})
    deployment.told({"type": "beat", "node": {**NODE, "running": ["runs-other"], "environments": ["e-other"]}})
    deployment.service.step()
    assert list(deployment.core.state.environments) == ["e-other"]
    assert {one.waiting.action.job for one in deployment.core.state.running.values()} == {"other"}


def test_a_cancel_that_cannot_be_done_by_ids_either_stops_what_runs(deploy: Any) -> None:
    # Given a core that fails on every cancel, an action that runs, and one that waits
    deployment = deploy(lambda event: isinstance(event, events.Cancelled))
    deployment.submit("runs", "waits", cost=Cost.of(cores=NODE["cores"]))
    deployment.service.step()
    deployment.broker.request({"cancel": {"job": "coding"}})
    # When two schedulers have failed on it as it is, and two on the ids of what waits
    deployment.fail_and_succeed(4)
    deployment.service.step()
    # Then the node stops what runs, and the scheduler goes on
    assert deployment.broker.orders()[-1] == ("tangram.stop", "runs")
    assert deployment.broker.is_done()


def test_ticks_on_which_schedulers_fail_are_shown_and_go_on(deploy: Any, caplog: pytest.LogCaptureFixture) -> None:
    # Given a core that fails on ticks while something is wrong
    deployment = deploy(lambda event: False)
    deployment.core.fails_on = deployment.fails_on = lambda event: isinstance(event, events.Tick)
    deployment.now += 1.0
    # When two schedulers have failed on one, and a third begins
    with pytest.raises(CoreBroken):
        deployment.service.step()
    for _ in range(2):
        with pytest.raises(CoreBroken, match="Tick"):
            deployment.succeed()
    # Then it is shown, with what went wrong, and said by each scheduler that begins after that
    (shown,) = status(deployment.engine, 0.0).set_aside
    assert (shown.message, shown.kind, shown.failures, shown.error) == ("tick", "tick", 3, "ZeroDivisionError: the bug")
    assert "2 schedulers have failed on a tick" in caplog.text
    # And once a tick passes, scheduling goes on, ticks and all
    deployment.fails_on = lambda event: False
    deployment.succeed()
    deployment.submit("late", queue_timeout_s=5.0, cost=Cost.of(cores=NODE["cores"] + 1), requires=("nowhere",))
    deployment.service.step()
    deployment.now += 10.0
    deployment.service.step()
    assert list(deployment.ends()) == ["late"]


def test_a_failure_that_cannot_be_written_down_stops_the_scheduler_with_what_it_failed_on(deploy: Any, tables: Any) -> None:
    deployment = deploy(is_poison(events.Submitted))
    deployment.submit("poison")

    def refuse(entries: object) -> None:
        raise OSError("disk full")

    deployment.journal.write = refuse
    with pytest.raises(CoreBroken) as caught:
        deployment.service.step()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert tables.rows(deployment.engine, "failed_messages") == []


def test_a_failure_counts_once_for_each_scheduler(engine: Engine, tables: Any) -> None:
    failed = {"message": "action a", "kind": "action", "action": "a", "traceback": "Traceback\nKeyError: 'a\0'\n"}
    with SqlJournal(engine) as journal:
        # Given a failure that is written twice, as after a connection that broke
        for _ in range(2):
            journal.write([MessageFailed(**failed, epoch=3, at=1.0)])
        assert journal.unfinished().set_aside == ()
        # When another scheduler fails on it
        journal.write([MessageFailed(**{**failed, "kind": "reload"}, epoch=5, at=2.0)])
        (found,) = journal.unfinished().set_aside
    # Then it is set aside
    assert (found.message, found.kind, found.action, found.failures, found.failed_at) == ("action a", "reload", "a", 2, 2.0)
    assert found.error == "KeyError: 'a\N{REPLACEMENT CHARACTER}'"


def test_status_shows_what_was_set_aside(deploy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    deployment = deploy(is_poison(events.Submitted))
    deployment.submit("poison")
    deployment.fail_and_succeed(2)
    document = {"scheduler": None, **asdict(status(deployment.engine, 0.0))}
    # When the state is asked for as JSON
    output.show_state(document, as_json=True)
    (shown,) = json.loads(capsys.readouterr().out)["set_aside"]
    # Then it names message, action, time and the last line of the traceback
    assert (shown["kind"], shown["action"], shown["failures"], shown["failed_at"]) == ("action", "poison", 2, deployment.now)
    assert shown["error"] == "ZeroDivisionError: the bug"
    # And so does the table
    output.show_state(document, as_json=False)
    table = capsys.readouterr().out
    assert "poison" in table and "ZeroDivisionError" in table
