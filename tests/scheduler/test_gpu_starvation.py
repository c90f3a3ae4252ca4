"""What holds on GPU cells whatever comes: nobody waits too long for a swap, nothing is lost, no cell is granted twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.core import Core
from scheduler.gpu.ageing import bound_s
from scheduler.gpu.tuning import TUNING
from scheduler.model import ServiceSpec, events
from tangram.action import Action

from .cells_run import Ask, CellsRun

SERVICES = (
    ServiceSpec(name="hot", restore_s=0.5),
    ServiceSpec(name="warm", restore_s=0.5, max_concurrency=3),
    ServiceSpec(name="wide", cells=(2,), restore_s=1.0),
    ServiceSpec(name="cold", cells=(1, 2), restore_s=2.0),
    ServiceSpec(name="rare", restore_s=0.0),
)
CELLS = {"hot": (1,), "warm": (1, 2), "wide": (2,), "cold": (1, 2), "rare": (1,)}
LONGEST_S = 6.0
NAMES = ("hot", "hot", "hot", "hot", "warm", "warm", "wide", "cold", "rare")

ASKS = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.sampled_from(NAMES), st.floats(0.1, LONGEST_S - 2.0)),
    min_size=20,
    max_size=120,
)


def asks_of(drawn: list[tuple[float, str, float]]) -> list[Ask]:
    at, asks = 0.0, []
    for gap_s, service, work_s in drawn:
        at += gap_s
        asks.append(Ask(at, service, CELLS[service], work_s))
    return asks


class Watch:
    """Measures for each waiting action how long its service has been nowhere, and looks for impatient ones beside idle cells."""

    def __init__(self) -> None:
        self.absent_since: dict[str, float] = {}
        self.longest_s = 0.0

    def __call__(self, core: Core, before: float, now: float) -> None:
        state = core.state
        groups = core.pools.gpu.groups.values()
        there = [i for group in groups for i in group.instances if i.evicting_for is None]
        starving = False
        for waiting in state.waiting.values():
            usable = any(i.service == waiting.action.service and len(i.cell_ids) in waiting.units for i in there)
            since = self.absent_since.get(waiting.id)
            if since is not None:
                self.longest_s = max(self.longest_s, now - since)
            if usable:
                self.absent_since.pop(waiting.id, None)
            else:
                self.absent_since.setdefault(waiting.id, now)
                starving = starving or now - waiting.received_at >= TUNING.aged_s
        for action_id in [each for each in self.absent_since if each not in state.waiting]:
            self.longest_s = max(self.longest_s, now - self.absent_since.pop(action_id))
        if not starving:
            for waiting in state.waiting.values():
                if now - waiting.received_at > TUNING.aged_s:
                    assert all(group.free < waiting.least for group in groups), f"{waiting.id} waits beside idle cells"


@settings(max_examples=60, deadline=None)
@given(ASKS, st.sampled_from([(2,), (3,), (2, 2), (1, 3)]))
def test_no_action_waits_longer_than_the_bound_for_a_service_that_is_nowhere(
    drawn: list[tuple[float, str, float]], nodes: tuple[int, ...]
) -> None:
    # Given more work than the cells can do, by services some of which are always asked for
    watch = Watch()
    run = CellsRun(SERVICES, nodes, watch)

    # When all of it is run
    run.run(asks_of(drawn))

    # Then each had its turn in time, and each ended once
    assert watch.longest_s <= bound_s(len(SERVICES), LONGEST_S)
    assert sorted(run.ended, key=int) == [str(number) for number in range(len(drawn))]
    assert run.running == {}


def test_a_stream_that_never_ends_does_not_keep_another_service_out() -> None:
    # Given one cell, and two actions a second of one second each for a service that holds it
    asks = [Ask(0.5 * number, "hot", (1,), 1.0) for number in range(120)]

    # When one action for another service comes early on
    watch = Watch()
    CellsRun(SERVICES, (1,), watch).run(sorted([*asks, Ask(5.25, "rare", (1,), 1.0)], key=lambda ask: ask.at))

    # Then it waits, so that the stream is not interrupted for it at once, and not for longer than the bound
    assert 2.0 < watch.longest_s <= bound_s(1, 2.0)


def test_an_action_for_a_model_asks_for_no_rounds_where_no_node_has_cells(world: Any) -> None:
    # Given an action for a model, and a node without cells
    w = world("elastic", services=(ServiceSpec(name="judge"),)).node(cells=0)
    w.handle(events.Submitted(id="a", action=Action(kind="gpu.score", service="judge"), submitted_at=w.now))
    # Then the core asks for no more wakes than it can answer
    for _ in range(5):
        at = w.core.next_wake(w.now)
        if at is None:
            return
        w.now = max(w.now, at)
        w.handle(events.Tick())
    pytest.fail("the core asks to be woken for ever")
