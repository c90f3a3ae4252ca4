"""Several shards in one database: each scheduler goes on with what is its own."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from app.journal.status import status
from app.journal.unfinished import set_aside
from app.journal.writing import SqlJournal
from scheduler.live.entries import MessageFailed
from scheduler.model.commands import NoteDraining
from tangram import clock
from tangram.errors import StackUnreachable
from tangram.wire import DISOWNED, claim_key
from tests.scheduler.deployed import Deployment
from tests.sql import make, tables


def failed(epoch: int) -> MessageFailed:
    return MessageFailed(message="tick", kind="tick", action=None, epoch=epoch, traceback="Broken: so", at=100.0)


def test_a_scheduler_goes_on_with_what_is_of_its_shard(engine: Engine) -> None:
    with SqlJournal(engine) as first, SqlJournal(engine, shard=1) as second:
        # Given two shards with an action, an environment and a node each, and both have failed twice on messages of the same key
        now = clock.time()
        for journal, of in ((first, "0"), (second, "1")):
            received = [make.received(f"a{of}", now, environment=f"e{of}"), make.received(f"done{of}", now, environment=f"e{of}")]
            stands = [make.environment("open", now, id=f"e{of}"), make.environment("open", now, id=f"gone{of}")]
            journal.write([*received, make.granted(f"done{of}", now), make.ended(f"done{of}", now), *stands])
            journal.write([make.environment("closed", now, id=f"gone{of}"), make.node("up", now, name=f"n{of}")])
            journal.write([NoteDraining(name=f"n{of}", draining=True), failed(1)])
            journal.write([failed(2)])
        # When the next schedulers read what there is
        for journal, of in ((first, "0"), (second, "1")):
            found = journal.unfinished()
            # Then each finds its own
            assert [one.id for one in found.actions] == [f"a{of}"]
            assert [one.id for one in found.environments] == [f"e{of}"]
            assert [one.id for one in found.gone] == [f"gone{of}"]
            assert [one.name for one in found.nodes] == [f"n{of}"]
            assert list(found.ended) == [f"done{of}"]
            # But each knows all nodes that drain, since a drained node may join another shard
            assert list(found.draining) == ["n0", "n1"]
            assert [(one.message, one.failures) for one in found.set_aside] == [("tick", 2)]
    # And people see all of them
    with engine.connect() as connection:
        assert len(set_aside(connection)) == 2
    assert {node.name for node in status(engine, now).nodes} == {"n0", "n1"}


def test_a_node_that_has_joined_another_shard_is_changed_by_that_alone(engine: Engine) -> None:
    def written() -> tuple[str, int, bool]:
        [row] = tables.rows(engine, "nodes")
        return row["state"], row["shard"], bool(row["draining"])

    with SqlJournal(engine) as first, SqlJournal(engine, shard=1) as second:
        first.write([make.node("up", 100.0)])
        second.write([make.node("up", 200.0)])
        assert written() == ("up", 1, False)
        # Its old shard finds it silent, then lost; and is asked to drain it
        first.write([make.node("silent", 210.0)])
        first.write([make.node("lost", 270.0), NoteDraining(name="n1", draining=True)])
        assert written() == ("up", 1, False)
        second.write([make.node("lost", 300.0)])
        first.write([make.node("up", 310.0)])
        assert written() == ("up", 0, False)


def test_what_ran_on_a_node_that_has_joined_another_shard_ends_as_its_worker_has_stored_it(engine: Engine) -> None:
    with SqlJournal(engine) as first, SqlJournal(engine, shard=1) as second:
        # Given a node with an open environment, one that is being opened, and actions, some of which have ended with their results stored
        old = Deployment(first, clock.time())
        old.start()
        old.join()
        old.open("e")
        old.open("f", finish=False)
        old.submit("done", "broken", "gone")
        old.submit("again", "twice", idempotent=True)
        old.exec("in-e", "e")
        result = {"status": "succeeded"}
        old.stored(**{"done": 1, "broken": ValueError("no"), "twice": 2, "open-f": result, "in-e": result})
        # When it joins another shard before they are reported, and a scheduler is to take over
        second.write([make.node("up", old.now, name="n")])
        # Then it does not while the store does not say what has ended
        old.away()
        with pytest.raises(StackUnreachable, match="how actions have ended that are set aside or whose node is gone"):
            old.start()
        old.back()
        old.start()
        # Then they have ended as they did; what else ran there is lost, or waits again; and so the environments
        succeeded = dict.fromkeys(("open-e", "done", "twice", "open-f", "in-e"), ("succeeded", True))
        assert old.ends() == {**succeeded, "broken": ("failed", True), "gone": ("lost", False)}
        assert old.waiting == ["again"]
        assert {row["id"]: row["state"] for row in tables.rows(engine, "environments")} == {"e": "lost", "f": "lost"}
        # And what its worker stores of what was given up counts no more
        claims = {name: old.broker.value(claim_key(name, 1)) for name in ("done", "gone", "again")}
        assert claims == dict.fromkeys(claims, DISOWNED.encode())
