"""Messages on which schedulers fail: the second failure sets one aside, and the third scheduler goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from app.journal.status import status
from app.journal.writing import SqlJournal
from scheduler.core.core import Core
from scheduler.live.entries import MessageFailed
from scheduler.live.poison import CONTENT_S, CoreBroken
from scheduler.model import events
from scheduler.model.commands import Command
from tangram.wire import CLAIM_KEY_PREFIX
from tests.scheduler.deployed import Deployment
from tests.sql import tables

CORES = 128


class FragileCore(Core):
    """A core with a bug: it fails on some events, after it has changed its state."""

    fails_on: Callable[[events.Event], bool]

    def handle(self, event: events.Event, now: float) -> list[Command]:
        out = super().handle(event, now)
        if self.fails_on(event):
            raise ZeroDivisionError("the bug")
        return out


class Fragile(Deployment):
    """Schedulers one after another over one journal, whose core fails on some events, and a node of many cores."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(SqlJournal(engine))
        self.engine = engine
        self.fails_on: Callable[[events.Event], bool] = lambda event: False
        self.succeed()
        self.join(cores=CORES)

    def send(self, *ids: str, **header: Any) -> None:
        super().send(*ids, **{"job": "coding", **header})

    def core_of(self, *args: Any, **more: Any) -> Core:
        core = FragileCore(*args, **more)
        core.fails_on = lambda event: self.fails_on(event)
        return core

    def succeed(self) -> None:
        """Have the next scheduler begin. Raises what it fails on."""
        self.start(make=self.core_of)

    def fail_and_succeed(self, times: int) -> None:
        """Have so many schedulers fail on what is in the queue, or on its reload, each followed by the next."""
        for _ in range(times):
            with pytest.raises(CoreBroken):
                self.service.step()
            self.journal.close()
            self.journal = SqlJournal(self.engine)
            self.succeed()

    def fail_to_succeed(self, times: int, match: str | None = None) -> None:
        """Have so many schedulers fail as they begin."""
        for _ in range(times):
            with pytest.raises(CoreBroken, match=match):
                self.succeed()

    def rows(self, query: str) -> list[Any]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(query)]

    def ended(self) -> dict[str, str]:
        return dict(self.rows("SELECT id, status FROM actions WHERE ended_at IS NOT NULL"))


@pytest.fixture
def fragile(engine: Engine) -> Iterator[Fragile]:
    deployment = Fragile(engine)
    yield deployment
    deployment.journal.close()


def is_poison(kind: type[events.Event]) -> Callable[[events.Event], bool]:
    return lambda event: isinstance(event, kind) and getattr(event, "id", "") == "poison"


def test_the_third_scheduler_goes_on_without_an_action_on_which_two_have_failed(fragile: Fragile) -> None:
    # Given a core with a bug that one of 21 actions of a batch meets
    fragile.fails_on = is_poison(events.Submitted)
    good = [f"a{number}" for number in range(20)]
    fragile.send(*good[:10], "poison", *good[10:])
    fragile.fail_and_succeed(2)
    fragile.service.step()
    assert sorted(fragile.core.state.running) == sorted(good)
    assert fragile.broker.is_done()
    fragile.finish(*good)
    assert fragile.ended() == {**dict.fromkeys(good, "succeeded"), "poison": "failed"}
    # And the trainer is told of the other one, with where the traceback is
    assert fragile.broker.end("poison") == ("failed", "set_aside")
    ((job, reason),) = fragile.rows("SELECT job, reason FROM actions WHERE id = 'poison'")
    assert job == "coding"
    assert "failed on it 2 times" in reason and "failed_messages" in reason and "'action poison'" in reason


def test_an_action_whose_report_breaks_schedulers_has_failed_and_its_node_is_told(fragile: Fragile) -> None:
    # Given two actions that run, and a message with the ends of both
    fragile.fails_on = is_poison(events.Finished)
    fragile.submit("poison", "good")
    fragile.broker.report(fragile.finished("poison"), fragile.finished("good"))
    fragile.fail_and_succeed(2)
    fragile.service.step()
    # Then the other one counts, and what its node still may run of the first is stopped, and its result is void
    assert fragile.ended() == {"poison": "failed", "good": "succeeded"}
    assert fragile.broker.end("poison") == ("failed", "set_aside")
    assert ("tangram.stop", "poison") in fragile.broker.orders()
    assert fragile.broker.value(f"{CLAIM_KEY_PREFIX}poison:1") == b"disowned"
    assert fragile.broker.is_done() and fragile.core.state.running == {}


def test_a_result_that_a_worker_has_stored_stands_though_its_report_is_set_aside(fragile: Fragile) -> None:
    fragile.fails_on = is_poison(events.Finished)
    fragile.submit("poison")
    # Given an end whose result the trainer has
    fragile.broker.app.backend.store_result("poison", 7, "SUCCESS")
    fragile.broker.report(fragile.finished("poison"))
    fragile.fail_and_succeed(2)
    assert fragile.ended() == {"poison": "succeeded"}
    assert fragile.broker.app.backend.get_result("poison") == 7


def test_an_action_whose_reload_breaks_schedulers_is_set_aside(fragile: Fragile) -> None:
    # Given an action that waits, and runs into a bug only where it is loaded from the journal
    fragile.fails_on = lambda event: is_poison(events.Submitted)(event) and event.received_at is not None
    fragile.send("good", cost={"cores": CORES})
    fragile.submit("poison")
    fragile.fail_to_succeed(2)
    fragile.succeed()
    assert fragile.ended() == {"poison": "failed"}
    assert fragile.running == ["good"]
    assert fragile.broker.end("poison") == ("failed", "set_aside")


def test_an_environment_whose_opening_is_set_aside_is_lost(fragile: Fragile) -> None:
    # Given an environment that is being opened, and a command that waits for it
    fragile.fails_on = lambda event: isinstance(event, events.Resumed)
    fragile.send("open", kind="cpu.open", environment="e", cost={})
    fragile.submit("exec", kind="cpu.exec", environment="e")
    fragile.fail_to_succeed(2)
    fragile.succeed()
    assert fragile.rows("SELECT state FROM environments") == [("lost",)]
    assert fragile.ended() == {"open": "failed", "exec": "lost"}


def test_a_node_whose_beats_break_schedulers_is_lost_until_its_worker_is_started_anew(fragile: Fragile) -> None:
    # Given a node with an environment and an action, whose beats a core cannot bear
    fragile.send("open", kind="cpu.open", environment="e", cost={})
    fragile.submit("a", idempotent=True)
    fragile.finish("open")
    fragile.fails_on = lambda event: isinstance(event, events.NodeBeat)
    for number in range(2):
        fragile.broker.report({"type": "beat", "node": {**fragile.nodes["n"], "running": [f"beats-differ-{number}"]}})
        with pytest.raises(CoreBroken):
            fragile.service.step()
        fragile.succeed()
    fragile.service.step()
    assert fragile.broker.is_done()
    assert fragile.rows("SELECT state FROM nodes") == fragile.rows("SELECT state FROM environments") == [("lost",)]
    assert fragile.waiting == ["a"]
    # And when its worker is started anew, it is heard again
    fragile.fails_on = lambda event: False
    fragile.join(cores=CORES, incarnation="2")
    assert fragile.running == ["a"]


def test_a_cancel_of_a_job_is_set_aside_for_a_while(fragile: Fragile) -> None:
    fragile.fails_on = lambda event: isinstance(event, events.Cancelled)
    fragile.submit("a")
    cancel = {"cancel": {"job": "coding"}}
    fragile.broker.request(cancel)
    fragile.fail_and_succeed(2)
    fragile.service.step()
    assert fragile.broker.is_done() and fragile.running == ["a"]
    fragile.broker.orders()
    # When the same is asked for much later, of a scheduler without the bug
    fragile.fails_on = lambda event: False
    fragile.now += CONTENT_S + 1.0
    fragile.broker.request(cancel)
    fragile.service.step()
    assert ("tangram.stop", "a") in fragile.broker.orders()


def test_ticks_on_which_schedulers_fail_are_shown_and_go_on(fragile: Fragile, caplog: pytest.LogCaptureFixture) -> None:
    fragile.fails_on = lambda event: isinstance(event, events.Tick)
    fragile.now += 1.0
    with pytest.raises(CoreBroken):
        fragile.service.step()
    fragile.fail_to_succeed(2, "Tick")
    # Then it is shown, with what went wrong, and said by each scheduler that begins after that
    (shown,) = status(fragile.engine, 0.0).set_aside
    assert (shown.message, shown.kind, shown.failures, shown.error) == ("tick", "tick", 3, "ZeroDivisionError: the bug")
    assert "2 schedulers have failed on a tick" in caplog.text
    # And once a tick passes, scheduling goes on, ticks and all
    fragile.fails_on = lambda event: False
    fragile.succeed()
    fragile.submit("late", queue_timeout_s=5.0, cost={"cores": CORES + 1}, requires=["nowhere"])
    fragile.now += 10.0
    fragile.service.step()
    assert list(fragile.ended()) == ["late"]


def test_a_failure_that_cannot_be_written_down_stops_the_scheduler_with_what_it_failed_on(fragile: Fragile) -> None:
    fragile.fails_on = is_poison(events.Submitted)
    fragile.send("poison")

    def refuse(entries: object) -> None:
        raise OSError("disk full")

    fragile.journal.write = refuse
    with pytest.raises(CoreBroken) as caught:
        fragile.service.step()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert tables.rows(fragile.engine, "failed_messages") == []


def test_a_failure_counts_once_for_each_scheduler(engine: Engine) -> None:
    failed = {"message": "action a", "kind": "action", "action": "a", "traceback": "Traceback\nKeyError: 'a\0'\n"}
    with SqlJournal(engine) as journal:
        # Given a failure that is written twice, as after a connection that broke
        for _ in range(2):
            journal.write([MessageFailed(**failed, epoch=3, at=1.0)])
        assert journal.unfinished().set_aside == ()
        # When another scheduler fails on it
        journal.write([MessageFailed(**{**failed, "kind": "reload"}, epoch=5, at=2.0)])
        (found,) = journal.unfinished().set_aside
    assert (found.message, found.kind, found.action, found.failures, found.failed_at) == ("action a", "reload", "a", 2, 2.0)
    assert found.error == "KeyError: 'a\N{REPLACEMENT CHARACTER}'"
