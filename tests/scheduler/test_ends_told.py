"""Ends that no worker reports: told in parts, and written down as told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler import events
from scheduler.entries import EndsTold, Entry
from tangram.action import Action

from .driver import Driver, Wires

NODE: dict[str, Any] = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 0, "cells": 0, "cell_memory_mb": 0}
NODE |= {"incarnation": "1", "running": [], "environments": []}
PLAIN = Action(kind="my.task")


@dataclass
class SlowStore(Wires):
    """Stores two results in a flush."""

    to_store: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    written: list[Entry] = field(default_factory=list)

    def store_end(self, *end: object) -> None:
        self.to_store.append(str(end[0]))
        self.ends_to_store += 1

    def flush(self) -> None:
        self.stored += self.to_store[:2]
        del self.to_store[:2]
        self.ends_to_store = len(self.to_store)

    def write(self, entries: Sequence[Entry]) -> None:
        self.written += entries


class Scheduler(Driver):
    """A scheduler with a node that has been handed some actions, and beats without saying anything of them."""

    def __init__(self, **handed: Action) -> None:
        super().__init__(wires=SlowStore())
        self.beat(0.0)
        for action_id, action in handed.items():
            self.orders.keep(action_id, "a message", 0.0)
            self.handle(events.Submitted(id=action_id, action=action, submitted_at=0.0), 0.0)

    def beat(self, now: float) -> None:
        self.roll_call.take_beat(NODE, now)

    def told(self) -> list[tuple[str, ...]]:
        """Return what was written down as told, entry by entry."""
        return [tuple(entry.ids) for entry in self.wires.written if isinstance(entry, EndsTold)]


def test_what_was_told_is_written_down_though_more_is_still_to_be_told() -> None:
    # Given five actions that are lost with their node, and a store that takes two at a time
    scheduler = Scheduler(**dict.fromkeys(("a", "b", "c", "d", "e"), PLAIN))
    scheduler.roll_call.lose("n", "it burned", 1.0)
    # When the scheduler takes two steps
    scheduler.orders.commit([])
    scheduler.orders.commit([])
    # Then what the first has told is written down
    assert scheduler.wires.stored == ["a", "b", "c", "d"]
    assert scheduler.told() == [("a", "b")]
    # And when it stops, what the second has told is, too, and nothing more is told
    scheduler.orders.write()
    assert scheduler.told() == [("a", "b"), ("c", "d")]
    assert scheduler.wires.stored == ["a", "b", "c", "d"]
