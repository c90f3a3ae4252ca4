"""Batches do not matter: entries written one by one, together, or anyhow between leave the same rows."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event

from app.journal.writing import SqlJournal
from scheduler.live.entries import EndsPublished, Entry, InstancesForgotten, MessageFailed
from scheduler.model.lifecycle import ENVIRONMENT, EnvironmentState
from tests.sql import make, tables

KINDS = ("action", "action", "action", "resize", "resize", "told", "redelivery", "environment", "node", "instance", "forget", "failure")


@st.composite
def histories(draw: st.DrawFn) -> list[Entry]:
    """Draw entries of a few actions, environments and nodes that live side by side, with redelivered messages."""
    entries: list[Entry] = []
    attempts: dict[str, int] = {}
    states: dict[str, str] = {}
    environments: dict[str, EnvironmentState] = {}
    for at in range(1, draw(st.integers(2, 30))):
        id = draw(st.sampled_from("abc"))
        what = draw(st.sampled_from(KINDS))
        if what == "environment":
            choices = sorted(ENVIRONMENT.after(environments.get(id)))
            if choices:
                environments[id] = draw(st.sampled_from(choices))
                entries.append(make.environment(environments[id], float(at), id=id, reason=f"reason {at}"))
        elif what == "node":
            services = {draw(st.sampled_from("xy")): {"seen": at}}
            entries.append(make.node(draw(st.sampled_from(["up", "silent", "lost", "left"])), float(at), name=id, services=services))
        elif what == "instance":
            state = draw(st.sampled_from(["absent", "resident", "host"]))
            entries.append(make.instance(state, float(at), node=id, cell_ids=draw(st.sampled_from([(0,), (0, 1)])), starts=at))
        elif what == "forget":
            entries.append(InstancesForgotten(node=id, at=float(at), reason="joined anew"))
        elif what == "failure":
            epoch, seen_at = at // 5, float(at - at % 5)  # a scheduler fails once; what it writes twice is the same
            entries.append(MessageFailed(message=id, kind="action", action=id, epoch=epoch, traceback="", at=seen_at))
        elif what == "told" and states.get(id) == "ended":
            entries.append(EndsPublished(ids=(id,)))
        elif id not in states or what == "redelivery":
            states.setdefault(id, "waiting")
            entries.append(make.received(id, float(draw(st.integers(1, at))), job=draw(st.sampled_from(["j", "k"]))))
        elif id in attempts and what == "resize":
            # One that crosses with the end of its try, or of an earlier one, changes nothing.
            core_ids = tuple(draw(st.sets(st.integers(0, 3), max_size=3)))
            tried = draw(st.integers(1, attempts[id]))
            entries.append(make.resized(id, float(at), attempt=tried, core_ids=core_ids, units=1))
        elif states[id] == "running" and draw(st.booleans()):
            states[id] = "waiting"
            entries.append(make.requeued(id, float(at)))
        elif states[id] == "waiting" and draw(st.booleans()):
            attempts[id] = attempts.get(id, 0) + 1
            states[id] = "running"
            entries.append(make.granted(id, float(at), attempt=attempts[id], node=f"n{at}"))
        else:
            # Ended actions may be said to have ended again: two ends can cross on the wire.
            states[id] = "ended"
            status = draw(st.sampled_from(["succeeded", "lost"]))
            entries.append(make.ended(id, float(at), status=status, cpu_s=float(at), by_worker=status != "lost"))
    return entries


def write_in_batches(engine: Engine, entries: list[Entry], cuts: set[int]) -> None:
    with SqlJournal(engine) as journal:
        start = 0
        for cut in [*sorted(cuts), len(entries)]:
            journal.write(entries[start:cut])
            start = cut


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_batches_leave_the_same_rows(shared_engine: Engine, data: st.DataObject) -> None:
    entries = data.draw(histories())
    tables.empty(shared_engine)
    write_in_batches(shared_engine, entries, set(range(1, len(entries))))
    expected = tables.everything(shared_engine)
    cuts = data.draw(st.sets(st.integers(0, len(entries)), max_size=6))
    tables.empty(shared_engine)
    write_in_batches(shared_engine, entries, cuts)
    assert tables.everything(shared_engine) == expected


def test_a_batch_of_many_entries_takes_as_many_statements_as_one_of_few(shared_engine: Engine) -> None:
    tables.empty(shared_engine)
    sent: list[str] = []

    def statements(count: int) -> list[int]:
        """Return how many each of three batches takes: actions that are received, granted and ended."""
        counts = []
        with SqlJournal(shared_engine) as journal:
            for entry in (make.received, make.granted, make.ended):
                sent.clear()
                journal.write([entry(f"{count}-{number}") for number in range(count)])
                counts.append(len(sent))
        return counts

    def note(*call: Any) -> None:
        sent.append(call[2])

    event.listen(shared_engine, "before_cursor_execute", note)
    try:
        few = statements(4)
        assert all(few) and statements(64) == few
    finally:
        event.remove(shared_engine, "before_cursor_execute", note)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_batch_written_twice_leaves_the_same_rows(shared_engine: Engine, data: st.DataObject) -> None:
    # Given a batch whose commit arrived, though its answer did not
    entries = data.draw(histories())
    tables.empty(shared_engine)
    with SqlJournal(shared_engine) as journal:
        journal.write(entries)
        expected = tables.everything(shared_engine)
        journal.write(entries)
    assert tables.everything(shared_engine) == expected
