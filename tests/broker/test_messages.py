"""The scheduler's end of a broker: what is sent arrives, once and in order, and comes again unless it is acknowledged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.broker.transport import MOST_AT_ONCE
from app.local.processes import wait_until
from tangram import Action, Cost
from tangram.errors import StackUnreachable
from tangram.wire import CONTROL, CONTROL_QUEUE, EVENTS, INGRESS, INGRESS_QUEUE
from tests.broker.conftest import NODE, Stack, take

MESSAGE = json.dumps(
    {"body": "W10=", "headers": {"id": "a"}, "properties": {"content_type": "application/json", "content_encoding": "utf-8"}}
)


def ids(received: list[Any]) -> list[str]:
    return [one.id for one in received]


def test_what_is_sent_arrives_once_in_order_and_a_full_batch_is_not_all(stack: Stack) -> None:
    # Given more events than one batch holds, a request and an action sent twice
    stack.put(EVENTS, *range(2 * MOST_AT_ONCE + 20))
    stack.put(CONTROL, {"cancel": {"ids": ["a"]}})
    stack.put_actions("a", "a")
    transport, found = stack.open(), list[Any]()

    def all_came() -> bool:
        batch = transport.receive(0.1)
        # Then a full batch says that more may wait, and any other one that nothing does
        assert transport.caught_up == (len(batch) < MOST_AT_ONCE)
        transport.flush(batch)
        found.extend(batch)
        return len(found) >= 2 * MOST_AT_ONCE + 23

    assert wait_until(all_came, 60)
    # Then each queue came whole and in order; what came twice is handed on twice
    assert [one.body for one in found if one.sort == "events"] == list(range(2 * MOST_AT_ONCE + 20))
    assert [one.body for one in found if one.sort == "control"] == [{"cancel": {"ids": ["a"]}}]
    assert [(one.id, one.task) for one in found if one.sort == "action"] == [("a", "my.task")] * 2
    # And nothing comes to the next one
    transport.close()
    second = stack.open(2)
    stack.put_actions("last")
    assert ids(take(second, bool)) == ["last"]


def test_what_was_not_acknowledged_comes_again_in_order(stack: Stack) -> None:
    # Given a scheduler that is gone before it has acknowledged all
    stack.put_actions("a", "b", "c", "d")
    first = stack.open()
    received = take(first, lambda found: len(found) == 4, keep=True)
    first.flush(received[:2])
    first.close()
    stack.put_actions("e")
    # When the next one opens, then the rest comes first
    assert ids(take(stack.open(2), lambda found: len(found) == 3)) == ["c", "d", "e"]


def test_what_a_replaced_scheduler_takes_comes_to_the_leader_though_it_lives(stack: Stack) -> None:
    # Given a scheduler that has taken an action and waits for more, and the one that replaces it
    stack.put_actions("a")
    first = stack.open()
    take(first, bool, keep=True)
    first.receive(0.0)
    second = stack.open(2)
    # When another one comes, which goes to the first if that was first to wait
    stack.put_actions("b")
    if not stack.rescues:
        first.close()
    take(second, lambda found: set(ids(found)) == {"a", "b"})


def test_a_lost_connection_raises_nothing_and_loses_nothing(stack: Stack) -> None:
    # Given a scheduler with two actions that it has not acknowledged, and orders of which one is still to be sent
    stack.put_actions("a", "b")
    transport = stack.open()
    received = take(transport, lambda found: len(found) == 2, keep=True)
    transport.send_action("n", MESSAGE, {"node": "n", "units": 1, "attempt": 1})
    transport.flush()
    transport.send_action("n", MESSAGE, {"node": "n", "units": 1, "attempt": 2})
    stack.cut()
    again = take(transport, lambda found: len(found) == 2)
    # Then that is counted, what was taken comes again, an old ticket does no harm, and the order goes out
    assert transport.lost_connections == 1 and ids(again) == ["a", "b"]
    transport.flush(received)
    transport.flush()
    assert {message.headers["grant"]["attempt"] for message in stack.taken(NODE, 2)} == {1, 2}
    assert transport.lost_connections == 1


@pytest.mark.parametrize("stack", ["memory", "redis"], indirect=True)
def test_a_broker_that_is_away_is_waited_for(stack: Stack) -> None:
    transport = stack.open()
    with stack.away("broker"):
        # Given a broker that is away; when the scheduler goes on, then nothing raises, and it is not caught up
        transport.send_control("n", "tangram.stop", {"id": "a"})
        assert transport.receive(0.1) == [] and not transport.caught_up
        transport.flush()
        # But who begins now is told
        with pytest.raises(StackUnreachable, match="cannot be reached"):
            stack.open(2)
    # When it is back, then the order goes out, with nobody who reads its result
    assert wait_until(lambda: transport.receive(0.1) == [] and transport.caught_up, 60)
    transport.flush()
    sent = stack.taken(NODE, 1)
    assert (sent[0].headers["task"], sent[0].payload[1], sent[0].headers["ignore_result"]) == ("tangram.stop", {"id": "a"}, True)
    assert transport.lost_connections == 1


def test_an_action_goes_on_to_its_node_as_its_client_sent_it(stack: Stack) -> None:
    action = Action(kind="my.task", cost=Cost.of(cores=1), arguments={"n": [1, "é"]})
    handle = stack.session().submit(action)
    transport = stack.open()
    received = take(transport, bool)[0]
    grant = {"node": "n", "units": 1, "attempt": 1}
    transport.send_action("n", received.message, grant)
    transport.flush()
    # Then the node has the same Celery task, and its grant
    sent = stack.taken(NODE, 1)
    headers = sent[0].headers
    assert (headers["id"], headers["task"], headers["grant"]) == (handle.id, "my.task", grant)
    assert headers["tangram"] == received.header and sent[0].payload[1] == {"n": [1, "é"]}


class Touches:
    """What touches a file wherever its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_what_is_no_message_is_dropped_unread_and_comes_no_more(stack: Stack, tmp_path: Path) -> None:
    # Given a pickle, bytes that no kombu wrote, and actions that are none, between two messages
    stack.put(CONTROL, "first")
    stack.put(CONTROL, Touches(tmp_path / "touched"), serializer="pickle")
    stack.put_bytes(CONTROL_QUEUE, b"\xff no message")
    stack.put_bytes(INGRESS_QUEUE, b"[]")
    for headers in ({}, {"id": 7, "task": "my.task"}, {"id": "a"}):
        stack.put(INGRESS, [], headers=headers)
    stack.put(CONTROL, "last")
    # When all is taken; then only the messages come
    transport = stack.open()
    assert [one.body for one in take(transport, lambda found: len(found) == 2)] == ["first", "last"]
    assert not (tmp_path / "touched").exists()
    # And the next scheduler does not meet the others again
    stack.put_actions("a")
    assert ids(take(transport, bool)) == ["a"]
    transport.close()
    stack.put_actions("b")
    assert ids(take(stack.open(2), bool)) == ["b"]
