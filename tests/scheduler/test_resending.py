"""Grants on their way: their order, and those that never arrived. Requests wait for their turn anew, everything else is sent once more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.live.heartbeats import MOST_RESENT
from scheduler.model import Grant, NodeSpec, QuotaSpec, events
from scheduler.model.commands import Finish, Requeue
from tangram.action import Action, Cost

from .driver import Driver, Wires

CALL = Action(kind="api.call", cost=Cost({"quota:web": (1,)}))
BUILD = Action(kind="build", cost=Cost({"quota:web": (1,), "cores": (1,)}))
NOW = 100.0


class Restarted(Driver):
    """A scheduler that goes on with actions that another one had granted a second before and, killed, not sent."""

    def __init__(self, *granted: Action, quota: QuotaSpec) -> None:
        super().__init__([quota], NOW)
        self.handle(events.NodeJoined(node=NodeSpec(name="n", pools=("api", "cpu"), cores=8), resumed=True), NOW)
        for number, action in enumerate(granted):
            self.executor.keep(f"c{number}", f"c{number}", NOW - 1.0)
            self.executor.granted[f"c{number}"] = 1
            grant = Grant(node="n", attempt=1, units=1, core_ids=(number,)) if action is BUILD else Grant(node="n", attempt=1)
            self.handle(
                events.Resumed(
                    id=f"c{number}", action=action, submitted_at=NOW - 1.0, received_at=NOW - 1.0, granted_at=NOW - 1.0, grant=grant
                ),
                NOW,
            )

    def unknown(self, *numbers: int, attempt: int = 1, now: float = NOW) -> None:
        """Have the node say that it knows nothing of these."""
        for number in numbers:
            self.heartbeats.answer_unknown(f"c{number}", attempt, now)

    def sent_until(self, until: float) -> list[tuple[float, str, int]]:
        """Let time pass; return when each try was sent."""
        times, now = [(NOW, *one) for one in self.wires.sent], NOW
        while (wake := self.core.next_wake(now)) is not None and wake <= until:
            now, before = max(wake, now), len(self.wires.sent)
            self.handle(events.Tick(), now)
            times += [(round(now, 3), *one) for one in self.wires.sent[before:]]
        return times


def test_a_node_hears_who_loses_a_core_before_who_gets_it() -> None:
    # Given a command on the only core of a node
    class Wire(Wires):
        def send_control(self, node: str, task: str, arguments: dict[str, Any]) -> None:
            self.sent.append((task, 0))

    driver = Driver(wires=Wire())
    command = Action(kind="cpu.exec", environment="e", cost=Cost.of(cores=1))

    def submit(action_id: str, action: Action) -> None:
        driver.executor.keep(action_id, action_id, NOW)
        driver.handle(events.Submitted(id=action_id, action=action, submitted_at=NOW), NOW)

    driver.handle(events.NodeJoined(node=NodeSpec(name="n", cores=1)), NOW)
    submit("open", Action(kind="cpu.open", environment="e"))
    driver.handle(events.Finished(id="open", attempt=1, status="succeeded"), NOW)
    submit("usual", command)
    # When a more urgent one gets that core
    submit("urgent", replace(command, priority=9))
    # Then the change of the first is sent before the second
    assert driver.wires.sent == [("open", 1), ("usual", 1), ("tangram.regrant", 0), ("urgent", 1)]


def test_requests_whose_grants_got_lost_are_spaced_as_the_quota_has_it() -> None:
    # Given three requests of ten a second, none of which arrived
    scheduler = Restarted(CALL, CALL, CALL, quota=QuotaSpec(name="web", rate_per_s=10.0))

    # When the node says so of all three at once
    scheduler.unknown(0, 1, 2)

    # Then the old tries are worth nothing, should they arrive after all, and new ones go out in turn
    assert scheduler.wires.disowned == [("c0", 1), ("c1", 1), ("c2", 1)]
    assert scheduler.sent_until(NOW + 5.0) == [(NOW, "c0", 2), (NOW + 0.1, "c1", 2), (NOW + 0.2, "c2", 2)]


def test_nothing_of_them_is_held_while_they_wait_and_a_pause_is_waited_for() -> None:
    # Given two requests of an account that takes two at a time, whose API then asks for a pause of ten seconds
    scheduler = Restarted(CALL, CALL, quota=QuotaSpec(name="web", rate_per_s=10.0, concurrency=2))
    scheduler.core.pools.quotas.accounts["web"].throttle.refused(NOW - 0.5, NOW, 10.0)

    scheduler.unknown(0, 1)

    # Then they hold no places meanwhile, go out after it at the lowered rate, and may be given up before
    assert (scheduler.core.pools.quotas.accounts["web"].running, scheduler.wires.sent) == (0, [])
    scheduler.handle(events.Cancelled(ids=("c1",)), NOW + 1.0)
    assert [end.status for end in scheduler.out if isinstance(end, Finish)] == ["cancelled"]
    assert scheduler.sent_until(NOW + 20.0) == [(NOW + 10.0, "c0", 2)]


def test_tokens_that_were_never_spent_are_not_waited_for() -> None:
    # Given an action that takes a minute's tokens, and was never sent
    costly = Action(kind="api.call", cost=Cost({"quota:web": (1,), "tokens:web": (600,)}))
    scheduler = Restarted(costly, quota=QuotaSpec(name="web", tokens_per_min=600))

    scheduler.unknown(0)

    assert scheduler.wires.sent == [("c0", 2)]


def test_what_holds_cores_keeps_them_and_is_sent_again_as_it_is() -> None:
    # Given a build that also draws on a quota of one in two seconds
    scheduler = Restarted(BUILD, quota=QuotaSpec(name="web", rate_per_s=0.5))

    scheduler.unknown(0)

    # Then it keeps its core, and its request counts: the next one comes two seconds later
    assert scheduler.wires.sent == [("c0", 1)]
    assert not [one for one in scheduler.out if isinstance(one, Requeue)]
    scheduler.executor.keep("new", "new", NOW)
    scheduler.handle(events.Submitted(id="new", action=CALL, submitted_at=NOW), NOW)
    assert scheduler.sent_until(NOW + 9.0)[1:] == [(NOW + 3.0, "new", 1)]


def test_what_has_begun_is_not_sent_again() -> None:
    # Given two builds that have begun, of one of which the store has the result
    scheduler = Restarted(BUILD, BUILD, quota=QuotaSpec(name="web", concurrency=2))
    for name in ("c0", "c1"):
        scheduler.handle(events.Started(id=name, attempt=1, at=NOW), NOW)
    scheduler.wires.stored_ends = lambda kinds: [events.StoredEnd(id="c1", status="succeeded")] if "c1" in kinds else []

    scheduler.unknown(0, 1)

    # Then neither runs once more
    assert scheduler.wires.sent == []
    assert [(end.id, end.status) for end in scheduler.out if isinstance(end, Finish)] == [("c0", "lost"), ("c1", "succeeded")]


def test_a_request_that_was_given_up_is_not_sent_again() -> None:
    scheduler = Restarted(CALL, quota=QuotaSpec(name="web", rate_per_s=10.0))
    scheduler.core.state.running["c0"].stopping = "cancelled by the trainer"

    scheduler.unknown(0)

    assert scheduler.wires.sent == []
    assert [end.status for end in scheduler.out if isinstance(end, Finish)] == ["cancelled"]


def test_what_cannot_be_delivered_is_given_up_at_last_and_old_tries_do_not_count() -> None:
    scheduler = Restarted(CALL, quota=QuotaSpec(name="web", rate_per_s=10.0))

    # When an old try is not known, nothing happens
    scheduler.unknown(0, attempt=7)
    scheduler.handle(events.NeverArrived(id="c0", attempt=7), NOW)
    scheduler.handle(events.NeverArrived(id="nobody", attempt=1), NOW)
    assert (scheduler.wires.sent, scheduler.wires.disowned) == ([], [])

    # When one try after the other never arrives
    for attempt in range(1, MOST_RESENT + 2):
        scheduler.unknown(0, attempt=attempt, now=NOW + attempt)
        scheduler.heartbeats.forget_the_gone()

    # Then that has an end
    assert [end.status for end in scheduler.out if isinstance(end, Finish)] == ["lost"]
    assert len(scheduler.wires.sent) == MOST_RESENT


def test_a_report_that_comes_several_times_uses_up_one_try_of_its_grant() -> None:
    # Given a granted action on a node that beats every second
    driver = Driver(now=NOW, beat_s=1.0)
    driver.handle(events.NodeJoined(node=NodeSpec(name="n", pools=("cpu",), cores=1)), NOW)
    driver.executor.keep("a", "a", NOW)
    driver.handle(events.Submitted(id="a", action=Action(kind="build", cost=Cost.of(cores=1)), submitted_at=NOW), NOW)
    sent = len(driver.wires.sent)
    # When the node says five times at once that it does not know it, since the answers of the broker were lost
    for _ in range(5):
        driver.heartbeats.answer_unknown("a", 1, NOW)
    # Then its grant is sent once more, and it is not given up
    assert len(driver.wires.sent) == sent + 1
    assert "a" in driver.core.state.running
