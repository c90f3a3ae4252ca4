"""Memory that is granted to environments as they use it: growing, waiting for it, giving it back, and its want."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.memory import SHORT_S, STEP_MB
from scheduler.learning.holdings import MOST_JOBS, UNKNOWN_MB, Holdings
from scheduler.live.document import queues_and_shares
from scheduler.model import commands, events
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.wire import CUSHION_MB, HEADROOM_MB

LIMIT_MB = 300
FIRST_MB = UNKNOWN_MB + CUSHION_MB


def granting(world: Any, memory_mb: int, **policy: Any) -> Any:
    return world(**policy).node(memory_mb=memory_mb, grants_memory=True)


def stand(w: Any, *environments: str, **fields: Any) -> None:
    """Open environments that hold nothing."""
    for environment in environments:
        w.open(environment, memory_mb=LIMIT_MB, finish=False, **fields)
        w.finish(f"open-{environment}", memory_mb=0, resident_mb=0)


def want(w: Any, environment: str, allowance_mb: int) -> list[Any]:
    """Have an environment report that it has used up its allowance; return the allowances that follow at once."""
    out = w.handle(events.MemoryWanted(environment=environment, allowance_mb=allowance_mb))
    return [command.allowance_mb for command in out if isinstance(command, commands.Allow)]


def fill(w: Any, environment: str, allowance_mb: int) -> int:
    """Have an environment use all that it can get; return its allowance then."""
    while allowed := want(w, environment, allowance_mb):
        (allowance_mb,) = allowed
    return allowance_mb


def known(w: Any, holding_mb: int = 20) -> None:
    """Have so many environments of the job live and end that it is known how little they hold."""
    for number in range(8):
        stand(w, f"known{number}")
        w.exec(f"first{number}", f"known{number}")
        w.finish(f"first{number}", memory_mb=holding_mb, resident_mb=holding_mb)
        w.close(f"known{number}", finish=True)


def test_an_action_is_granted_what_such_actions_use_and_its_environment_grows_in_steps_up_to_its_limit(world: Any) -> None:
    w = granting(world, 1000)
    stand(w, "e")
    w.exec("a", "e")
    assert w.grants["a"].allowance_mb == FIRST_MB
    assert want(w, "e", FIRST_MB) == [FIRST_MB + STEP_MB]
    assert want(w, "e", FIRST_MB) == [FIRST_MB + STEP_MB]  # a report that names an earlier allowance
    assert want(w, "e", FIRST_MB + STEP_MB) == [2 * (UNKNOWN_MB + STEP_MB) + CUSHION_MB]
    assert want(w, "e", 2 * (UNKNOWN_MB + STEP_MB) + CUSHION_MB) == [LIMIT_MB]
    assert want(w, "e", LIMIT_MB) == []  # the program's own fault


def test_actions_at_a_time_are_granted_the_sum_and_after_the_last_one_what_is_held_is_kept_and_a_little_more(world: Any) -> None:
    w = granting(world, 1000)
    stand(w, "e")
    for name in ("a", "b"):
        w.exec(name, "e", session=name)
    assert w.grants["b"].allowance_mb == 2 * FIRST_MB
    w.finish("a", memory_mb=60)
    before_mb = w.core.state.nodes["n0"].memory_free
    w.finish("b", memory_mb=60, resident_mb=50)
    w.exec("c", "e")
    assert w.grants["c"].allowance_mb >= 50 + HEADROOM_MB and w.core.state.nodes["n0"].memory_free >= before_mb


@pytest.mark.parametrize(
    ("policy", "spec", "fields"),
    [({}, {"grants_memory": False}, {}), ({}, {}, {"memory": "fixed"}), ({"without": ["memory"]}, {}, {}), ({"policy": "fcfs"}, {}, {})],
)
def test_memory_is_booked_by_limit_where_the_node_the_open_or_the_policy_says_so(world: Any, policy: Any, spec: Any, fields: Any) -> None:
    w = world(**policy).node(memory_mb=1000, **{"grants_memory": True, **spec})
    w.open("e", memory_mb=LIMIT_MB, **fields)
    w.exec("a", "e")
    assert w.core.state.nodes["n0"].memory_free == 1000 - LIMIT_MB
    assert w.grants["a"].allowance_mb == 0
    # And what an earlier scheduler has bounded may use its limit, unless its trainer has fixed that
    assert want(w, "e", 10) == ([] if "memory" in fields else [LIMIT_MB])


def test_limits_count_until_it_is_known_what_environments_of_a_job_hold(world: Any) -> None:
    w = granting(world, 3 * LIMIT_MB)
    w.several(w.open, "e", 12, memory_mb=LIMIT_MB, finish=False)
    opened = [f"e{number}" for number in range(12) if f"open-e{number}" in w.grants]
    assert opened == ["e0", "e1", "e2"]
    for environment in opened:
        w.finish(f"open-{environment}", memory_mb=0, resident_mb=0)
        w.exec(f"a-{environment}", environment)
        w.finish(f"a-{environment}", memory_mb=30, resident_mb=30)
    assert all(f"open-e{number}" in w.grants for number in range(3, 12))


def test_jobs_without_environments_are_forgotten_the_oldest_first() -> None:
    holdings = Holdings()
    holdings.peaked("runs", None, 50)
    for number in range(MOST_JOBS):
        holdings.grew(f"j{number}", "first", 10)
    assert [holdings.headroom_mb(job, "first") for job in ("j0", "j1")] == [UNKNOWN_MB, 10]
    holdings.ended("runs", 50, counts=True)


# Waiting for memory


def crowded(world: Any, others: Callable[[Any], object] = lambda w: None, others_mb: int = 0) -> Any:
    """Return a node on which two environments run, of which the first has the turn and the other waits for memory.

    The `others` have so much more, by limit.
    """
    w = granting(world, 440 + others_mb, history=())
    known(w)
    others(w)
    stand(w, "e", "f")
    w.exec("a", "e")
    w.exec("b", "f")
    assert fill(w, "e", w.grants["a"].allowance_mb) == LIMIT_MB
    fill(w, "f", w.grants["b"].allowance_mb)
    return w


def test_an_environment_that_finds_no_memory_leaves_its_cores_and_goes_on_when_memory_is_given_back(world: Any) -> None:
    # Given an environment that waits for memory, in which an action starts that gets no cores either
    w = crowded(world)
    w.exec("c", "f", session="other")
    assert w.background == ["b", "c"] and w.grants["a"].core_ids
    w.open("g", memory_mb=LIMIT_MB, finish=False)
    assert "open-g" not in w.grants
    w.finish("a", memory_mb=LIMIT_MB, resident_mb=20)
    assert isinstance(w.of(commands.Allow)[-1], commands.Allow) and w.of(commands.Allow)[-1].environment == "f"
    assert w.grants["b"].core_ids and w.grants["c"].core_ids
    # And environments open again when nobody waits for memory
    w.finish("b", memory_mb=LIMIT_MB, resident_mb=20)
    w.finish("c", memory_mb=LIMIT_MB, resident_mb=20)
    assert "open-g" in w.grants


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (lambda w: w.open("x", memory_mb=250, memory="fixed"), lambda w: w.close("x", finish=True)),
        (lambda w: w.submit("x", "build", cost={"cores": 1, "memory_mb": 250}), lambda w: w.finish("x")),
    ],
)
def test_an_environment_that_finds_no_memory_goes_on_with_what_was_booked_by_limit(world: Any, begin: Any, end: Any) -> None:
    w = crowded(world, begin, 250)
    assert w.background == ["b"] and w.grants["a"].core_ids
    end(w)
    assert w.grants["b"].core_ids and w.grants["a"].core_ids


def test_while_an_environment_uses_the_reserve_actions_of_others_start(world: Any) -> None:
    # Given an environment that has grown into the reserve, so that less than nothing is free
    w = granting(world, 440, history=())
    known(w)
    stand(w, "e", "f")
    w.exec("a", "e")
    fill(w, "e", w.grants["a"].allowance_mb)
    assert w.core.state.nodes["n0"].memory_free < 0
    # Then an action of another one, which has an allowance already, starts
    w.exec("b", "f")
    assert w.grants["b"].core_ids and not w.grants["b"].allowance_mb


def test_an_action_that_needs_no_more_than_its_environment_has_is_granted_nothing(world: Any) -> None:
    # Given an environment whose node has said to what it has lowered the allowance, and a job whose actions add nothing
    w = granting(world, 1000)
    stand(w, "e")
    for name in ("a", "b"):
        w.exec(name, "e")
        w.finish(name, memory_mb=20, resident_mb=20)
    serial = [command.grant.allowance_serial for command in w.of(commands.Start)][-1]
    w.exec("c", "e")
    assert w.grants["c"].allowance_mb == 0 and granted_mb(w) == 20 + HEADROOM_MB
    w.finish("c", memory_mb=20, resident_mb=20)
    # When a beat names another allowance than the last one; then the next action is granted what is booked
    assert len(beat(w, "e", LIMIT_MB, serial - 1)) == 1
    w.exec("d", "e")
    assert w.grants["d"].allowance_mb == 20 + HEADROOM_MB


def test_tools_are_shown_what_is_granted_and_who_is_paused(world: Any) -> None:
    w = crowded(world)
    memory = queues_and_shares(w.core, {}, w.now)["nodes"]["n0"]["memory"]
    assert (memory["paused_count"], list(memory["paused"])) == (1, ["f"])
    assert memory["granted_mb"] + memory["reserve_mb"] + w.core.state.nodes["n0"].memory_free == 440


def test_one_that_is_stopped_while_it_waits_for_memory_leaves_nothing_behind(world: Any) -> None:
    w = crowded(world)
    w.handle(events.Cancelled(ids=("b",)))
    w.finish("b", "cancelled")
    w.finish("a", memory_mb=LIMIT_MB, resident_mb=20)
    w.close("e", finish=True)
    w.close("f", finish=True)
    assert w.core.state.nodes["n0"].memory_free == 440


def test_where_all_hold_their_memory_for_good_the_one_with_least_work_invested_ends_and_nobody_scores_it(world: Any) -> None:
    # Given an environment that holds all of its memory for good, and one that waits
    w = crowded(world)
    w.finish("a", memory_mb=LIMIT_MB, resident_mb=LIMIT_MB, execution_s=100.0)
    assert w.background == ["b"]
    w.exec("next", "f", session="main2")
    w.tick(SHORT_S)
    # Then the one with least work is closed, and its actions end by a cause that is ours
    assert [command.id for command in w.of(commands.CloseEnvironment)] in (["e"], ["f"])
    (closed,) = [command.id for command in w.of(commands.CloseEnvironment)]
    for stop in w.of(commands.Stop):
        w.finish(stop.id, "cancelled")
    w.handle(events.EnvironmentClosed(id=closed, reason="closed"))
    noted = [note for note in w.of(commands.NoteEnvironment) if note.id == closed][-1]
    assert (noted.state, noted.cause) == ("lost", "memory_short")
    assert {end.cause for end in w.ends.values() if end.status in ("cancelled", "lost")} <= {"memory_short"}


def test_an_environment_in_which_nothing_runs_keeps_no_turn(world: Any) -> None:
    # Given an environment in which a program that an action has left grows to the limit while no action runs
    w = granting(world, 440)
    known(w)
    stand(w, "e", "f")
    w.exec("a", "e")
    w.finish("a", memory_mb=20, resident_mb=20)
    assert fill(w, "e", 20 + HEADROOM_MB) == LIMIT_MB
    # When another waits for memory, and nothing gives any back for long; then one of them ends
    w.exec("b", "f")
    fill(w, "f", w.grants["b"].allowance_mb)
    assert w.background == ["b"]
    w.tick(SHORT_S)
    assert len(w.of(commands.CloseEnvironment)) == 1


# What beats say


def beat(w: Any, environment: str, allowance_mb: int, serial: int = 0, *running: str) -> list[commands.Allow]:
    """Have the node say what an environment may use, and which allowance came there last; return the allowances that follow."""
    before = len(w.out)
    allowed = events.Allowed(environment=environment, allowance_mb=allowance_mb, serial=serial)
    w.beat(running=running, environments=tuple(w.core.state.environments), allowed=(allowed,))
    return [command for command in w.out[before:] if isinstance(command, commands.Allow)]


def free_mb(w: Any) -> int:
    return int(w.core.state.nodes["n0"].memory_free)


def granted_mb(w: Any) -> int:
    return int(queues_and_shares(w.core, {}, w.now)["nodes"]["n0"]["memory"]["granted_mb"])


def test_a_scheduler_that_takes_over_books_what_beats_say_instead_of_limits(world: Any) -> None:
    # Given a scheduler that finds an open environment in its journal; while no beat names what that may use, its limit is booked
    w = granting(world, 1000)
    w.handle(events.EnvironmentOpened(id="e", node="n0", job="j", trajectory="t", memory_mb=LIMIT_MB))
    w.beat(environments=("e",))
    # When a beat says what it may use; then an allowance that changes nothing shows that no other one is under way
    (sent,) = beat(w, "e", 60)
    assert (sent.environment, sent.allowance_mb) == ("e", 60)
    # And until that has come to the node, nobody lets it use more
    w.exec("early", "e")
    assert w.grants["early"].allowance_mb == 0 and want(w, "e", 60) == [] and free_mb(w) == 1000 - LIMIT_MB
    w.finish("early")
    # When that has come; then what the environment may use is booked, and the reserve
    assert beat(w, "e", 60, sent.serial) == []
    assert free_mb(w) == 1000 - 60 - (LIMIT_MB - 60)
    # And an action is granted what such actions use beyond what the environment holds
    w.exec("a", "e")
    assert w.grants["a"].allowance_mb == 60 - HEADROOM_MB + FIRST_MB and w.grants["a"].allowance_serial > sent.serial
    assert want(w, "e", w.grants["a"].allowance_mb) == [w.grants["a"].allowance_mb + STEP_MB]


def test_a_beat_stands_for_the_report_of_an_end_that_was_lost(world: Any) -> None:
    # Given an action whose end said nothing of memory
    w = granting(world, 2 * LIMIT_MB)
    stand(w, "e")
    w.exec("a", "e")
    fill(w, "e", w.grants["a"].allowance_mb)
    serial = w.of(commands.Allow)[-1].serial
    w.finish("a")
    assert free_mb(w) == LIMIT_MB
    # When a beat says to what the node has lowered the allowance; then it is booked
    assert beat(w, "e", 50, serial) == []
    assert free_mb(w) == 2 * LIMIT_MB - 50 - (LIMIT_MB - 50)
    w.open("f", memory_mb=LIMIT_MB, finish=False)
    assert "open-f" in w.grants


def test_an_allowance_that_an_end_has_passed_is_booked_until_a_beat_says_what_became_of_it(world: Any) -> None:
    # Given an allowance that is under way when the last action ends: the node may take it afterwards, since programs are paused
    w = granting(world, 2 * LIMIT_MB)
    stand(w, "e")
    w.exec("a", "e")
    assert want(w, "e", FIRST_MB) == [FIRST_MB + STEP_MB]
    serial, booked_mb = w.of(commands.Allow)[-1].serial, granted_mb(w)
    # When the end says that the worker has not got it; then it stays booked
    w.finish("a", memory_mb=50, resident_mb=40, allowance_serial=w.grants["a"].allowance_serial)
    assert granted_mb(w) == booked_mb
    # And a beat of a node that has it says what is left
    assert beat(w, "e", 40 + HEADROOM_MB, serial) == [] and granted_mb(w) == 40 + HEADROOM_MB
    # And an end that says that the worker has all leaves what is held at once
    w.exec("b", "e")
    assert granted_mb(w) > 30 + HEADROOM_MB
    w.finish("b", memory_mb=50, resident_mb=30, allowance_serial=w.grants["b"].allowance_serial)
    assert granted_mb(w) == 30 + HEADROOM_MB


def test_a_beat_that_is_older_than_an_allowance_under_way_changes_nothing(world: Any) -> None:
    w = granting(world, 1000)
    stand(w, "e")
    w.exec("a", "e")
    serial = w.grants["a"].allowance_serial
    assert want(w, "e", FIRST_MB) == [FIRST_MB + STEP_MB]
    before_mb = free_mb(w)
    assert beat(w, "e", FIRST_MB, serial, "a") == [] and free_mb(w) == before_mb
    # And where nothing runs that would want more, the next one decides
    w.finish("a")
    (sent,) = beat(w, "e", 30, serial)
    beat(w, "e", 30, sent.serial)
    assert free_mb(w) == 1000 - LIMIT_MB


def test_what_a_node_could_not_lower_is_booked(world: Any) -> None:
    w = granting(world, 2 * LIMIT_MB)
    stand(w, "e")
    w.exec("a", "e")
    w.finish("a", memory_mb=0, resident_mb=0)
    beat(w, "e", 150, w.of(commands.Start)[-1].grant.allowance_serial)
    assert granted_mb(w) == 150


@pytest.mark.parametrize(("most_mb", "limit_mb", "asks"), [(UNKNOWN_MB, LIMIT_MB, 0), (UNKNOWN_MB + 1, LIMIT_MB, 1), (70, 70, 0)])
def test_a_simulated_environment_asks_where_it_comes_near_an_allowance_below_its_limit(most_mb: int, limit_mb: int, asks: int) -> None:
    action = TraceAction(kind="cpu.exec", work_s=1.0, memory_mb=most_mb)
    trace = Trace(trajectories=(Trajectory(trajectory="t", job="j", steps=(Step(actions=(action,)),), memory_mb=limit_mb),))
    assert Simulation(trace, make_policy("elastic"), Cluster(cores=1, memory_mb=1000)).run().memory.asks == asks


@st.composite
def crowds(draw: st.DrawFn, *, for_good: bool) -> tuple[Trace, int]:
    """Draw trajectories with any limits and growths, and the memory of a node that could hold the largest alone."""
    trajectories = []
    for number in range(draw(st.integers(2, 9))):
        limit_mb = draw(st.integers(50, 1000))
        steps = []
        for _ in range(draw(st.integers(1, 6))):
            most_mb = draw(st.one_of(st.integers(1, limit_mb), st.just(limit_mb), st.integers(1, 30)))
            action = TraceAction(
                kind=draw(st.sampled_from(["cpu.exec", "cpu.exec", "cpu.read_file"])),
                work_s=draw(st.sampled_from([0.0, 0.1, 3.0, 40.0])),
                memory_mb=most_mb,
                resident_mb=draw(st.integers(0, most_mb)) if for_good else draw(st.integers(0, min(20, most_mb))),
                preemptible=draw(st.booleans()),
                priority=draw(st.sampled_from([5, 5, 9])),
            )
            steps.append(Step(actions=(action,) * draw(st.sampled_from([1, 1, 3])), think_s=draw(st.sampled_from([0.0, 1.0, 30.0]))))
        job = draw(st.sampled_from(["j1", "j2"]))
        arrival_s = draw(st.sampled_from([0.0, 0.0, 5.0]))
        trajectories.append(Trajectory(trajectory=f"t{number}", job=job, steps=tuple(steps), arrival_s=arrival_s, memory_mb=limit_mb))
    largest_mb = max(each.memory_mb or 0 for each in trajectories)
    return Trace(trajectories=tuple(trajectories)), largest_mb + draw(st.integers(0, 600))


@pytest.mark.parametrize("for_good", [False, True], ids=["they give their memory back", "they keep what they have"])
@given(st.data(), st.integers(1, 4), st.sampled_from([0.0, 0.5]))
def test_environments_that_give_their_memory_back_end_well_and_others_well_or_by_our_hand(
    for_good: bool, data: st.DataObject, cores: int, overhead_s: float
) -> None:
    trace, memory_mb = data.draw(crowds(for_good=for_good))
    record = Simulation(trace, make_policy("elastic"), Cluster(cores=cores, memory_mb=memory_mb), overhead_s=overhead_s).run()
    assert all(min(one.queue_s, one.background_s, one.overhead_s, one.execution_s) >= -1e-9 for one in record.actions)
    assert len(record.actions) == sum(1 for _ in trace.actions())
    assert {action.status for action in record.actions} <= ({"succeeded", "cancelled", "lost"} if for_good else {"succeeded"})
