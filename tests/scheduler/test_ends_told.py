"""Ends that no worker reports: told in parts, written down as told, and taken from results where there are some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from scheduler.live.entries import ActionEnded, EndsPublished, Entry
from scheduler.model import events
from scheduler.model.lifecycle import MISSED_BEATS, End
from tangram.action import Action

from .driver import Driver, Wires

NODE: dict[str, Any] = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 4, "memory_mb": 0, "cells": 0, "cell_memory_mb": 0}
NODE |= {"incarnation": "1", "running": [], "environments": []}
PLAIN = Action(kind="my.task")


@dataclass
class SlowStore(Wires):
    """Stores two results in a flush; `results` are those that workers have stored."""

    to_store: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    results: dict[str, End] = field(default_factory=dict)
    written: list[Entry] = field(default_factory=list)

    def store_end(self, *end: object) -> None:
        self.to_store.append(str(end[0]))
        self.ends_to_store += 1

    def flush(self) -> None:
        self.stored += self.to_store[:2]
        del self.to_store[:2]
        self.ends_to_store = len(self.to_store)

    def stored_ends(self, kinds: dict[str, str]) -> list[events.StoredEnd]:
        return [events.StoredEnd(id=one, status=self.results[one], reason="it says so") for one in kinds if one in self.results]

    def write(self, entries: Sequence[Entry]) -> None:
        self.written += entries


class Scheduler(Driver):
    """A scheduler with a node that has been handed some actions, and beats without saying anything of them."""

    def __init__(self, **handed: Action) -> None:
        super().__init__(wires=SlowStore())
        self.beat(0.0)
        for action_id, action in handed.items():
            self.executor.keep(action_id, "a message", 0.0)
            self.handle(events.Submitted(id=action_id, action=action, submitted_at=0.0), 0.0)

    def beat(self, now: float) -> None:
        self.heartbeats.take_beat(NODE, now)

    def told(self) -> list[tuple[str, ...]]:
        """Return what was written down as told, entry by entry."""
        return [tuple(entry.ids) for entry in self.wires.written if isinstance(entry, EndsPublished)]

    def ended(self) -> dict[str, tuple[str, bool]]:
        """Write down what there is; return of each end how it was, and whether its worker has stored it."""
        self.executor.write()
        return {one.end.id: (one.end.status, one.end.by_worker) for one in self.wires.written if isinstance(one, ActionEnded)}


def test_what_was_told_is_written_down_though_more_is_still_to_be_told() -> None:
    # Given five actions that are lost with their node, and a store that takes two at a time
    scheduler = Scheduler(**dict.fromkeys(("a", "b", "c", "d", "e"), PLAIN))
    scheduler.heartbeats.lose("n", "it burned", 1.0)
    # When the scheduler takes two steps
    scheduler.executor.commit([])
    scheduler.executor.commit([])
    # Then what the first has told is written down
    assert scheduler.wires.stored == ["a", "b", "c", "d"]
    assert scheduler.told() == [("a", "b")]
    # And when it stops, what the second has told is, too, and nothing more is told
    scheduler.executor.write()
    assert scheduler.told() == [("a", "b"), ("c", "d")]
    assert scheduler.wires.stored == ["a", "b", "c", "d"]


@pytest.mark.parametrize("result", ["succeeded", "failed", None])
def test_what_a_node_does_not_know_any_more_has_ended_as_its_result_says(result: End | None) -> None:
    # Given an action that was started
    scheduler = Scheduler(a=PLAIN)
    scheduler.handle(events.Started(id="a", attempt=1, at=0.0), 0.1)
    scheduler.wires.results = {"a": result} if result else {}
    # When its node says that it does not know it
    scheduler.heartbeats.answer_unknown("a", 1, 1.0)
    scheduler.executor.commit([])
    # Then the result counts; where there is none it is lost, and that is written down as an end that the scheduler has to tell
    assert scheduler.ended() == {"a": (result, True) if result else ("lost", False)}
    assert scheduler.wires.stored == ([] if result else ["a"])


def test_what_a_node_that_only_beats_has_stored_has_ended() -> None:
    # Given two actions whose reports got lost, of which one has its result
    scheduler = Scheduler(done=PLAIN, cut=PLAIN)
    scheduler.wires.results = {"done": "succeeded"}
    # When their node has beaten too often without them
    for beat in range(1, MISSED_BEATS + 2):
        assert scheduler.ended() == {}
        scheduler.beat(10.0 * beat)
    # Then only the other one is lost with it
    assert scheduler.ended() == {"done": ("succeeded", True), "cut": ("lost", False)}


@pytest.mark.parametrize("result", ["succeeded", "failed"])
def test_an_opening_whose_node_is_lost_ends_by_its_stored_result(result: End) -> None:
    # Given an environment that is being opened, and the result of that
    scheduler = Scheduler(open=Action(kind="cpu.open", environment="e"))
    scheduler.wires.results = {"open": result}
    # When its node is lost
    scheduler.heartbeats.lose("n", "it burned", 1.0)
    # Then it has ended as its trainer was told, and the environment is gone in any case
    assert scheduler.ended() == {"open": (result, True)}
    assert "e" not in scheduler.core.state.environments
