"""What the live service takes in: reports of workers and control requests of trainers, each on its own, and large arguments."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from scheduler.live.entries import ActionEnded, EndsPublished
from scheduler.live.heartbeats import HOUSEKEEPING_S
from scheduler.live.service import CoreBroken
from tangram.wire import BLOB_TTL_S, EVENTS_QUEUE, RESULT_KEY_PREFIX

from .deployed import NODE, Deployment


class Live(Deployment):
    """A scheduler with a node of one core."""

    def __init__(self) -> None:
        super().__init__()
        self.start()
        self.join(cores=1)

    def put_aside(self, *keys: str) -> None:
        """Have blobs that live for another moment."""
        for key in keys:
            self.broker.keep(key, b"large", 300.0)

    def kept(self) -> list[str]:
        """Return the blobs that live on for long."""
        return [key for key in self.broker.keys("") if (self.broker.left_s(key) or 0.0) > 300.0]


def finished(action_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "finished", "id": action_id, "attempt": 1, "status": "succeeded", **fields}


RESIDENT = {"type": "service", "node": "n", "service": "s", "cell_ids": [0], "state": "resident"}
WRONG: dict[str, object] = {
    "negative seconds": finished("a", cpu_s=-1.0),
    "no number": finished("a", execution_s="1.0"),
    "no finite number": finished("a", execution_s=math.nan),
    "a truth value for seconds": finished("a", cpu_s=True),
    "no such status": finished("a", status="done"),
    "no attempt": {"type": "finished", "id": "a", "status": "succeeded"},
    "an answer without a status": finished("a", answer={"tokens": 3}),
    "no such report": {"type": "resigned", "id": "a"},
    "no report": ["finished", "a"],
    "nothing": None,
    "an old worker's": {"type": "used", "id": "a", "attempt": 1},
    "a node without a name": {"type": "beat", "node": {**NODE, "name": ""}},
    "a node whose cores are words": {"type": "beat", "node": {**NODE, "cores": "many"}},
    "a node of endless cores": {"type": "beat", "node": {**NODE, "cores": math.inf}},
    "a node of more cores than there are": {"type": "beat", "node": {**NODE, "cores": 2**53}},
    "a node of memory below 0": {"type": "beat", "node": {**NODE, "memory_mb": -1}},
    "a node with a figure that no JSON has": {"type": "beat", "node": {**NODE, "load": math.nan}},
    "a node with a label that no database stores": {"type": "beat", "node": {**NODE, "labels": ["a\ud800", "a\0"]}},
    "a service that no database stores": {**RESIDENT, "service": "\ud800"},
    "a service of endless starts": {**RESIDENT, "starts": math.inf},
    "a service in no state": {**RESIDENT, "state": "asleep"},
    "a service without cells": {key: value for key, value in RESIDENT.items() if key != "cell_ids"},
    "a service of wordy memory": {**RESIDENT, "memory_mb": "much"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_report_that_makes_no_sense_takes_no_other_with_it(wrong: object, caplog: pytest.LogCaptureFixture) -> None:
    live = Live()
    live.submit("a", "b")
    assert live.running == ["a"]
    # When one message brings nonsense and its end, and the next one the same
    for _ in range(2):
        live.told(wrong, finished("a"))
    # Then it has ended, the other one has its core, the node is up, and one line says what was wrong
    assert live.running == ["b"]
    assert list(live.core.state.nodes) == ["n"]
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "\n" not in said[0]


EXCERPT = {"command": "false", "exit_code": 1, "stdout": "", "stderr": ""}


@pytest.mark.parametrize("wrong", ["no excerpt", {**EXCERPT, "command": "\ud800"}, {**EXCERPT, "exit_code": 1 << 31}, {"command": "false"}])
def test_an_excerpt_that_makes_no_sense_keeps_no_action_from_its_end(wrong: object, caplog: pytest.LogCaptureFixture) -> None:
    live = Live()
    live.submit("a")
    live.told(finished("a", excerpt=wrong))
    assert live.journal.entries[-1].end.status == "succeeded" and live.journal.entries[-1].excerpt is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_excerpt_of_another_try_is_not_kept_with_the_end() -> None:
    # Given an action that runs, and the report of a try that was given up
    live = Live()
    live.submit("a", "b")
    live.told(finished("a", attempt=7, excerpt=EXCERPT))
    assert live.running == ["a"]
    # When its node is lost, it has none; and an action whose end is reported with one has that
    live.told({"type": "left", "name": "n"}, finished("a", excerpt=EXCERPT))
    ends = [entry for entry in live.journal.entries if isinstance(entry, ActionEnded)]
    assert [(entry.end.id, entry.excerpt) for entry in ends] == [("a", None)]


def test_a_wish_for_memory_makes_sense(caplog: pytest.LogCaptureFixture) -> None:
    Live().told({"type": "memory_wanted", "environment": "e", "used_mb": 12, "allowance_mb": 20})
    assert not caplog.records


@pytest.mark.parametrize("body", [None, 5, {}, {"events": None}, {"events": {"type": "left"}}])
def test_a_message_of_no_reports_is_dropped(body: object) -> None:
    live = Live()
    live.broker.send(EVENTS_QUEUE, body)
    live.service.step()
    assert list(live.core.state.nodes) == ["n"]


NONSENSE: list[Any] = [None, {}, {"cancel": None}, {"cancel": {"ids": 7}}, {"cancel": {"job": ["a"]}}]
NONSENSE += [{"drain": body} for body in ({}, {"node": "n"}, {"node": "", "draining": True}, {"node": "n", "draining": "yes"}, "n")]


@pytest.mark.parametrize("body", NONSENSE)
def test_a_control_request_that_makes_no_sense_is_dropped(body: object) -> None:
    live = Live()
    live.submit("a", "b")
    live.asked(body)
    assert live.core.state.running["a"].stopping == ""
    assert (live.waiting, live.core.state.draining) == (["b"], {})


def test_what_was_decided_and_cannot_be_carried_out_stops_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given wires that fail otherwise than a broker does; when an action is to be sent; then nothing is half done in silence
    live = Live()
    monkeypatch.setattr(live.transport, "send_action", {}.__getitem__)
    with pytest.raises(CoreBroken, match="could not be carried out"):
        live.submit("a")


def test_what_the_journal_does_not_have_is_neither_sent_nor_acknowledged() -> None:
    # Given an action that was sent, acknowledged, and has ended
    live = Live()
    live.submit("a")
    assert live.broker.grants() == [("a", 1)] and live.broker.is_done()
    live.told(finished("a"))
    # When the next one comes, and the journal takes nothing more
    live.journal.is_full = True
    with pytest.raises(OSError, match="no space left"):
        live.submit("b")
    # Then its grant is kept back, and the broker has its message for the next scheduler
    assert live.broker.grants() == [("a", 1)] and not live.broker.is_done()


def test_an_end_is_told_once_the_store_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a result store that does not take the last of four ends, and actions that no worker ends, since no node has their label
    live = Live()
    monkeypatch.setattr("app.broker.transport._LONGEST_PAUSE_S", 0.0)
    live.away(f"{RESULT_KEY_PREFIX}d")

    def told() -> list[tuple[str, ...]]:
        return [tuple(entry.ids) for entry in live.journal.entries if isinstance(entry, EndsPublished)]

    # When the scheduler goes on; then the journal says of each that it is told when the store has it, and not before
    live.submit("a", "b", "c", "d", requires=["gpu"])
    live.service.step()
    assert told() == [("a", "b", "c")]
    live.back()
    live.service.step()
    # And so it does of what is told last before the scheduler stops
    live.service.finish()
    assert told() == [("a", "b", "c"), ("d",)]


def test_a_scheduler_that_leads_no_more_takes_nothing_in() -> None:
    live = Live()
    live.leads, live.now = False, live.now + HOUSEKEEPING_S
    live.submit("a")
    assert live.running == [] and not live.broker.is_done()
    assert live.service.step() is False


def test_a_message_that_comes_again_starts_nothing() -> None:
    live = Live()
    live.submit("a")
    # When its message comes again before and after its end; then it was granted once, and the second time its end is told once more
    live.submit("a")
    live.told(finished("a"))
    live.submit("a")
    assert (live.broker.grants(), live.running, live.broker.end("a")) == ([("a", 1)], [], ("failed", "result_lost"))


def test_what_a_client_asks_for_long_after_its_end_does_not_run_again() -> None:
    # Given an action that has ended so long ago that the next scheduler reads nothing of it, and the result is gone
    live = Live()
    live.submit("a")
    live.told(finished("a"))
    live.start()
    live.join(cores=1)
    # When its client asks again; then it is told so
    live.submit("a", again=True)
    assert (live.broker.grants(), live.running, live.broker.end("a")) == ([], [], ("failed", "result_lost"))


@pytest.mark.parametrize("kept", [False, True])
def test_a_result_that_the_store_lost_before_its_report_came_is_told_as_lost(kept: bool) -> None:
    # Given an action that its client submits again, since the store has come back, perhaps without the result
    live = Live()
    live.submit("a")
    live.submit("a", again=True)
    if kept:
        live.stored(a=7)
    # When the report of its end comes; then the client hears of one end
    live.told(finished("a"))
    live.service.step()
    assert live.broker.end("a") == (("succeeded", "") if kept else ("failed", "result_lost"))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("named", [{"ids": ["a"]}, {"job": "default", "trajectory": "t"}], ids=["by id", "by trajectory"])
def test_a_cancel_finds_the_submission_that_it_came_with(named: dict[str, Any], order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a submission and its cancel in one batch, in either order, since they come on two queues
    live = Live()
    receive = live.transport.receive
    monkeypatch.setattr(live.transport, "receive", lambda timeout_s: receive(timeout_s)[::order])
    live.send("a", trajectory="t")
    live.asked({"cancel": named})
    assert live.core.state.running["a"].stopping


@pytest.mark.parametrize("more", [{}, {"job": "default", "trajectory": "t"}])
def test_a_cancel_finds_a_submission_that_comes_after_it(more: dict[str, str]) -> None:
    # Since a replaced scheduler had taken it, or since its queue is read later
    live = Live()
    live.asked({"cancel": {"ids": ["a"], **more}})
    live.submit("a", "b")
    assert (live.core.state.running["a"].stopping != "", live.waiting) == (True, ["b"])


def test_large_arguments_are_kept_as_long_as_their_action_has_not_ended() -> None:
    # Given an action that waits, and one that runs, with arguments beside their messages
    live = Live()
    live.submit("a", blobs=["tangram-blob-1", "tangram-blob-shared-1"])
    live.submit("b", blobs=["tangram-blob-2", "celery-task-meta-x", 7])
    keys = ["tangram-blob-1", "tangram-blob-shared-1", "tangram-blob-2"]
    live.put_aside(*keys, "tangram-blob-3", "celery-task-meta-x")
    # When time goes by; then they are kept, and nothing else is
    live.now += BLOB_TTL_S / 2
    live.service.step()
    assert live.kept() == keys
    # And once the first one has ended, only the other one's; those that belong to it alone are removed
    live.told(finished("a"))
    live.put_aside(*keys)
    live.now += BLOB_TTL_S / 2
    live.service.step()
    assert live.kept() == ["tangram-blob-2"]
    assert live.broker.value("tangram-blob-1") is None and live.broker.value("tangram-blob-shared-1")


def test_large_arguments_of_what_was_lost_and_waits_again_are_there_for_it() -> None:
    # Given an action that may run twice, on a node that is lost
    live = Live()
    live.put_aside("tangram-blob-1")
    live.submit("a", blobs=["tangram-blob-1"], idempotent=True)
    assert live.running == ["a"]
    live.told({"type": "left", "name": "n"})
    # When it waits for another node, and is cancelled there
    live.now += BLOB_TTL_S / 2
    live.service.step()
    assert live.running == [] and live.broker.value("tangram-blob-1")
    live.asked({"cancel": {"ids": ["a"]}})
    live.now += BLOB_TTL_S / 2
    live.service.step()
    assert live.broker.value("tangram-blob-1") is None


@pytest.mark.parametrize(
    ("header", "kept"),
    [({"kind": "cpu.write_file", "environment": "closed"}, False), ({"queue_timeout_s": 1.0}, True)],
    ids=["never", "again"],
)
def test_large_arguments_of_what_was_refused_are_there_for_the_next_try_if_there_can_be_one(header: dict[str, Any], kept: bool) -> None:
    live = Live()
    live.put_aside("tangram-blob-1")
    live.submit("runs")
    live.submit("a", blobs=["tangram-blob-1"], **header)
    live.now += BLOB_TTL_S / 2
    live.service.step()
    assert live.running == ["runs"] and not live.core.state.waiting
    assert bool(live.broker.value("tangram-blob-1")) == kept
