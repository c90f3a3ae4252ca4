"""Which tries of actions a node claims, what it makes of changes that come before or after a claim or out of order, and what it reports."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from celery import Celery

from app.action_task import ActionTask, Call
from app.broker.memory_store import MemoryBroker, MemoryStore
from tangram.wire import CLAIM_KEY_PREFIX, CLAIM_TTL_S, GRANT_HEADER, WireGrant
from tests import nodes
from tests.nodes import GRANT
from workers.cpu.abstract import Holding, Usage
from workers.node import Node
from workers.regrants import holding_of

BACK = Holding(background=True)


@pytest.fixture
def node() -> Node:
    return nodes.node_of()


def held(grant: WireGrant) -> tuple[list[int], int, bool]:
    return grant["core_ids"], grant["units"], grant["background"]


def claim(node: Node, action_id: str = "a", **other: object) -> Call:
    call = nodes.claim(node, action_id, **other)
    assert call is not None
    return call


def run(node: Node, action_id: str = "a", **other: object) -> list[Holding]:
    """Have the try run; return the list of grants that its processes get from then on."""
    seen: list[Holding] = []
    node.attach(claim(node, action_id, **other), lambda reason: None, seen.append)
    return seen


def test_a_grant_of_a_scheduler_that_was_replaced_or_for_the_worker_before_is_dropped(node: Node) -> None:
    # Given a node that has had a grant of one scheduler; when one of an earlier scheduler comes; then it is dropped, and no later one is
    claim(node)
    assert nodes.claim(node, "late", epoch=0) is None
    claim(node, "next", epoch=2)
    assert nodes.claim(node, "before", epoch=2, incarnation="that of before") is None
    claim(node, "now", epoch=2, incarnation=node._incarnation)


def test_a_node_claims_what_it_is_granted_once_the_store_answers_with_sense() -> None:
    # Given a store that answers with nonsense, of which redis-py makes no error of its own, and then as it should
    class Nonsense(MemoryStore):
        answers = iter(["none", "1"])

        def set(self, *args: Any, **options: Any) -> bool | None:
            return super().set(*args, **options) if int(next(self.answers)) else None

    claim(nodes.node_of(Nonsense(MemoryBroker())))


def test_a_claim_outlives_the_timeout_of_its_action() -> None:
    # Given an action that may run for longer than claims are kept beyond that
    store, timeout_s = MemoryStore(MemoryBroker()), 3.0 * CLAIM_TTL_S
    assert nodes.node_of(store).claim("a", GRANT, {"timeout_s": timeout_s}) is not None
    assert store.pttl(f"{CLAIM_KEY_PREFIX}a:1") > 1000 * (timeout_s + CLAIM_TTL_S / 2)


def test_a_node_that_leaves_stops_what_runs_before_it_waits_for_its_reports(node: Node) -> None:
    """Else what the scheduler has begin elsewhere at once runs at both nodes until the last report is out."""
    were_out = list[bool]()
    node.attach(claim(node), lambda _: were_out.append(node._reporter.has_joined.is_set()))
    node.leave()
    assert were_out == [False]


def test_a_stop_that_overtakes_its_grant_stops_the_call_at_once(node: Node) -> None:
    # Given a stop of a try that has not come; when it comes and begins; then it is stopped, and the next try is not
    node.stop("a", 1, "its job was cancelled")
    call, stopped = claim(node), list[str]()
    node.attach(call, stopped.append)
    assert stopped == ["its job was cancelled"]
    node.finish(call)
    assert claim(node, attempt=2).cancel_reason == ""


def test_a_node_that_leaves_stops_what_runs_and_claims_nothing_more(node: Node) -> None:
    said: list[str] = []
    node.attach(claim(node), said.append)
    node.leave(0.0)
    assert said == ["node n is being stopped"] and nodes.claim(node, "next") is None


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
        ([RUNS, (1, 1, [["a", 2, [0, 1], False]]), {"attempt": 2}], [Holding((0, 1))], 2),
        ([(1, 7, [TO_BACK]), RUNS_LATER, (1, 8, [TO_TWO])], [Holding((2,))], 1),
        ([(1, 1, [TO_TWO]), (1, 2, [TO_BACK]), RUNS], [BACK], 2),
        ([(1, 9, [TO_TWO]), (2, 1, [TO_BACK]), RUNS_LATER], [BACK], 1),
    ],
    ids=[
        "two at once",
        "of other tries",
        "one comes twice",
        "of the next try",
        "older than the grant",
        "before it",
        "of an earlier scheduler",
    ],
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
    assert said == [{"type": "unknown", "id": "b", "attempt": 1, "at": said[0]["at"]}]


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
