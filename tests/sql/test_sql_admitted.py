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
from tests.sql.test_sql_resuming import NODE, Deployment


class Intake(Deployment):
    """A scheduler without a node."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(SqlJournal(engine))
        self.engine = engine

    def begin(self) -> None:
        """Have a scheduler begin."""
        self.epoch = 1  # so that no node joins by itself
        self.start("fcfs")

    def comes(self, action_id: str, header: dict[str, Any]) -> None:
        self.broker.submit(action_id, header)
        self.service.step()


@pytest.fixture
def intake(engine: Engine) -> Any:
    """Return a deployment without any node."""
    deployment = Intake(engine)
    deployment.begin()
    yield deployment
    deployment.journal.close()


def wide_text(length: int) -> str:
    """Return text that takes as many bytes as it can, and that no database makes smaller."""
    draw = random.Random(length)
    return "".join(chr(draw.choice((draw.randrange(0x20000, 0x2A000), draw.randrange(0x1F300, 0x1F5FF)))) for _ in range(length))


@pytest.mark.parametrize("cost", [{"memory_mb": 8 << 30}, {"cores": [1, 1 << 60]}])
def test_amounts_that_no_column_holds_are_refused(intake: Intake, tables: Any, cost: dict[str, Any]) -> None:
    # When the memory of an environment is given in bytes, or so much of something else is asked for
    header = {"kind": "cpu.open", "environment": "e"} if "memory_mb" in cost else {"kind": "my.task"}
    intake.comes("a", {**header, "cost": cost})
    # Then the caller is told, and the scheduler goes on
    assert intake.broker.end("a") == ("rejected", "bad_input")
    assert "amounts must be whole and from 1 to 2147483647" in tables.row(intake.engine, "actions")["reason"]
    assert tables.rows(intake.engine, "environments") == []


def test_the_largest_amounts_and_the_longest_names_are_kept(intake: Intake, tables: Any) -> None:
    job, name = wide_text(LONGEST_ID), wide_text(LONGEST_ID - 1)
    # When they are asked for while no node is there
    words = {"job": job, "trajectory": name, "action_class": name, "client": name}
    opening = Action(kind="cpu.open", environment=name, owner=name, cost=Cost.of(memory_mb=LARGEST_AMOUNT), **words)
    elastic = Action(kind=name, cost=Cost.of(cores=(1, LARGEST_AMOUNT)), **words)
    intake.comes("open", opening.to_header())
    intake.comes(name, elastic.to_header())
    # Then the journal has them
    (environment,) = tables.rows(intake.engine, "environments")
    assert (environment["id"], environment["memory_mb"], environment["owner"]) == (name, LARGEST_AMOUNT, name)
    # And with a node, what can run there does so to its end
    intake.told({"type": "joined", "node": NODE})
    intake.finish(name)
    assert [row["status"] for row in tables.rows(intake.engine, "actions") if row["id"] == name] == ["succeeded"]


def test_an_id_that_is_too_long_for_an_index_is_refused(intake: Intake, tables: Any) -> None:
    for action_id in (wide_text(LONGEST_ID + 1), wide_text(2000)):
        # When an action has such an id
        intake.comes(action_id, Action(kind="my.task").to_header())
        # Then its caller is told
        assert intake.broker.end(action_id) == ("rejected", "bad_input")
    # And the scheduler goes on
    intake.comes("a", Action(kind="my.task").to_header())
    assert tables.row(intake.engine, "actions")["id"] == "a"
