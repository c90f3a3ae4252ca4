"""A scheduler that goes on where another one stopped: it takes up every grant as it was, and shares out anew from there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.core import Core
from scheduler.cpu.cores import CoreGroup
from scheduler.model import Grant, Limits, NodeSpec, events
from scheduler.model.commands import Finish, Resize, Start
from tangram.action import Action, Cost
from tangram.elasticity import FLAT, Amdahl

from .inside import check_inside
from .ledger import Book, Ledger
from .scene import make_core

NODE = NodeSpec(name="n0", cores=8)
WISHES = st.tuples(
    st.sampled_from([((1,), "instant"), ((1,), "medium"), ((1,), "endless"), ((3,), "endless"), ((1, 2, 4), None), ((1, 8), None)]),
    st.sampled_from("ab"),
    st.sampled_from(["cpu.exec", "cpu.exec", "build"]),
    st.booleans(),
)


class Succession:
    """A core with its books, which one after it inherits. Commands run in the environment of their job."""

    def __init__(self, policy: str) -> None:
        self.policy, self.now = policy, 0.0
        self.ledger = Ledger(Limits(), shares=False)
        self.core = make_core(policy, Limits())
        self.ledger.nodes[NODE.name] = NODE
        self.ledger.cells.join(NODE)
        self.handle(events.NodeJoined(node=NODE))
        for job in "ab":
            self.take(Action(kind="cpu.open", environment=f"e-{job}", job=job))
            self.finish_first()

    def handle(self, event: events.Event) -> None:
        for command in self.core.handle(event, self.now):
            self.ledger.take(command, self.now)

    def submit(self, wish: Any) -> None:
        (units, name), job, kind, _ = wish
        self.take(
            Action(
                kind=kind,
                cost=Cost.of(cores=units),
                curve=FLAT if len(units) == 1 else Amdahl(0.95),
                job=job,
                action_class=name,
                work_s=60.0,
                environment=f"e-{job}" if kind == "cpu.exec" else None,
            )
        )

    def take(self, action: Action) -> None:
        action_id = f"a{len(self.ledger.actions)}"
        self.ledger.actions[action_id] = Book(action)
        self.handle(events.Submitted(id=action_id, action=action, submitted_at=self.now))

    def finish_first(self) -> None:
        for action_id, book in list(self.ledger.running().items())[:1]:
            self.handle(events.Finished(id=action_id, attempt=book.attempt, status="succeeded", execution_s=1.0, cpu_s=0.1))

    def wait(self, seconds: float) -> None:
        """Let time pass, in which all in the background get on a little."""
        self.now += seconds
        for action_id, book in self.ledger.running().items():
            if book.grant.background:
                self.handle(events.Used(id=action_id, attempt=book.attempt, background_cpu_s=self.now / 10))
        self.handle(events.Tick())

    def hand_over(self, policy: str | None = None) -> None:
        """Have another core take everything up, as the service tells it: nodes, environments, what runs, what waits."""
        before = {action_id: book.grant for action_id, book in self.ledger.running().items()}
        waiting = {action_id: book for action_id, book in self.ledger.actions.items() if book.state == "waiting"}
        self.core = make_core(policy or self.policy, Limits())
        self.handle(events.NodeJoined(node=NODE))
        for one in list(self.ledger.environments.values()):
            self.handle(events.EnvironmentOpened(id=one.id, node="n0", job=one.job, trajectory=one.trajectory, memory_mb=one.memory_mb))
        for action_id, grant in before.items():
            self.handle(resumed(action_id, self.ledger.actions[action_id].action, grant))
        assert {action_id: book.grant for action_id, book in self.ledger.running().items()} == before
        for action_id, book in waiting.items():
            self.handle(events.Submitted(id=action_id, action=book.action, submitted_at=0.0, received_at=0.0))
        self.handle(events.Tick())


def resumed(action_id: str, action: Action, grant: Grant) -> events.Resumed:
    return events.Resumed(id=action_id, action=action, submitted_at=0.0, received_at=0.0, granted_at=0.0, grant=grant)


@settings(max_examples=60, deadline=None)
@given(
    wishes=st.lists(WISHES, min_size=1, max_size=16),
    later=st.lists(WISHES, max_size=6),
    policy=st.sampled_from(["elastic", "elastic", "elastic without preemption", "elastic without resizing", "fcfs"]),
    passing_s=st.sampled_from([0.0, 1.0, 21.0]),
)
def test_whatever_runs_is_taken_up_and_comes_to_its_end(wishes: list[Any], later: list[Any], policy: str, passing_s: float) -> None:
    # Given a scheduler with actions of all sorts running and waiting, some of them in the background
    life = Succession(policy)
    for wish in wishes:
        life.submit(wish)
        if wish[3]:
            life.finish_first()
        life.wait(passing_s)
        check_books(life)

    # When another one goes on, and more of them come
    life.now += 5.0
    life.hand_over()
    check_books(life)
    for wish in later:
        life.submit(wish)
        life.wait(passing_s)
        check_books(life)

    # Then all of them come to their ends, and nothing is held any more
    for _ in range(200):
        life.finish_first()
        check_books(life)
    assert {book.state for book in life.ledger.actions.values()} == {"succeeded"}
    group = life.core.pools.cpu.groups["n0"]
    assert (group.free, group.marginal.extra, group.running, group.background, len(group.queue)) == (8, 0, {}, {}, 0)


def check_books(life: Succession) -> None:
    life.ledger.check()
    check_inside(life.core, life.ledger)


def test_cores_that_two_grants_name_belong_to_the_first_and_are_counted_once() -> None:
    # Given a journal that missed a resize, so that two grants name the same core
    core = Core(make_core("elastic", Limits()).policy)
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=(1, 2)), curve=Amdahl(0.9), job="a")
    core.handle(resumed("first", action, Grant(node="n0", units=2, core_ids=(0, 1))), 0.0)
    core.handle(resumed("second", action, Grant(node="n0", units=2, core_ids=(1, 2))), 0.0)
    core.handle(resumed("third", action, Grant(node="n0", core_ids=(2,))), 0.0)

    # Then what a job holds is what it got
    group: CoreGroup = core.pools.cpu.groups["n0"]
    assert [one.grant.core_ids for one in group.running.values()] == [(0, 1), (2,), ()]
    assert core.state.shares._held["a"]["cores"] == 3.0
    core.handle(events.Submitted(id="other", action=action, submitted_at=0.0), 0.0)
    for name in ("first", "second", "third"):
        core.handle(events.Finished(id=name, attempt=1, status="succeeded"), 1.0)
    assert core.state.shares._held["a"]["cores"] == 2.0
    assert group.free == 6
    assert list(group.running) == ["other"]


@pytest.mark.parametrize("policy", ["elastic", "elastic without preemption"])
def test_what_ran_in_the_background_gets_a_core_from_the_next_scheduler(policy: str) -> None:
    # Given a full node, with one more command in the background
    life = Succession("elastic")
    for _ in range(9):
        life.submit((((1,), "endless"), "a", "cpu.exec", False))
    (behind,) = [action_id for action_id, book in life.ledger.running().items() if book.grant.background]

    # When another scheduler goes on, and a core falls free
    life.hand_over(policy)
    assert life.ledger.running()[behind].grant.background
    life.finish_first()

    # Then that one has it
    assert len(life.ledger.running()[behind].grant.core_ids) == 1
    life.ledger.check()


def test_without_resizing_what_was_taken_up_stays_as_it_is() -> None:
    # Given an elastic action on one core that an earlier scheduler started
    core = make_core("elastic without resizing", Limits())
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=(1, 2, 4)), curve=Amdahl(0.95), work_s=100.0)
    core.handle(resumed("old", action, Grant(node="n0", units=1, core_ids=(0,))), 0.0)

    # When another one starts
    out = core.handle(events.Submitted(id="next", action=Action(kind="build", cost=Cost.of(cores=1)), submitted_at=0.0), 0.0)

    # Then the first does not grow
    assert not any(isinstance(command, Resize) for command in out)


def test_a_worker_hears_at_once_of_cores_that_the_next_scheduler_does_not_know_as_background() -> None:
    # Given a command in the background of an earlier scheduler
    core = make_core("fcfs", Limits())
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="build", cost=Cost.of(cores=1))

    # When a policy that has none takes it up
    out = core.handle(resumed("old", action, Grant(node="n0", background=True)), 0.0)

    # Then its worker is told before it can have ended
    assert out == [Resize(id="old", node="n0", attempt=1, core_ids=(), units=1, background=False)]
    ended = core.handle(events.Finished(id="old", attempt=1, status="succeeded"), 0.0)
    assert [type(command) for command in ended] == [Finish]


def test_an_environment_whose_node_is_gone_opens_elsewhere_with_the_next_event() -> None:
    # Given another node, and an environment that an earlier scheduler was opening on one that is gone
    core = make_core("elastic", Limits())
    core.handle(events.NodeJoined(node=NODE), 0.0)
    action = Action(kind="cpu.open", environment="e1")
    core.handle(resumed("open", action, Grant(node="gone")), 0.0)

    # When anything at all happens
    out = core.handle(events.NodeBeat(name="n0"), 0.0)

    # Then it opens there
    assert [command.grant.node for command in out if isinstance(command, Start)] == ["n0"]
