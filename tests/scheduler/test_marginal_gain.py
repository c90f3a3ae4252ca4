"""Elastic actions on the cores of one node: who gets how many, against every possible division; what is resized, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cpu.marginal import Step, steps_of
from scheduler.cpu.tuning import TUNING
from scheduler.model import events
from scheduler.model.commands import Resize
from tangram.action import Action, Cost
from tangram.elasticity import Amdahl, Curve, Table

LONG_S = 1000.0


class Wish(NamedTuple):
    """An elastic action: the amounts that it can use, and what they do to its duration."""

    units: tuple[int, ...]
    curve: Curve

    @property
    def steps(self) -> tuple[Step, ...]:
        return steps_of(self.units, self.curve)

    @property
    def amounts(self) -> tuple[int, ...]:
        """The amounts that its steps lead to, and the smallest."""
        return (self.units[0], *(step.units for step in self.steps))

    def worth(self, units: int) -> float:
        return sum(step.gain * step.extra_units for step in self.steps if step.units <= units)

    def fastest(self, cores: int) -> int:
        """The smallest of the fastest amounts that fit on some cores."""
        return max((amount for amount in self.units if amount <= cores), key=lambda amount: (round(self.curve.speedup(amount), 9), -amount))

    def submit(self, w: Any, id: str, work_s: float = LONG_S) -> None:
        action = Action(kind="build", cost=Cost.of(cores=self.units), curve=self.curve, work_s=work_s)
        w.handle(events.Submitted(id=id, action=action, submitted_at=w.now))


def recorded(units: tuple[int, ...], speeds: Sequence[float]) -> Wish:
    """An action with a recorded curve; its efficiencies are rounded, as recorded ones are."""
    return Wish(units, Table(tuple((m, min(1.0, max(0.01, round(speed / m, 2)))) for m, speed in zip(units, speeds, strict=True))))


def with_fixed_cost(units: tuple[int, ...], fixed: float, a_unit: float) -> Wish:
    """An action that spends some of its time whatever it has, and some more for each unit that it has to bring up."""
    return recorded(units, [1.0 / (fixed + (1.0 - fixed) / m + a_unit * (m - 1)) for m in units])


FRACTIONS = st.floats(0.05, 1.0).map(Amdahl)
BY_ONE = st.builds(Wish, st.sampled_from([(1,), (1, 2), (1, 2, 3), (2, 3, 4), (1, 2, 3, 4, 5)]), FRACTIONS)
POWERS = st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1).map(lambda units: tuple(sorted(units)))
IN_POWERS = st.builds(Wish, POWERS, FRACTIONS)
# What was recorded may be anything: slower on more, or, where the smallest amounts are starved, better than in proportion.
EFFICIENCIES = st.lists(st.integers(1, 100), min_size=4, max_size=4)
ANYHOW = st.builds(lambda units, values: recorded(units, [m * e / 100 for m, e in zip(units, values, strict=False)]), POWERS, EFFICIENCIES)
FIXED_COST = st.builds(with_fixed_cost, POWERS, st.floats(0.0, 0.9), st.floats(0.0, 0.05))
ANY = IN_POWERS | ANYHOW | FIXED_COST


def best(wishes: list[Wish], cores: int) -> float:
    """Return the largest worth that a division of the cores can have."""
    ways = product(*(wish.amounts for wish in wishes))
    return max(sum(w.worth(amount) for w, amount in zip(wishes, way, strict=True)) for way in ways if sum(way) <= cores)


def sum_of_worths(w: Any, wishes: list[Wish]) -> float:
    return sum(wish.worth(w.units[f"a{number}"]) for number, wish in enumerate(wishes))


def all_at_once(world: Any, wishes: list[Wish], cores: int) -> Any:
    w = world()
    for number, wish in enumerate(wishes):
        wish.submit(w, f"a{number}")
    w.node(cores=cores)
    return w


def least(wishes: list[Wish]) -> int:
    return sum(wish.units[0] for wish in wishes)


@given(ANY)
def test_no_rung_is_worth_more_than_the_one_before_and_each_is_faster(wish: Wish) -> None:
    assert [step.gain for step in wish.steps] == sorted((step.gain for step in wish.steps), reverse=True)
    speeds = [wish.curve.speedup(amount) for amount in wish.amounts]
    assert all(later > earlier for earlier, later in pairwise(speeds))
    assert [step.extra_units for step in wish.steps] == [later - earlier for earlier, later in pairwise(wish.amounts)]
    assert wish.amounts[-1] == wish.fastest(wish.units[-1])


def test_a_step_that_saves_little_does_not_keep_a_running_action_from_one_that_saves_much(world: Any) -> None:
    # Given an action that two cores do next to nothing for, and eight a lot, on the one core that is left
    w = world().node(cores=8)
    w.run("other", 7)
    Wish((1, 2, 8), Table(((2, 0.505), (8, 0.9)))).submit(w, "a0", work_s=4.0)
    assert w.units["a0"] == 1
    w.finish("other")
    # Then it has them, although the first of them alone would not be worth a resize
    assert w.units == {"a0": 8}


@given(st.lists(BY_ONE, min_size=1, max_size=4), st.integers(0, 12))
def test_in_steps_of_one_core_no_division_is_worth_more(world: Any, wishes: list[Wish], spare: int) -> None:
    cores = least(wishes) + spare
    w = all_at_once(world, wishes, cores)
    assert sum(w.units.values()) <= cores
    assert sum_of_worths(w, wishes) == pytest.approx(best(wishes, cores), rel=1e-9, abs=1e-9)


@given(st.lists(ANY, min_size=1, max_size=4), st.integers(0, 20))
def test_in_larger_steps_the_worth_is_short_of_the_largest_by_less_than_one_rung(world: Any, wishes: list[Wish], spare: int) -> None:
    cores = least(wishes) + spare
    w = all_at_once(world, wishes, cores)
    steps = [step.gain * step.extra_units for wish in wishes for step in wish.steps]
    assert sum_of_worths(w, wishes) >= best(wishes, cores) - max(steps, default=0.0) * (1 + 1e-9) - 1e-9


@given(st.lists(BY_ONE, min_size=2, max_size=5), st.integers(0, 12))
def test_whoever_comes_later_takes_what_is_worth_clearly_more_to_it(world: Any, wishes: list[Wish], spare: int) -> None:
    w = world().node(cores=least(wishes) + spare)
    for number, wish in enumerate(wishes):
        wish.submit(w, f"a{number}")
    # Then no core is idle that somebody could use, and none would be worth TUNING.gain_ratio times as much to another
    below, above = [], []
    for number, wish in enumerate(wishes):
        steps, at = wish.steps, w.units[f"a{number}"]
        below += [step.gain for step in steps if step.units <= at]
        above += [step.gain for step in steps if step.units > at]
    assert sum(w.units.values()) == least(wishes) + spare or not above
    assert max(above, default=0.0) <= TUNING.gain_ratio * min(below, default=math.inf) + 1e-9


@given(st.lists(ANY, min_size=1, max_size=6), st.integers(0, 12))
def test_what_ends_gives_its_cores_to_those_that_run_on(world: Any, wishes: list[Wish], spare: int) -> None:
    w = all_at_once(world, wishes, least(wishes) + spare)
    for number in range(1, len(wishes)):
        w.finish(f"a{number}")
    assert w.units == {"a0": wishes[0].fastest(least(wishes) + spare)}


WORK = st.sampled_from([0.01, 0.1, 1.0, 20.0])
ARRIVALS = st.lists(st.tuples(ANY, WORK, st.sampled_from([0.0, 0.3, 2.0])), min_size=1, max_size=10)


@settings(max_examples=60)
@given(ARRIVALS, st.sampled_from([8, 12]), st.randoms(use_true_random=False))
def test_a_resize_is_worth_its_while_and_no_core_is_taken_for_nobody(world: Any, arrivals: Any, cores: int, draw: Any) -> None:
    w = world().node(cores=cores)
    for number, (wish, work_s, pause_s) in enumerate(arrivals):
        w.now += pause_s
        check_look(w, lambda n=number, a=wish, s=work_s: a.submit(w, f"a{n}", s))
        if draw.random() < 0.5 and w.grants:
            check_look(w, lambda: w.finish(draw.choice(sorted(w.grants))))


def check_look(w: Any, happen: Any) -> None:
    before = dict(w.units)
    left_s = {action_id: running.left_s(w.now) for action_id, running in w.core.state.running.items()}
    seen = len(w.out)
    happen()
    resized = [command.id for command in w.out[seen:] if isinstance(command, Resize)]
    assert len(set(resized)) == len(resized), "one look resizes an action once"
    taken = [before[i] - w.units[i] for i in resized if w.units[i] < before[i]]
    given_out = sum(w.units[i] - before.get(i, 0) for i in w.units if w.units[i] > before.get(i, 0))
    assert not taken or given_out > sum(taken) - max(taken), "the last to shrink did so for nobody"
    for action_id in resized:
        if w.units[action_id] > before[action_id]:
            curve = w.core.state.running[action_id].waiting.estimate.curve
            saved_s = left_s[action_id] * (1 / curve.speedup(before[action_id]) - 1 / curve.speedup(w.units[action_id]))
            assert saved_s >= TUNING.least_saving_s - 1e-9


def test_without_shrinking_whoever_has_cores_keeps_them(world: Any) -> None:
    w = world(without=["shrinking"]).node(cores=8)
    w.run("x", [1, 8], parallel=0.95, work_s=LONG_S)
    w.run("s", 1)
    assert w.waiting == ["s"]


def test_without_resizing_what_runs_stays_as_it_began(world: Any) -> None:
    w = world(without=["resizing"]).node(cores=8)
    w.run("s", 4)
    w.run("x", [1, 2, 4, 8], parallel=0.95, work_s=LONG_S)
    assert w.units == {"s": 4, "x": 4}
    w.finish("s")
    assert w.units == {"x": 4}
    assert w.of(Resize) == []


def test_an_action_that_is_being_stopped_is_not_resized(world: Any) -> None:
    # Given an action that fills the node and is cancelled, but has not ended yet
    w = world().node(cores=4)
    w.run("x", [1, 4], parallel=0.95, work_s=LONG_S)
    w.handle(events.Cancelled(ids=("x",)))
    w.run("s", 1)
    assert w.waiting == ["s"]
    w.finish("x", "cancelled")
    assert "s" in w.grants
