"""One decision of `elastic` by itself: it fits, it is worth its while, and it takes no more than somebody gets."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import Grant, Limits, Running, Waiting
from scheduler.policies.elastic import LEAST_GAIN_S, Elastic
from scheduler.resources.cpu import CoreGroup
from scheduler.state import State
from tangram.action import Action, Cost
from tangram.elasticity import Amdahl

NOW = 10.0


@dataclass(frozen=True)
class Situation:
    """What a group looks like when `plan` is asked: who waits, who runs on how much since when, what is free."""

    candidates: list[Waiting]
    running: list[Running]
    free: int


WORK = st.tuples(
    st.sampled_from([(1,), (2,), (1, 2), (1, 2, 4), (1, 4, 8), (2, 3)]),
    st.floats(0.0, 1.0),
    st.sampled_from([0.01, 0.1, 1.0, 20.0]),
)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    state = State(Elastic(), Limits(), (), ())

    def waiting(number: int) -> Waiting:
        units, fraction, work_s = draw(WORK)
        action = Action(kind="build", cost=Cost.of(cores=units), curve=Amdahl(fraction), work_s=work_s)
        return state.make_waiting(f"a{number}", action, 0.0, 0.0)

    running = []
    for number in range(draw(st.integers(0, 5))):
        one = waiting(number)
        if len(one.units) > 1:
            units, since = draw(st.sampled_from(one.units)), draw(st.floats(0.0, NOW))
            running.append(Running(one, Grant(node="n0", units=units), since, NOW, since=since))
    candidates = [waiting(number) for number in range(5, 5 + draw(st.integers(0, 4)))]
    reclaimable = sum(r.units - r.waiting.least for r in running)
    least = sum(one.least for one in candidates)
    return Situation(candidates, running, max(0, least - reclaimable) + draw(st.integers(0, 8)))


@given(situations())
def test_a_plan_fits_and_starts_every_candidate(now: Situation) -> None:
    plan = Elastic().plan(now.candidates, [], now.running, now.free, CoreGroup("n0", range(64)), NOW)

    assert [choice.waiting for choice in plan.choices] == now.candidates
    assert all(choice.units in choice.waiting.units for choice in plan.choices)
    assert all(change.units in change.running.waiting.units for change in plan.changes)
    assert len({id(change.running) for change in plan.changes}) == len(plan.changes)
    grown = sum(change.units - change.running.units for change in plan.changes)
    assert sum(choice.units for choice in plan.choices) + grown <= now.free


def test_one_shrinks_and_the_other_does_not_where_one_is_enough() -> None:
    # Given two that could each give two cores to a third, whom they would help too little to be worth a resize
    state = State(Elastic(), Limits(), (), ())

    def waiting(name: str, units: tuple[int, ...], fraction: float, work_s: float) -> Waiting:
        return state.make_waiting(name, Action(kind="b", cost=Cost.of(cores=units), curve=Amdahl(fraction), work_s=work_s), 0.0, 0.0)

    running = [
        Running(waiting("first", (1, 2, 4), 0.1, 1.0), Grant(node="n0", units=4), NOW, NOW, since=NOW),
        Running(waiting("second", (1, 2, 4), 0.1, 1.0), Grant(node="n0", units=4), NOW, NOW, since=NOW),
        Running(waiting("third", (1, 4), 1.0, 0.06), Grant(node="n0", units=1), NOW, NOW, since=NOW),
    ]

    # When one core is needed
    plan = Elastic().plan([waiting("newcomer", (1,), 0.0, 1.0)], [], running, 0, CoreGroup("n0", range(9)), NOW)

    # Then one of them gives its two, and nobody else changes
    assert [(change.running.waiting.id, change.units) for change in plan.changes] == [("first", 2)]


@given(situations())
def test_units_are_taken_only_as_far_as_somebody_gets_them(now: Situation) -> None:
    plan = Elastic().plan(now.candidates, [], now.running, now.free, CoreGroup("n0", range(64)), NOW)

    taken = [change.running.units - change.units for change in plan.changes if change.units < change.running.units]
    given_out = sum(choice.units for choice in plan.choices)
    given_out += sum(change.units - change.running.units for change in plan.changes if change.units > change.running.units)
    if taken:
        assert sum(taken[:-1]) < given_out - now.free, "the last to shrink did so for nobody"


@given(situations())
def test_what_grows_saves_more_than_a_resize_is_worth(now: Situation) -> None:
    plan = Elastic().plan(now.candidates, [], now.running, now.free, CoreGroup("n0", range(64)), NOW)

    for change in plan.changes:
        if change.units > change.running.units:
            waiting = change.running.waiting
            whole_s = waiting.duration_s(change.running.units) - waiting.duration_s(change.units)
            assert change.running.left_at(NOW) * whole_s >= LEAST_GAIN_S - 1e-9
