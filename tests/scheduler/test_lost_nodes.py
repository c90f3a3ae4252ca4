"""When a node counts as lost: it is silent, or it beats and takes nothing up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from scheduler.live.heartbeats import HOUSEKEEPING_S, RETURN_S
from scheduler.model import commands, events
from tangram.action import Action, Cost

from .driver import Driver

BEAT_S = 2.0
NODE = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 8, "memory_mb": 1000, "cells": 0, "cell_memory_mb": 0, "incarnation": "1"}


class Cluster(Driver):
    """A scheduler, and a node that beats when told."""

    def __init__(self) -> None:
        super().__init__(policy="fcfs", beat_s=BEAT_S)
        self.now = 0.0
        self.beat()

    def beat(self, running: Iterable[str] = (), incarnation: str = "1") -> None:
        """Let the node beat once, with what it runs."""
        self.now += BEAT_S
        self.heartbeats.take_beat({**NODE, "running": list(running), "environments": [], "incarnation": incarnation}, self.now)

    def look(self, seconds: float) -> None:
        """Look for silent nodes so many seconds later."""
        self.now += seconds
        self.heartbeats.lose_the_silent(self.now)

    def listen(self, seconds: float) -> None:
        """Go on for so many seconds as the service does, which hears no beat meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now += HOUSEKEEPING_S
            self.heartbeats.excuse(self.now)
            self.heartbeats.lose_the_silent(self.now)

    def submit(self, action_id: str, *, idempotent: bool = False) -> None:
        action = Action(kind="build", cost=Cost.of(cores=1), idempotent=idempotent)
        self.executor.keep(action_id, action_id, self.now)
        self.handle(events.Submitted(id=action_id, action=action, submitted_at=self.now), self.now)

    def states(self) -> list[tuple[str, str]]:
        """Return the states that the node went through, each with its reason."""
        return [(one.state, one.reason) for one in self.out if isinstance(one, commands.NoteNode)]


IDLE = ("lost", "it beats but does not run what it was handed")


def test_a_node_is_lost_when_it_misses_three_beats() -> None:
    cluster = Cluster()
    cluster.look(3 * BEAT_S)
    assert cluster.states() == [("up", "")]

    cluster.look(0.1)

    assert cluster.states() == [("up", ""), ("lost", "3 beats missed")]


@pytest.mark.parametrize(("lost_connections", "more_s"), [(1, RETURN_S), (0, 0.0)], ids=["the broker was away", "beats wait unread"])
def test_silence_counts_only_while_the_scheduler_has_heard_all_there_is(lost_connections: int, more_s: float) -> None:
    # Given a scheduler that hears no beats, since it has lost the broker or has more to read; when that is for long, then no node is lost
    cluster = Cluster()
    cluster.wires.lost_connections, cluster.wires.caught_up = lost_connections, False
    cluster.listen(60.0)
    # And when it has caught up, nodes have a while to be heard, and no more
    cluster.wires.caught_up = True
    cluster.listen(more_s + 3 * BEAT_S)
    assert cluster.states() == [("up", "")]
    cluster.listen(1.0)
    assert cluster.states() == [("up", ""), ("lost", "3 beats missed")]


def test_silence_does_not_count_while_the_scheduler_stands_still() -> None:
    # Given a scheduler that was frozen for a minute; when it goes on, then a node has the usual time to be heard, and no more
    cluster = Cluster()
    cluster.listen(1.0)
    cluster.now += 60.0
    cluster.listen(3 * BEAT_S)
    assert cluster.states() == [("up", "")]
    cluster.listen(1.0)
    assert cluster.states() == [("up", ""), ("lost", "3 beats missed")]


def test_a_node_that_beats_but_never_takes_up_its_action_is_lost() -> None:
    # Given a node that runs one of two actions
    cluster = Cluster()
    cluster.submit("a", idempotent=True)
    cluster.submit("b")
    for _ in range(3):
        cluster.beat(running=("b",))
    assert cluster.states() == [("up", "")]
    # When it has beaten four times without the other one
    cluster.beat(running=("b",))
    # Then it is lost, and what may run again waits
    assert cluster.states()[1] == IDLE
    assert [*cluster.core.state.waiting] == ["a"]


def test_a_node_that_is_late_with_much_is_not_lost_while_it_takes_some_up() -> None:
    # Given a node that has been handed more than it can take up in three beats
    cluster = Cluster()
    for number in range(8):
        cluster.submit(f"a{number}")
    # When between any two beats it takes one up, which runs then or has ended by then
    for beat in range(5):
        if beat % 2:
            cluster.handle(events.Started(id=f"a{beat}", attempt=1, at=cluster.now), cluster.now)
            cluster.handle(events.Finished(id=f"a{beat}", attempt=1, status="succeeded"), cluster.now)
        runs = [f"a{number}" for number in range(0, beat + 1, 2)]
        cluster.beat(running=runs)
    # Then it is not lost
    for _ in range(3):
        assert cluster.states() == [("up", "")]
        cluster.beat(running=runs)
    # And when it takes nothing up any more, it is
    cluster.beat(running=runs)
    assert cluster.states()[1] == IDLE


def test_a_node_is_asked_for_what_its_beats_do_not_show() -> None:
    # Given a node that was granted two actions; when its beats show one of them; then it is asked for the other one, once in three beats
    cluster = Cluster()
    cluster.submit("a")
    cluster.submit("b")
    for _ in range(3):
        cluster.beat(running=("b",))
    assert [task for task, _ in cluster.wires.controls] == ["tangram.tell"]


def test_an_action_seen_in_a_beat_is_counted_anew() -> None:
    cluster = Cluster()
    cluster.submit("a")
    for running in ((), (), (), ("a",), (), (), ()):
        cluster.beat(running=running)

    assert cluster.states() == [("up", "")]


def test_a_worker_that_was_started_again_at_once_has_lost_what_ran() -> None:
    # Given an action that may not run twice, on a node; when the next beat is that of another process
    cluster = Cluster()
    cluster.submit("a")
    cluster.beat(running=("a",))
    cluster.beat(incarnation="2")
    # Then the action is lost, though no beat was missed
    assert cluster.states() == [("up", ""), ("lost", "its worker was restarted"), ("up", "")]
    assert [(end.id, end.status) for end in cluster.out if isinstance(end, commands.Finish)] == [("a", "lost")]


def test_what_a_lost_node_had_stored_counts_and_an_environment_that_it_opened_is_lost() -> None:
    # Given a node that has run an action that may run again, and has opened an environment
    cluster = Cluster()
    cluster.submit("a", idempotent=True)
    cluster.executor.keep("open", "open", cluster.now)
    opening = Action(kind="cpu.open", environment="e")
    cluster.handle(events.Submitted(id="open", action=opening, submitted_at=cluster.now), cluster.now)
    # When it is lost with its reports, and the store has both results
    cluster.wires.stored_ends = lambda kinds: [events.StoredEnd(id=one, status="succeeded") for one in kinds]
    cluster.look(3 * BEAT_S + 0.1)
    # Then both have ended as their trainers were told, and the environment is gone with its node
    assert {(end.id, end.status) for end in cluster.out if isinstance(end, commands.Finish)} == {("a", "succeeded"), ("open", "succeeded")}
    assert [(one.id, one.state) for one in cluster.out if isinstance(one, commands.NoteEnvironment)][-1] == ("e", "lost")
    assert not cluster.core.state.waiting and not cluster.core.state.environments
