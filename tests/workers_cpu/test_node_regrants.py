"""What a node makes of grants, of changes that come before or after a claim or out of order, and of what its commands get and leave."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from celery import Celery

from app.action_task import ActionTask, Call
from app.broker.memory_store import MemoryBroker, MemoryStore
from tangram.wire import GRANT_HEADER, WireGrant
from tests.live.test_live_claims import DESCRIPTION
from tests.live.test_live_claims import GRANT as GRANTED
from workers.cpu.abstract import Holding, Usage
from workers.node import Node
from workers.regrants import holding_of

GRANT: WireGrant = {**GRANTED, "epoch": 1, "most_units": 4}
BACK = Holding(background=True)


@pytest.fixture
def node() -> Node:
    """Return a node that has not joined: what it would report stays with it."""
    store = MemoryStore(MemoryBroker())
    return Node(Celery(set_as_current=False), store, DESCRIPTION, beat_s=1.0, usage_s=1.0, timeout_s=60.0)  # type: ignore[arg-type]


def held(grant: WireGrant) -> tuple[list[int], int, bool]:
    return grant["core_ids"], grant["units"], grant["background"]


def claim(node: Node, action_id: str = "a", **other: object) -> Call:
    """Claim the try of `GRANT`, or of one that is a bit other."""
    call = node.claim(action_id, {**GRANT, **other}, {})  # type: ignore[typeddict-item]
    assert call is not None
    return call


def run(node: Node, action_id: str = "a", **other: object) -> list[Holding]:
    """Have the try run; return the list of grants that its processes get from then on."""
    seen: list[Holding] = []
    node.attach(claim(node, action_id, **other), lambda reason: None, seen.append)
    return seen


def test_a_task_of_a_user_reads_what_it_holds_now(node: Node) -> None:
    def build() -> None: ...

    task = Celery(set_as_current=False).task(base=ActionTask, name="build")(build)
    task.push_request(**{GRANT_HEADER: GRANT}, tangram_call=claim(node))
    assert task.grant["core_ids"] == [2]
    node.regrant(1, 1, [["a", 1, [2, 3], False]])
    assert (task.grant["core_ids"], task.grant["units"]) == ([2, 3], 2)


def test_a_message_changes_calls_in_its_order(node: Node) -> None:
    asked: list[tuple[str, Holding]] = []
    for action_id in "ab":
        call = claim(node, action_id, units=3)
        node.attach(call, lambda reason: None, lambda holding, action_id=action_id: asked.append((action_id, holding)))  # type: ignore[misc]
    asked.clear()
    wrong: list[object] = [["a"], ["b", 1, [-1], False], ["b", 1, [2], True], "b", None, ["c", "one", [0], False], ["a", 2, [0], False]]
    node.regrant(1, 1, [*wrong, ["b", 1, [], True], *wrong, ["a", 1, [2, 3], False]])
    # Then they do, in this order, and in the background the DoP stays
    assert asked == [("b", BACK), ("a", Holding((2, 3)))]
    assert held(node.call("b").grant) == ([], 3, True)
    assert held(node.call("a").grant) == ([2, 3], 2, False)


def test_a_change_that_fails_is_tried_once_more_and_keeps_no_other_from_being_made(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    # Given a call whose grant cannot be changed at the first try, and another call
    seen: list[Holding] = []

    def resize(holding: Holding) -> None:
        seen.append(holding)
        if seen.count(holding) < least_tries:
            raise OSError("the engine does not answer")

    least_tries = 1
    node.attach(claim(node), lambda reason: None, resize)
    other = run(node, "b")
    least_tries = 2
    node.regrant(1, 1, [["a", 1, [], True]])
    assert seen[1:] == [BACK, BACK]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    # When no try works; then the log says of which action, and the next one is changed
    least_tries = 9
    node.regrant(1, 2, [["a", 1, [0], False], ["b", 1, [], True]])
    assert seen[3:] == [Holding((0,))] * 2
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "action a " in error
    assert other == [Holding((2,)), BACK]


RUNS, RUNS_LATER = {"epoch": 1}, {"epoch": 2}
"""In the place of a message: the try comes and runs, with a grant of this scheduler."""
TO_BACK, TO_ONE, TO_TWO = ["a", 1, [], True], ["a", 1, [3], False], ["a", 1, [0, 1], False]
ONE = Holding((3,))


@pytest.mark.parametrize(
    ("steps", "seen", "units"),
    [
        ([RUNS, (1, 1, [TO_BACK, TO_ONE])], [Holding((2,)), BACK, ONE], 1),
        ([RUNS, (1, 1, [TO_ONE]), (1, 2, [["a", 2, [0, 1], False], ["a", 0, [0, 1], False]])], [Holding((2,)), ONE], 1),
        ([RUNS, (1, 1, [TO_BACK]), (1, 2, [TO_ONE]), (1, 1, [TO_BACK])], [Holding((2,)), BACK, ONE], 1),
        ([(1, 7, [TO_BACK]), RUNS_LATER, (1, 8, [TO_TWO])], [Holding((2,))], 1),
        ([(1, 1, [TO_TWO]), (1, 2, [TO_BACK]), RUNS], [BACK], 2),
        ([(1, 9, [TO_TWO]), (2, 1, [TO_BACK]), RUNS_LATER], [BACK], 1),
    ],
    ids=["two in one message", "of other tries", "one comes twice", "older than the grant", "before the grant", "of an earlier scheduler"],
)
def test_what_a_call_gets_of_messages_that_come_as_they_may(node: Node, steps: list[Any], seen: list[Holding], units: int) -> None:
    found: list[Holding] = []
    for step in steps:
        if isinstance(step, dict):
            found = run(node, **step)
        else:
            node.regrant(*step)
    assert found == seen
    # Then the grant says the same, and has the DoP of the last change by its own scheduler that had cores
    assert (holding_of(node.call("a").grant), node.call("a").grant["units"]) == (seen[-1], units)


MESSAGES: list[tuple[int, int, list[object]]] = [
    (1, 9, [["a", 1, [0, 1], False]]),
    (2, 1, [["a", 1, [], True], ["b", 1, [], True]]),
    (2, 2, [["a", 1, [3], False]]),
]


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("claimed_after", [0, 1, 2, 3])
def test_messages_that_pass_each_other_end_in_the_newest_change(node: Node, order: tuple[int, ...], claimed_after: int) -> None:
    # Given three messages, the first of the scheduler before; when they come in any order, and the call after any of them
    seen: list[Holding] = []
    for number, index in enumerate(order):
        if number == claimed_after:
            seen = run(node)
        node.regrant(*MESSAGES[index])
    if claimed_after == 3:
        seen = run(node)
    # Then the newest change stands, and nothing older came after it
    assert seen[-1] == Holding((3,))
    assert seen.count(Holding((3,))) == 1
    assert held(node.call("a").grant) == ([3], 1, False)
    # And a call that the newest message does not name has the newest one that names it
    assert run(node, "b") == [BACK]


def test_a_change_of_the_next_try_is_kept_for_it_while_the_last_one_runs(node: Node) -> None:
    seen = run(node)
    node.regrant(1, 1, [["a", 2, [0, 1], False]])
    assert seen == [Holding((2,))]
    assert run(node, attempt=2) == [Holding((0, 1))]


def test_what_a_command_gets_in_the_background_is_reported_as_it_gets_on(node: Node) -> None:
    got: list[float] = []
    node.attach(claim(node), lambda reason: None, None, lambda: Usage(cpu_s=100.0 + got[-1], background_cpu_s=got[-1]))

    def sent(background_cpu_s: float) -> list[float]:
        got.append(background_cpu_s)
        return [report["background_cpu_s"] for report in node.used()]

    # When the node reports; then that is said whenever it is more by 0.05 s and a fifth
    figures = (0.0, 0.04, 0.05, 0.09, 0.11, 0.5, 0.59, 0.61, 0.61)
    assert [said for s in figures for said in sent(s)] == [0.05, 0.11, 0.5, 0.61]


def test_what_a_report_of_use_says(node: Node) -> None:
    for action_id, usage in (("a", Usage(cpu_s=2.0, background_cpu_s=1.5)), ("b", Usage(cpu_s=9.0)), ("c", None)):
        node.attach(claim(node, action_id), lambda reason: None, None, lambda usage=usage: usage)  # type: ignore[misc]
    report = {"type": "used", "id": "a", "attempt": 1, "background_cpu_s": 1.5}
    assert node.used() == [report]
    node.finish(claim(node, "d"))
    node.finish(node.call("a"))
    assert node.used() == []


def test_the_end_says_what_was_waited(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    call = claim(node, core_ids=[], background=True)
    call.background_s, call.slept_s, call.execution_s = 1.5, 1.0, 1.5
    monkeypatch.setattr(node._reporter, "put", said.append)
    node.finish(call)
    assert [said[0][word] for word in ("type", "waited_s", "slept_s", "execution_s")] == ["finished", 2.5, 1.0, 0.5]


def test_a_try_that_waits_for_a_thread_is_at_hand(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a message that has come and is not called yet; then beats show it, and the scheduler, which asks for it, is not told otherwise
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(node._reporter, "put", said.append)
    node.note_arrival("a")
    node.tell("a", 1)
    assert (node._describe()["running"], said) == (["a"], [])
    node.tell("b", 1)
    assert said == [{"type": "unknown", "id": "b", "attempt": 1}]


def test_the_end_of_an_old_try_ends_no_newer_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a call whose action came here again, as its node was taken for lost meanwhile
    said: list[dict[str, Any]] = []
    old, newer = claim(node), claim(node, attempt=2)
    node.attach(newer, lambda reason: None, None, lambda: Usage(cpu_s=2.0, background_cpu_s=1.5))
    # When the old try ends; then the newer one still runs, and the scheduler, which asks for it, is not told otherwise
    node.finish(old)
    monkeypatch.setattr(node._reporter, "put", said.append)
    node.tell("a", 2)
    assert (said, node.call("a"), [each["attempt"] for each in node.used()]) == ([], newer, [2])
    node.finish(newer)
    assert [(report["type"], report["attempt"]) for report in said] == [("finished", 2)]
