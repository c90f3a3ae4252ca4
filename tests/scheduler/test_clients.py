"""Clients that are gone: whose silence counts and whose does not, and what becomes of what they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from scheduler.core.core import Core
from scheduler.live.clients import START_S, Clients
from scheduler.model import commands, events
from scheduler.policies import make_policy
from tangram.action import Action

GONE = "its client gave no sign of life for 60 s"


def gone(w: Any, client: str) -> None:
    w.handle(events.ClientGone(client=client, reason=GONE))


def test_all_that_a_client_left_ends_and_nothing_of_others(world: Any) -> None:
    # Given two clients of one job, each with an environment, something that runs and something that waits, and messages of no client
    w = world(without=["preemption"]).node(cores=3)
    for client in ("dead", "alive"):
        w.open(f"e-{client}", client=client)
        w.exec(f"runs-{client}", f"e-{client}", client=client, session="main")
        w.exec(f"waits-{client}", f"e-{client}", client=client, session="main")
    w.run("plain")
    w.run("queued-dead", client="dead")
    w.run("queued-plain")
    gone(w, "dead")
    assert w.ended("waits-dead") == w.ended("queued-dead") == ("cancelled", GONE)
    assert [stop.id for stop in w.of(commands.Stop)] == ["runs-dead"]
    assert [close.id for close in w.of(commands.CloseEnvironment)] == ["e-dead"]
    assert set(w.ends) == {"open-e-dead", "open-e-alive", "waits-dead", "queued-dead"}
    assert {"runs-alive", "plain"} <= set(w.grants)
    assert {"waits-alive", "queued-plain"} == set(w.waiting)
    # And whoever names the environment later learns why it was closed
    w.finish("runs-dead", "cancelled")
    w.beat(running=("runs-alive", "plain"), environments=("e-alive",))
    w.exec("late", "e-dead", client="dead")
    assert w.ended("late") == ("failed", f"environment e-dead was closed 0 s ago: {GONE}")


def test_a_detached_environment_stays_until_its_lease_is_over(world: Any) -> None:
    # Given a detached environment in which its client runs a command
    w = world(lease_s=100.0).node().open("e", client="dead", detached=True)
    w.exec("runs", "e", client="dead")
    gone(w, "dead")
    w.finish("runs", "cancelled")
    # Then its command is stopped, and another client can go on in the environment
    assert [stop.id for stop in w.of(commands.Stop)] == ["runs"]
    w.exec("other", "e", client="other")
    w.finish("other")
    assert w.states("e")[-1] == "open"
    w.tick(99.0)
    assert w.states("e")[-1] == "open"
    w.tick(1.0)
    assert w.states("e")[-1] == "closing"


@pytest.mark.parametrize("detached", [True, False])
def test_an_environment_that_opens_for_a_client_that_is_gone(world: Any, detached: bool) -> None:
    # Given a client that is gone while one of its environments opens and another waits for its turn; then the second is not opened
    w = world(starting_limit=1).node()
    for name in ("e", "waits"):
        w.open(name, finish=False, client="dead", detached=detached)
    gone(w, "dead")
    assert w.ended("open-waits") == ("cancelled", GONE)
    w.finish("open-e")
    assert w.states("e")[-1] == ("open" if detached else "closing")


class Watch:
    """A scheduler that has just started, with an action of each client, and its result store; time goes by seconds, and silence with it."""

    def __init__(self, limit_s: float = 60.0, **silences_s: float | None) -> None:
        self.silences_s = silences_s
        """How long each client has been silent, as the store says while it is not `away`."""
        self.away, self.now = False, 1000.0
        self.core = Core(make_policy("fcfs"))
        for client in ("a", "b"):
            action = Action(kind="my.task", client=client)
            self.core.handle(events.Submitted(id=client, action=action, submitted_at=self.now), self.now)
        self.gone: list[tuple[str, float]] = []
        store: Any = self
        self.clients = Clients(self.core.state, store, self._handle, limit_s, self.now)

    def silences(self, clients: Sequence[str]) -> Mapping[str, float | None] | None:
        return None if self.away else {client: self.silences_s.get(client) for client in clients}

    def _handle(self, event: events.Event, now: float) -> None:
        assert isinstance(event, events.ClientGone)
        self.gone.append((event.client, now - 1000.0))
        self.core.handle(event, now)

    def wait(self, seconds: int, *alive: str) -> None:
        """Let time pass, in which some clients give signs."""
        for _ in range(seconds):
            self.now += 1.0
            for client, silent_s in self.silences_s.items():
                self.silences_s[client] = 0.0 if client in alive else None if silent_s is None else silent_s + 1.0
            self.clients.check(self.now)


def test_a_client_that_comes_back_in_time_loses_nothing() -> None:
    watch = Watch(a=0.0, b=0.0)
    for _ in range(5):
        watch.wait(50, "a")
        watch.wait(5, "a", "b")
    assert watch.gone == []


def test_a_restart_does_not_begin_the_limit_anew() -> None:
    watch = Watch(a=0.0, b=55.0)
    watch.wait(60, "a")
    # Then it is gone as soon as it has had the time to reach the scheduler
    ((client, after_s),) = watch.gone
    assert client == "b" and START_S <= after_s <= START_S + 6


def test_a_restart_gives_clients_the_time_to_be_heard() -> None:
    # Given clients that could not give signs for long when the scheduler starts: the store was away, too
    watch = Watch(a=300.0, b=300.0)
    watch.wait(12)
    watch.wait(100, "a", "b")
    assert watch.gone == []


@pytest.mark.parametrize(("away_s", "silent_s"), [(300, 300.0), (0, None)], ids=["away", "empty"])
def test_nobody_is_gone_because_the_store_was_away_or_has_forgotten_everything(away_s: int, silent_s: float | None) -> None:
    # Given a store that is away for long, and was as away for the clients, or that has lost all keys
    watch = Watch(a=0.0, b=0.0)
    watch.wait(100, "a", "b")
    watch.away = True
    watch.wait(away_s)
    watch.away = False
    # When one client gives signs again and the other one does not
    watch.silences_s = {"a": silent_s, "b": silent_s}
    watch.wait(50)
    assert watch.gone == []
    watch.silences_s["a"] = 0.0
    watch.wait(30, "a")
    assert [client for client, _ in watch.gone] == ["b"]


def test_nobody_is_gone_because_the_scheduler_stood_still() -> None:
    # Given a machine that sleeps with all that is on it
    watch = Watch(a=0.0, b=0.0)
    watch.wait(100, "a", "b")
    watch.now += 3600.0
    watch.silences_s = {"a": 3600.0, "b": 3600.0}
    watch.wait(30)
    # When the clients wake up later than the scheduler
    watch.wait(100, "a", "b")
    assert watch.gone == []


def test_a_client_is_found_gone_though_the_clock_was_set_back() -> None:
    watch = Watch(a=0.0, b=0.0)
    watch.wait(100, "a", "b")
    watch.now -= 900.0
    watch.wait(70, "a")
    assert [client for client, _ in watch.gone] == ["b"]


def test_with_a_limit_of_0_nobody_ever_goes() -> None:
    watch = Watch(a=None, b=1e6, limit_s=0.0)
    watch.wait(1000)
    assert watch.gone == []


def test_a_client_is_gone_once_it_is_silent_for_the_limit_and_what_it_had_sent_before_ends_too() -> None:
    # Given a client that is gone once it has been silent for the limit, a message of which comes in only then
    watch = Watch(a=0.0, b=0.0)
    watch.wait(59, "a")
    assert watch.gone == []
    watch.wait(41, "a")
    ((client, after_s),) = watch.gone
    assert client == "b" and 60 <= after_s <= 66
    late = Action(kind="my.task", client="b")
    watch.core.handle(events.Submitted(id="late", action=late, submitted_at=watch.now), watch.now)
    # When the scheduler looks again
    watch.wait(10, "a")
    # Then that ends as well, and the client is not told of any more
    assert "late" not in watch.core.state.waiting
    watch.wait(100, "a")
    assert [client for client, _ in watch.gone] == ["b", "b"]


def test_a_restarted_scheduler_lets_leases_go_on_and_leaves_time_for_what_was_sent_meanwhile(world: Any) -> None:
    # Given environments of which one was used 50 s before the scheduler started, and two that long ago that their leases were over
    w = world(lease_s=100.0)
    w.now = 1000.0
    w.node()
    for environment, used_at in (("lately", 950.0), ("used", 0.0), ("unused", 0.0)):
        w.handle(events.EnvironmentOpened(id=environment, node="n0", job="j", trajectory="t", used_at=used_at))
    w.tick()
    w.exec("a", "used")
    w.finish("a")
    assert w.of(commands.CloseEnvironment) == []
    # When nobody uses them any more; then each is closed at its time, and the part for uses that were not written down
    w.tick(10.0)
    assert [close.id for close in w.of(commands.CloseEnvironment)] == ["unused"]
    w.tick(40.0)
    assert [close.id for close in w.of(commands.CloseEnvironment)] == ["unused"]
    w.tick(10.0)
    assert [close.id for close in w.of(commands.CloseEnvironment)] == ["unused", "lately"]


def test_the_use_of_an_environment_is_written_down_now_and_then(world: Any) -> None:
    w = world(lease_s=100.0).node().open("e")
    w.out.clear()
    for number in range(100):
        w.now += 1.0
        w.exec(f"a{number}", "e")
        w.finish(f"a{number}")
    # Then that is written down ten times, and it stays open
    assert [(note.state, note.used_at) for note in w.of(commands.NoteEnvironment)] == [("open", 10.0 * n) for n in range(1, 11)]
