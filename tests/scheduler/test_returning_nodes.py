"""A node that was taken for lost comes back: what was moved elsewhere meanwhile is given up there, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scheduler.model import events
from tangram.action import Action, Cost

from .driver import Driver, Wires

BUILD = Action(kind="build", cost=Cost.of(cores=1), idempotent=True)
OPEN = Action(kind="cpu.open", environment="e", cost=Cost.of(memory_mb=600))
NODE = {"kinds": ["cpu"], "labels": [], "cores": 1, "memory_mb": 1000, "cells": 0, "cell_memory_mb": 0, "incarnation": "1"}


@dataclass
class Line(Wires):
    """Keeps to which node each order goes that ends something, and for which tries."""

    orders: list[tuple[str, str, str, int]] = field(default_factory=list)

    def send_control(self, node: str, task: str, arguments: dict[str, Any]) -> None:
        if task != "tangram.tell":
            self.orders.append((node, task, arguments["id"], arguments["attempt"]))


class Cluster(Driver):
    """A scheduler, and nodes `a` and `b` that beat when told."""

    def __init__(self, *names: str) -> None:
        super().__init__(policy="fcfs", wires=Line())
        self.now = 0.0
        for name in names:
            self.beat(name)

    def beat(self, name: str, *running: str, environments: tuple[str, ...] = ()) -> None:
        self.now += 1.0
        self.heartbeats.take_beat({**NODE, "name": name, "running": list(running), "environments": list(environments)}, self.now)

    def submit(self, action_id: str, action: Action) -> None:
        self.executor.keep(action_id, action_id, self.now)
        self.handle(events.Submitted(id=action_id, action=action, submitted_at=self.now), self.now)

    def lose(self, name: str) -> None:
        self.heartbeats.lose(name, "3 beats missed", self.now)

    def granted(self, action_id: str) -> tuple[str, int]:
        grant = self.core.state.running[action_id].grant
        return grant.node, grant.attempt


def test_an_environment_that_was_opened_elsewhere_meanwhile_is_closed_where_it_stood() -> None:
    # Given an environment that a node has just opened when it is lost, and that opens on another node
    cluster = Cluster("a")
    cluster.submit("open", OPEN)
    cluster.lose("a")
    cluster.beat("b")
    assert cluster.granted("open") == ("b", 2)
    # When the first comes back with it
    cluster.beat("a", environments=("e",))
    cluster.beat("b", "open")
    cluster.handle(events.Finished(id="open", attempt=2, status="succeeded"), cluster.now)
    cluster.beat("b", environments=("e",))
    cluster.beat("a", environments=("e",))
    # Then it closes it there, once, and the other keeps it
    cluster.beat("a", environments=("e",))
    cluster.beat("b", environments=("e",))
    assert cluster.wires.orders == [("a", "tangram.close_environment", "e", 0)]
    assert cluster.core.state.environments["e"].node == "b"


def test_a_node_is_asked_ever_more_rarely_to_close_what_it_should_not_hold() -> None:
    cluster = Cluster("a")
    for _ in range(64):
        cluster.beat("a", environments=("e",))
    assert cluster.wires.orders == [("a", "tangram.close_environment", "e", 0)] * 6  # at beats 2, 4, 8, 16, 32 and 64


def test_an_action_that_was_moved_is_stopped_where_it_ran_and_not_where_it_runs() -> None:
    # Given an action whose node is lost, and that runs on another node
    cluster = Cluster("a")
    cluster.submit("x", BUILD)
    cluster.lose("a")
    cluster.beat("b")
    assert cluster.granted("x") == ("b", 2)
    # When the first comes back, and runs it still
    for _ in range(3):
        cluster.beat("a", "x")
        cluster.beat("b", "x")
    # Then it is stopped there alone
    assert cluster.wires.orders == [("a", "tangram.stop", "x", 0)]


def test_what_a_node_was_granted_anew_when_it_came_back_runs_on() -> None:
    # Given a node that is lost with an action and an environment, and comes back with both
    cluster = Cluster("a")
    cluster.submit("x", BUILD)
    cluster.submit("open", OPEN)
    cluster.lose("a")
    cluster.beat("a", "x", environments=("e",))
    assert cluster.granted("x") == cluster.granted("open") == ("a", 2)
    # When its beats show them
    for _ in range(3):
        cluster.beat("a", "x", "open", environments=("e",))
    # Then nobody touches them, nor what it was granted a moment ago
    cluster.handle(events.Finished(id="x", attempt=2, status="succeeded"), cluster.now)
    cluster.submit("y", BUILD)
    cluster.beat("a", "open", environments=("e",))
    cluster.beat("a", "open", "y", environments=("e",))
    assert cluster.wires.orders == []
