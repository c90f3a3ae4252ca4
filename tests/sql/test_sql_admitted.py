"""What is let in must be fit for the journal: one action that is not would end every scheduler that receives it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import Engine

from app.journal.writing import SqlJournal
from tangram.action import Action, Cost
from tangram.elasticity import LARGEST_AMOUNT
from tangram.wire import LONGEST_ID
from tests.scheduler.deployed import Deployment
from tests.sql import tables


@pytest.fixture
def intake(journal: SqlJournal) -> Deployment:
    """Return a deployment without any node."""
    deployment = Deployment(journal)
    deployment.start()
    return deployment


def wide_text(length: int) -> str:
    """Return text that takes as many bytes as it can, and that no database makes smaller."""
    draw = random.Random(length)
    return "".join(chr(draw.choice((draw.randrange(0x20000, 0x2A000), draw.randrange(0x1F300, 0x1F5FF)))) for _ in range(length))


def comes(intake: Deployment, action_id: str, header: dict[str, Any]) -> None:
    intake.broker.submit(action_id, header)
    intake.service.step()


@pytest.mark.parametrize("cost", [{"memory_mb": 8 << 30}, {"cores": [1, 1 << 60]}])
def test_amounts_that_no_column_holds_are_refused(intake: Deployment, engine: Engine, cost: dict[str, Any]) -> None:
    # When the memory of an environment is given in bytes, or so much of something else is asked for
    header = {"kind": "cpu.open", "environment": "e"} if "memory_mb" in cost else {"kind": "my.task"}
    comes(intake, "a", {**header, "cost": cost})
    assert intake.broker.end("a") == ("rejected", "bad_input")
    assert "amounts must be whole and from 1 to 2147483647" in tables.row(engine, "actions")["reason"]
    assert tables.rows(engine, "environments") == []


def test_the_largest_amounts_and_the_longest_names_are_kept(intake: Deployment, engine: Engine) -> None:
    job, name = wide_text(LONGEST_ID), wide_text(LONGEST_ID - 1)
    words = {"job": job, "trajectory": name, "action_class": name, "client": name}
    opening = Action(kind="cpu.open", environment=name, owner=name, cost=Cost.of(memory_mb=LARGEST_AMOUNT), **words)
    elastic = Action(kind=name, cost=Cost.of(cores=(1, LARGEST_AMOUNT)), **words)
    comes(intake, "open", opening.to_header())
    comes(intake, name, elastic.to_header())
    (environment,) = tables.rows(engine, "environments")
    assert (environment["id"], environment["memory_mb"], environment["owner"]) == (name, LARGEST_AMOUNT, name)
    # And with a node, what can run there does so to its end
    intake.join()
    intake.finish(name)
    assert [row["status"] for row in tables.rows(engine, "actions") if row["id"] == name] == ["succeeded"]


def test_an_id_that_cannot_be_stored_is_refused(intake: Deployment, engine: Engine) -> None:
    # When an action has an id that not even the result store could hold, it is dropped
    comes(intake, "a\ud800", Action(kind="my.task").to_header())
    assert intake.broker.is_done()
    for action_id in (wide_text(LONGEST_ID + 1), wide_text(2000), "a\0"):
        # When an action has an id that is too long for an index, or that no column holds
        comes(intake, action_id, Action(kind="my.task").to_header())
        assert intake.broker.end(action_id) == ("rejected", "bad_input")
    comes(intake, "a", Action(kind="my.task").to_header())
    assert tables.row(engine, "actions")["id"] == "a"
