"""What breaking connections cost: no result is lost, and what is submitted again makes nothing worse."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from app.broker.memory import use
from app.broker.memory_store import MemoryBroker, MemoryStore
from app.local.processes import wait_until
from tangram import Action, Client, ClientClosed, Handle, InvalidAction, Settings, StackUnreachable, Unknown, calls
from tangram.blobs import PART_BYTES
from tangram.connection import Link
from tangram.publisher import Publisher
from tangram.session import Session
from tangram.wire import ACTION_HEADER, BLOB_KEY_PREFIX, CONTROL_QUEUE, INGRESS_QUEUE, RESULT_KEY_PREFIX


class Away:
    """A broker that can be away, while its result store answers."""

    def __init__(self) -> None:
        self.away = self.answers_lost = False
        self.broker = MemoryBroker(self.called)
        self.between_parts: Callable[[], None] = lambda: None

    def called(self, operation: str, name: str) -> None:
        if operation == "strlen":
            self.between_parts()
        if self.away and operation in ("connect", "put"):
            raise ConnectionRefusedError("connection refused")
        if self.answers_lost and operation in ("connect", "put done"):
            raise ConnectionResetError("connection reset")

    def headers(self) -> list[dict[str, Any]]:
        """Return what the actions that were sent say of themselves, the first first."""
        return [json.loads(raw)["headers"][ACTION_HEADER] for raw in self.broker.waiting(INGRESS_QUEUE)]

    def ids(self) -> list[str]:
        """Return the ids of the actions that were sent, the first first."""
        return [json.loads(raw)["headers"]["id"] for raw in self.broker.waiting(INGRESS_QUEUE)]

    def requests(self) -> list[Any]:
        """Return the bodies of the control requests that were sent, the first first."""
        return [json.loads(base64.b64decode(json.loads(raw)["body"])) for raw in self.broker.waiting(CONTROL_QUEUE)]


@pytest.fixture
def stack() -> Away:
    return Away()


def made(stack: Away) -> Session:
    app = use(Celery("again", set_as_current=False), stack.broker)
    link = Link(app, MemoryStore(stack.broker), "memory")  # type: ignore[arg-type]
    return Session("job", Settings(connect_timeout_s=0.2, outage_s=0.2), client_id=None, link=link)


@pytest.fixture
def session(stack: Away) -> Iterator[Session]:
    session = made(stack)
    for ready in session.start():
        ready.result(60)
    yield session
    stack.away = False
    session.stop()


def flush(session: Session) -> None:
    """Return once everything is sent that was given before."""
    session.wait_for(session.drain("none", draining=False))


def test_a_session_that_never_started_ends(stack: Away) -> None:
    session = made(stack)
    session.stop()
    with pytest.raises(ClientClosed):
        session.submit(Action(kind="my.task"))


def test_closing_while_the_broker_is_away_ends_what_waits(stack: Away, session: Session) -> None:
    stack.away = True
    waiting = session.submit(Action(kind="my.task"))
    session.stop(0.0)
    assert waiting.done()


def test_closing_while_the_store_answers_with_nonsense_ends_what_waits(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an answer of which redis-py makes no error of its own
    monkeypatch.setattr(MemoryStore, "publish", lambda *_: int("none"))
    waiting = session.submit(Action(kind="my.task"))
    session.stop(0.0)
    assert waiting.done()


def test_what_was_sent_does_not_fail_by_a_broker_that_is_away(stack: Away, session: Session) -> None:
    first = session.submit(Action(kind="my.task"))
    flush(session)
    # When it is submitted again while the broker is away
    stack.away = True
    session._inbox.send_again()
    second = session.submit(Action(kind="my.task"))
    # Then only what was never sent fails
    assert isinstance(second.future.exception(60), StackUnreachable)
    with pytest.raises(StackUnreachable):
        flush(session)
    assert not first.future.done()
    # And it is sent as soon as that goes
    stack.away = False
    session._inbox.send_again()
    flush(session)
    assert [header.get("again", False) for header in stack.headers()] == [False, True]


def test_large_arguments_that_the_store_has_lost_come_again_where_they_were(stack: Away, session: Session) -> None:
    handle = session.submit(Action(kind="cpu.exec", environment="e", arguments={"command": "x" * 100_000}))
    flush(session)
    (key,) = stack.headers()[0]["blobs"]
    stack.broker.keep(key, None, None)
    # When it is submitted again, then the first message still holds
    session._inbox.send_again()
    flush(session)
    assert [header["blobs"] for header in stack.headers()] == [[key], [key]] and not handle.future.done()
    assert stack.broker.value(key) == b"x" * 100_000


def test_small_calls_overtake_a_large_value_but_not_what_they_depend_on(stack: Away, session: Session) -> None:
    data, seen, sent = b"x" * (4 * PART_BYTES), list[tuple[list[str], list[Any]]](), dict[str, Handle[Any]]()

    def actions() -> list[str]:
        return [header.get("action_class") or header["kind"] for header in stack.headers()]

    def cancels() -> list[Any]:
        return [request["cancel"] for request in stack.requests() if "cancel" in request]

    def send(command: str, environment: str) -> None:
        place = calls.Place("job", f"of-{environment}", environment)
        action = calls.write_file(place, "/f", data) if command == "write" else calls.execute(place, command)
        sent[command] = session.submit(action)

    def happen() -> None:
        seen.append((actions(), cancels()))
        if len(seen) == 1:
            # Given calls that come while the first of four parts is on its way, of the same environment, of others, and of none
            send("same", "a")
            send("other", "b")
            send("more", "c")
            session.cancel_task(sent["other"].id)
            session.cancel_task(sent["same"].id)
        if len(seen) == 2:
            # And then one that ends a whole trajectory, and what comes after it
            session.cancel(trajectory="of-c", job=None)
            send("again", "c")

    stack.between_parts = happen
    send("write", "a")
    while len(seen) < 4:
        flush(session)
    send("last", "a")
    while sent["last"].id not in stack.ids():
        flush(session)
    # Then calls for others are sent after the first part, and their cancel
    of_other, of_same = ({"ids": [sent[command].id]} for command in ("other", "same"))
    assert seen[1] == (["other", "more"], [of_other])
    # And all that depends on the large one after it, in order: what ends a trajectory waits, and so does what comes after that
    assert seen[3] == (["other", "more"], [of_other])
    assert actions() == ["other", "more", "cpu.write_file", "same", "again", "last"]
    assert cancels() == [of_other, of_same, {"trajectory": "of-c", "job": "job", "ids": [sent["more"].id]}]


def write(environment: str, **more: Any) -> Action:
    """Return an action with a value of three parts."""
    return Action(kind="cpu.write_file", environment=environment, arguments={"path": "/f", "data": b"x" * (3 * PART_BYTES), **more})


def test_nothing_overtakes_what_is_in_one_batch_with_large_json(stack: Away, session: Session) -> None:
    sent, is_known = list[Handle[Any]](), threading.Event()

    def happen() -> None:
        assert is_known.wait(60)
        if len(sent) == 1:
            # Given a batch of large JSON and a call, which overtakes a large value
            sent.append(session.submit(Action(kind="gpu.score", service="rm", arguments={"items": ["x" * 1000] * 3000})))
            sent.append(session.submit(Action(kind="cpu.exec", environment="b")))
        elif len(sent) == 3:
            # And the next call of the same environment, while the parts of the JSON are on their way
            sent.append(session.submit(Action(kind="cpu.exec", environment="b")))

    stack.between_parts = happen
    sent.append(session.submit(write("a")))
    is_known.set()
    while sent[0].id not in stack.ids():
        flush(session)
    # Then the calls keep their order
    assert [id for id in stack.ids() if id in (sent[2].id, sent[3].id)] == [sent[2].id, sent[3].id]


def test_only_the_publishers_thread_sends_what_overtakes(stack: Away, session: Session) -> None:
    ids = list[list[str]]()

    def happen() -> None:
        stack.between_parts = lambda: None
        # When another thread puts a large value aside while one is on its way, and a call waits to overtake that
        session.submit(Action(kind="cpu.exec", environment="b"))
        other = threading.Thread(target=session.put_aside, args=(write("c"),))
        other.start()
        other.join()
        ids.append(stack.ids())

    stack.between_parts = happen
    sent = session.submit(write("a"))
    while sent.id not in stack.ids():
        flush(session)
    # Then that thread does not send it
    assert ids == [[]]


def test_a_large_value_that_is_on_its_way_is_not_sent_a_second_time(stack: Away, session: Session) -> None:
    def happen() -> None:
        stack.between_parts = lambda: None
        session._inbox.send_again()

    # Given actions with large values, all of which are to be submitted again while the first value is on its way
    stack.between_parts = happen
    sent = [session.submit(write(environment)) for environment in "ab"]
    while not {handle.id for handle in sent} <= {*stack.ids()}:
        flush(session)
    flush(session)
    # Then each is sent once, with one value in the store
    assert stack.ids() == [handle.id for handle in sent]
    assert len(stack.broker.keys(BLOB_KEY_PREFIX)) == 2


def test_an_argument_beside_a_large_one_that_is_no_json_ends_its_action_alone(stack: Away, session: Session) -> None:
    assert isinstance(session.submit(write("a", env={"A": object()})).future.exception(60), InvalidAction)
    flush(session)


@pytest.mark.parametrize("bad", ["\ud800", "", "a\0", "a" * 257])
def test_an_id_that_the_store_or_the_journal_cannot_hold_is_refused_and_holds_up_nothing_else(
    stack: Away, session: Session, bad: str
) -> None:
    with pytest.raises(InvalidAction, match="^task_id: must be 1 to 256 printable characters, not "):
        session.submit(Action(kind="my.task"), bad)
    session.submit(Action(kind="my.task"), f"{session.client_id}-good")
    flush(session)
    assert stack.ids() == [f"{session.client_id}-good"]


def test_what_may_have_been_sent_is_told_as_unknown_and_withdrawn(stack: Away, session: Session) -> None:
    # Given an open of which nobody knows whether the broker has it, and the close of another environment
    stack.answers_lost = True
    opening = calls.open_environment("job", trajectory="t")
    opened = session.open_environment(opening)
    closed = session.submit(calls.close_environment(calls.Place("job", "t", "other")))
    # When the broker is away for too long
    told = opened.future.exception(60)
    # Then its end is unknown, and so is that of the close
    assert isinstance(told, Unknown) and told.id == opened.id and opened.id in str(told)
    assert isinstance(closed.future.exception(60), Unknown)
    # And once the broker is back, the environments are closed
    stack.answers_lost = False
    stack.broker.purge(INGRESS_QUEUE)
    flush(session)
    assert {"cancel": {"ids": [opened.id]}} in stack.requests()
    assert {header["environment"] for header in stack.headers() if header["kind"] == "cpu.close"} == {opening.environment, "other"}


def test_what_was_cancelled_is_cancelled_again(stack: Away, session: Session) -> None:
    handle = session.submit(Action(kind="my.task"))
    session.wait_for(session.cancel_task(handle.id))
    # When the broker comes back without what it had
    stack.broker.restart(keeps=False)
    session._inbox.send_again()
    flush(session)
    # Then the cancel comes with its action, however often that comes: the feed submits it again, too, once it finds its connection broken
    assert {header["again"] for header in stack.headers()} == {True}
    assert {"cancel": {"ids": [handle.id]}} in stack.requests()


def test_a_deaf_subscription_is_noticed_and_made_anew(
    peer: Any, settings: Settings, redis_urls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given results that are stored but never published
    monkeypatch.setattr("tangram.feed.SWEEP_S", 0.2)
    monkeypatch.setattr("tangram.feed._LISTEN_S", 0.1)
    peer.behave = lambda seen: peer.HOLD
    with Client(settings=settings) as client, redis_urls.client() as redis:
        handle = client.submit(Action(kind="my.task"))
        redis.set(RESULT_KEY_PREFIX + handle.id, '{"status": "SUCCESS", "result": 5}')
        assert handle.result(20) == 5
        # And the one after it is pushed again
        peer.behave = lambda seen: 6
        assert client.submit(Action(kind="my.task")).result(20) == 6


def test_a_subscription_that_is_only_behind_is_kept(stack: Away, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    result = b'{"status": "SUCCESS", "result": 5}'
    made_anew, looked_again = [], threading.Event()

    def end_meanwhile(operation: str, name: str) -> None:
        if operation == "subscribe":
            made_anew.append(name)
        if operation == "mget" and name.endswith(waiting.id):
            looked_again.set()
        if operation == "mget" and name.endswith(first.id):
            # A ping of the client's own is answered before the result is published.
            stack.broker.wake()
            stack.broker.keep(name, result, None)
            stack.broker.publish(name, result)

    # Given an action whose result is stored and published while the feed reads the keys
    monkeypatch.setattr("tangram.feed.SWEEP_S", 0.2)
    monkeypatch.setattr("tangram.feed._LISTEN_S", 0.1)
    monkeypatch.setattr("tangram.feed._ANSWER_S", 60.0)
    session: Session = request.getfixturevalue("session")
    first = session.submit(Action(kind="my.task"))
    waiting = session.submit(Action(kind="my.task"))
    monkeypatch.setattr(stack.broker, "called", end_meanwhile)
    # When it has the result and looks again
    assert first.result(60) == 5
    assert looked_again.wait(60)
    # Then it has not subscribed again for it
    assert not made_anew


@pytest.mark.parametrize("first", ["publisher", "feed"])
def test_what_processes_submit_under_one_id_runs_once(peer: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    publish = Publisher._publish

    def publish_late(publisher: Publisher, batch: Any) -> None:
        assert wait_until(lambda: publisher._inbox.waiting_for("shared-1") is None, 60)
        publish(publisher, batch)

    # Given two processes that count as one client; when one submits an action under an id, and the other one after its end
    action = Action(kind="my.task")
    for number in range(2):
        if number:
            # Nobody announces the result again, so the feed looks for it.
            monkeypatch.setattr("tangram.feed.SWEEP_S", 0.2)
            monkeypatch.setattr("tangram.feed._LISTEN_S", 0.1)
        if number and first == "feed":
            monkeypatch.setattr(Publisher, "_publish", publish_late)
        session = Session("default", settings, client_id="shared")
        for ready in session.start():
            ready.result(60)
        peer.behave = lambda seen: f"run {len(peer.seen)}"
        result = session.submit(action, "shared-1").result(60)
        # What has been sent before this has been seen. (A client that is impatient may send this one again.)
        session.submit(Action(kind="my.mark")).result(60)
        session.stop()
        assert result == "run 1"
    assert peer.kinds().count("my.task") == 1
