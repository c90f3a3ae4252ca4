"""What workers say of their instances, as events and entries."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.live.entries import InstanceChanged, InstancesForgotten
from scheduler.live.instances import Instances
from scheduler.model import events


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


@pytest.mark.parametrize("wrong", [{"state": "gone"}, {"cell_ids": ["x"]}, {"cell_ids": None}, {"memory_mb": "much"}])
def test_what_makes_no_sense_is_refused(heard: Heard, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        heard.instances.changed("n", {**said("a", "host", 0), **wrong}, 1.0)
    assert (heard.events, heard.entries) == ([], [])
