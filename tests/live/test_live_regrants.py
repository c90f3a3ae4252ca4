"""A change of cores on its way: from the core's command to the node, and from the journal to the next scheduler."""

from __future__ import annotations

import json
from typing import Any

from app.journal.writing import SqlJournal
from scheduler.core.core import Core
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.entries import NodeChanged
from scheduler.live.service import Service
from scheduler.model import Grant, commands
from scheduler.policies import make_policy
from tangram.action import Action, Cost
from tangram.wire import GRANT_HEADER, node_queue
from tests.scheduler.deployed import Broker
from tests.virtual.network import open_journal

ACTION = Action(kind="some.task", cost=Cost.of(cores=(1, 2)))
MESSAGE = json.dumps(
    {"body": "[[], {}, {}]", "headers": {"id": "a", "task": "some.task"}, "properties": {"content_type": "application/json"}}
)
NODE = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 0, "cells": 0, "cell_memory_mb": 0, "incarnation": "1"}


def sent(broker: Broker) -> list[dict[str, Any]]:
    return [json.loads(message) for message in broker.waiting(node_queue("n"))]


def changes(broker: Broker) -> list[Any]:
    return [json.loads(one["body"])[1] for one in sent(broker) if one["headers"]["task"] == "tangram.regrant"]


def test_a_change_of_cores_reaches_the_node_and_the_next_scheduler() -> None:
    core, broker = Core(make_policy("fcfs")), Broker()
    transport, (_, engine) = broker.transport(1), open_journal()
    with SqlJournal(engine) as journal:
        # Given an action that is started on two cores
        executor = CommandExecutor(core, transport, journal, epoch=1)
        executor.keep("a", MESSAGE, 1.0)
        executor.note_received("a", ACTION, 1.0)
        journal.write([NodeChanged(name="n", state="up", description=NODE, at=1.0)])
        executor.carry_out(commands.Start(id="a", grant=Grant(node="n", core_ids=(2, 3), units=2)), 2.0)
        executor.commit([])
        # When it goes to the background, and then gets one
        executor.carry_out(commands.Resize(id="a", node="n", attempt=1, core_ids=(), units=2, background=True), 3.0)
        executor.commit([])
        executor.carry_out(commands.Resize(id="a", node="n", attempt=1, core_ids=(1,), units=1), 3.5)
        executor.commit([])
        # Then its node was told each, in an order that it can tell
        grant = sent(broker)[0]["headers"][GRANT_HEADER]
        assert (grant["core_ids"], grant["units"], grant["background"]) == ([2, 3], 2, False)
        told = [{"epoch": 1, "serial": 1, "grants": [["a", 1, [], True]]}, {"epoch": 1, "serial": 2, "grants": [["a", 1, [1], False]]}]
        assert changes(broker) == told
        # And a scheduler that starts over goes on with what it has now
        service = Service(core, transport, journal, epoch=2, clock=lambda: 4.0)
        assert service.recover() == 1
        # Which tells the node again, since the one before may have ended before it did
        assert changes(broker) == [*told, {"epoch": 2, "serial": 1, "grants": [["a", 1, [1], False]]}]
    resumed = core.state.running["a"].grant
    assert (resumed.core_ids, resumed.units, resumed.background) == ((1,), 1, False)
