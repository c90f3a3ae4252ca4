"""What a worker says of its instances: what is resident is found again, what is gone is not counted on."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.live.descriptions import service_spec
from scheduler.live.entries import InstanceChanged, InstancesForgotten
from scheduler.live.instances import Instances
from scheduler.model import ServiceSpec, events
from scheduler.model.commands import Restore


@pytest.mark.parametrize("state", ["absent", "host", "failed"])
def test_what_is_gone_is_restored(world: Any, state: str) -> None:
    w = world(services=["rm"]).node(cells=1)
    w.score("a", "rm", finish=True)
    w.report("rm", (0,), state)
    w.score("b", "rm")
    assert (w.grants["b"].restore, w.evicted("b")) == (True, [])


def test_a_late_report_of_what_has_actions_changes_nothing(world: Any) -> None:
    w = world(services=[ServiceSpec(name="rm", restore_s=0.5, max_concurrency=2)]).node(cells=1)
    w.score("a", "rm")
    w.report("rm", (0,), "host")
    w.score("b", "rm")
    assert (w.grants["b"].cell_ids, w.grants["b"].restore) == ((0,), False)


def test_what_is_being_restored_takes_actions_once_it_is_there(world: Any) -> None:
    # Given a service that a node is still bringing onto its only cell
    w = world(services=["rm"]).node(cells=1)
    w.report("rm", (0,), "restoring")
    w.score("a", "rm")
    assert w.waiting == ["a"]
    # When it was gone from there before, that is no news; when it is there, the action starts
    w.report("rm", (0,), "host")
    assert w.waiting == ["a"]
    w.report("rm", (0,), "resident")
    assert w.grants["a"].restore is False


def test_a_warm_service_is_brought_before_it_is_asked_for(world: Any) -> None:
    # Given a node with one warm service among others
    w = world(services=["rm", ServiceSpec(name="hot", cells=(2, 4), restore_s=0.5, warm=True)]).node(cells=4)
    w.wake()
    assert w.of(Restore) == [Restore(node="n0", service="hot", cell_ids=(0, 1))]
    # When it is asked for while it is still on its way, then the action waits for it, and not for a restore of its own
    w.score("a", "hot")
    w.score("b", "rm")
    assert (w.waiting, w.grants["b"].cell_ids) == (["a"], (2,))
    w.report("hot", (0, 1), "resident")
    assert (w.grants["a"].cell_ids, w.grants["a"].restore) == ((0, 1), False)


def test_a_warm_service_that_is_there_already_or_has_no_room_is_not_brought(world: Any) -> None:
    # Given a node that says what stands on its only cells
    w = world(services=["rm", ServiceSpec(name="hot", restore_s=0.5, warm=True), ServiceSpec(name="next", restore_s=0.5, warm=True)])
    w.node(cells=1)
    w.report("hot", (0,), "resident")
    w.tick(0.0)
    assert w.of(Restore) == []
    assert w.core.next_wake(w.now) is None


@pytest.mark.parametrize("policy", ["elastic", "paper"])
def test_a_pinned_service_is_never_evicted(world: Any, policy: str) -> None:
    # Given a pinned service and another one, idle on a cell each
    w = world(policy, services=[ServiceSpec(name="stays", restore_s=0.5, pinned=True), "rm", "third"])
    w.node(cells=2)
    for at, service in enumerate(("stays", "rm")):
        w.now = float(at)
        w.score(service, service, finish=True)
    # When a third one needs a cell, then the other goes, though it was used later
    w.now = 20.0
    w.score("t", "third")
    w.tick(20.0)
    assert w.evicted("t") == ["rm"]
    # And where there is nobody else to go, it waits
    w.score("r", "rm")
    w.tick(60.0)
    assert w.waiting == ["r"]
    w.finish("t")
    w.score("s", "stays")
    assert w.evicted("r") == ["third"]
    assert w.grants["s"].restore is False


def test_reports_that_mean_nothing_here_are_dropped(world: Any) -> None:
    w = world(services=["rm"]).node(cells=1)
    w.report("rm", (0,), "resident", node="elsewhere")
    w.report("unknown", (0,), "resident")
    w.report("rm", (7,), "resident")
    w.report("rm", (), "resident")
    w.handle(events.WorkerReplaced(name="elsewhere", environments=frozenset()))
    w.score("a", "rm")
    assert w.grants["a"].restore is True


def test_a_description_says_how_many_instances_there_may_be_and_whether_they_stay() -> None:
    plain = service_spec("rm", {"cells": [1, 2]})
    said = service_spec("rm", {"cells": [1], "instances": 2, "pinned": True, "warm": True})
    assert (plain.instances_per_node, plain.pinned, plain.warm) == (None, False, False)
    assert (said.instances_per_node, said.pinned, said.warm) == (2, True, True)


# Before the core: reports and beats as events and entries


class Heard:
    """Keeps what was handed on."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self.entries: list[InstanceChanged | InstancesForgotten] = []
        self.instances = Instances(lambda event, now: self.events.append(event), self.entries.append)

    def states(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return the changes handed to the core since this was last asked."""
        taken, self.events = self.events, []
        return [(event.service, event.cell_ids, event.state) for event in taken if isinstance(event, events.ServiceChanged)]


def said(service: str, state: str, *cells: int, **more: Any) -> dict[str, Any]:
    return {"service": service, "cell_ids": list(cells), "state": state, "reason": "", **more}


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_a_change_goes_to_the_core_and_with_its_figures_into_the_journal(heard: Heard) -> None:
    counts = {"starts": 1, "restores": 2, "evictions": 3, "leaks": 4, "wrong_answers": 5}
    heard.instances.changed("n", said("a", "host", 1, 0, reason="r", memory_mb=0.0, host_mb=5.5, **counts), 9.0)
    assert heard.events == [events.ServiceChanged(node="n", service="a", cell_ids=(0, 1), state="host", reason="r")]
    assert heard.entries == [
        InstanceChanged(node="n", service="a", cell_ids=(0, 1), state="host", at=9.0, reason="r", host_mb=5.5, **counts)
    ]


def test_a_beat_changes_only_what_was_not_told(heard: Heard) -> None:
    heard.instances.changed("n", said("a", "resident", 0), 1.0)
    heard.instances.changed("n", said("b", "resident", 1), 1.0)
    heard.states()
    heard.instances.beat("n", [said("a", "resident", 0), said("b", "resident", 1)], 2.0)
    assert heard.states() == []
    heard.instances.beat("n", [said("a", "host", 0), said("c", "starting", 1)], 3.0)
    assert heard.states() == [("a", (0,), "host"), ("b", (1,), "absent")]
    heard.instances.beat("n", [said("a", "host", 0), said("c", "resident", 1)], 4.0)
    assert heard.states() == [("c", (1,), "resident")]


def test_what_is_on_its_way_is_not_taken_for_gone(heard: Heard) -> None:
    heard.instances.changed("n", said("a", "starting", 0), 1.0)
    heard.states()
    heard.instances.beat("n", [], 2.0)
    assert heard.states() == []


def test_the_journal_keeps_why_an_instance_never_came_to_be(heard: Heard) -> None:
    heard.instances.changed("n", said("a", "failed", 0, reason="no room"), 1.0)
    written = list(heard.entries)
    heard.instances.beat("n", [], 2.0)
    assert heard.states() == [("a", (0,), "failed"), ("a", (0,), "absent")]
    assert heard.entries == written


def test_a_node_that_joins_has_what_it_says_and_nothing_else(heard: Heard) -> None:
    heard.instances.changed("n", said("a", "resident", 0), 1.0)
    heard.states()
    heard.instances.joined("n", [said("b", "resident", 0)], 2.0)
    assert [type(entry).__name__ for entry in heard.entries] == ["InstanceChanged", "InstancesForgotten", "InstanceChanged"]
    assert heard.states() == [("b", (0,), "resident")]
    heard.instances.beat("n", [said("b", "resident", 0)], 3.0)
    assert heard.states() == []
