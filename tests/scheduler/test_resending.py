"""Grants on their way: their order, and those that never arrived. Requests wait for their turn anew, everything else is sent once more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.broker.memory_store import MemoryStore
from scheduler.live.heartbeats import MOST_RESENT
from scheduler.model import QuotaSpec
from scheduler.model.commands import Requeue
from tangram.wire import CLAIM_KEY_PREFIX, GRANT_HEADER, node_queue

from .deployed import Deployment

CALL: dict[str, Any] = {"kind": "api.call", "cost": {"quota:web": 1}}
BUILD: dict[str, Any] = {"kind": "build", "cost": {"quota:web": 1, "cores": 1}}
BEAT_S = 30.0


class Forgetful(Deployment):
    """A scheduler whose node, after two seconds, has got none of the actions `c0`, `c1`… that were granted to it."""

    def __init__(self, *granted: dict[str, Any], **quota: Any) -> None:
        super().__init__()
        self.start("elastic", quotas=[QuotaSpec(name="web", **quota)], beat_s=BEAT_S)
        self.join(kinds=["cpu", "api"])
        for number, action in enumerate(granted):
            self.submit(f"c{number}", **action)
        self.wait(2.0)
        assert len(self.broker.grants()) == len(granted)
        self.began = self.now
        self.broker.purge(node_queue("n"))

    def unknown(self, *numbers: int, attempt: int = 1, **more: float) -> None:
        """Have the node say that it knows nothing of these."""
        self.told(*({"type": "unknown", "id": f"c{number}", "attempt": attempt, **more} for number in numbers))

    def sent_within(self, seconds: float) -> list[tuple[float, str, int]]:
        """Let time pass; return after how many seconds each try was sent."""
        found, until = [(0.0, *grant) for grant in self.broker.grants()], self.began + seconds
        while (wake := self.core.next_wake(self.now)) is not None and wake <= until:
            self.now = max(wake, self.now)
            self.service.step()
            found += [(round(self.now - self.began, 3), *grant) for grant in self.broker.grants()[len(found) :]]
        return found

    @property
    def disowned(self) -> list[str]:
        """The tries that are worth nothing any more."""
        return [key.removeprefix(CLAIM_KEY_PREFIX) for key in self.broker.keys(CLAIM_KEY_PREFIX)]


def test_a_node_hears_who_loses_a_core_before_who_gets_it() -> None:
    deployment = Deployment()
    deployment.start("elastic")
    deployment.join(cores=1)
    deployment.open("e")
    deployment.exec("usual", "e")
    deployment.broker.purge(node_queue("n"))
    deployment.submit("urgent", kind="cpu.exec", environment="e", priority=9)
    tasks = [message.decode() for message in deployment.broker.waiting(node_queue("n"))]
    assert ["tangram.regrant" in tasks[0], '"urgent"' in tasks[1], len(tasks)] == [True, True, 2]


def test_a_request_that_is_granted_ahead_says_when_it_is_to_go() -> None:
    # Given a quota of ten a second that may be granted 50 ms ahead; when two requests come
    deployment = Deployment()
    deployment.start(quotas=[QuotaSpec(name="web", rate_per_s=10.0, lead_s=0.05)])
    deployment.join(kinds=["api"])
    deployment.submit("a", "b", **CALL)
    deployment.now += 0.05
    deployment.service.step()
    grants = [json.loads(message)["headers"][GRANT_HEADER] for message in deployment.broker.waiting(node_queue("n"))]
    assert [grant.get("not_before") for grant in grants] == [None, pytest.approx(1000.1)]


def test_requests_whose_grants_got_lost_are_spaced_as_the_quota_has_it() -> None:
    # Given three requests of ten a second, none of which arrived; when the node says so of all three at once
    scheduler = Forgetful(CALL, CALL, CALL, rate_per_s=10.0)
    scheduler.unknown(0, 1, 2)
    # Then the old tries are worth nothing, should they arrive after all, and new ones go out in turn
    assert scheduler.disowned == ["c0:1", "c1:1", "c2:1"]
    assert scheduler.sent_within(5.0) == [(0.0, "c0", 2), (0.1, "c1", 2), (0.2, "c2", 2)]


def test_a_request_that_a_worker_has_claimed_is_not_granted_anew() -> None:
    # Given a request that a worker got late, or has died with; when its node says that it knows nothing of it
    scheduler = Forgetful(CALL, concurrency=1)
    MemoryStore(scheduler.broker).set(f"{CLAIM_KEY_PREFIX}c0:1", "a worker")
    for _ in range(MOST_RESENT):
        scheduler.unknown(0)
        assert (scheduler.broker.grants(), scheduler.running) == ([], ["c0"])
        scheduler.now += BEAT_S + 1.0
    # Then it keeps its place, since it may be made, and is lost where the node says so again and again
    scheduler.unknown(0)
    assert (scheduler.broker.grants(), scheduler.ends()) == ([], {"c0": ("lost", False)})


def test_nothing_of_them_is_held_while_they_wait_and_a_pause_is_waited_for() -> None:
    # Given two requests of an account that takes two at a time, whose API then asks for a pause of ten seconds
    scheduler = Forgetful(CALL, CALL, rate_per_s=10.0, concurrency=2)
    scheduler.core.pools.quotas.accounts["web"].throttle.refused(scheduler.now - 0.5, scheduler.now, 10.0)
    scheduler.unknown(0, 1)
    # Then they hold no places meanwhile, go out after it at the lowered rate, and may be given up before
    assert (scheduler.core.pools.quotas.accounts["web"].running, scheduler.broker.grants()) == (0, [])
    scheduler.asked({"cancel": {"ids": ["c1"]}})
    assert scheduler.ends() == {"c1": ("cancelled", False)}
    assert scheduler.sent_within(20.0) == [(10.0, "c0", 2)]


def test_tokens_that_were_never_spent_are_not_waited_for() -> None:
    # Given an action that takes a minute's tokens, and was never sent
    scheduler = Forgetful({"kind": "api.call", "cost": {"quota:web": 1, "tokens:web": 600}}, tokens_per_min=600)
    scheduler.unknown(0)
    assert scheduler.broker.grants() == [("c0", 2)]


def test_what_holds_cores_keeps_them_and_is_sent_again_once_as_it_is() -> None:
    # Given a build that also draws on a quota of one in five seconds
    scheduler = Forgetful(BUILD, rate_per_s=0.2)
    # When the node says five times at once that it does not know it, since the answers of the broker were lost
    scheduler.unknown(*[0] * 5)
    # Then it is sent once more and keeps its core, and its request counts each time: the next one comes ten seconds after its first grant
    assert scheduler.broker.grants() == [("c0", 1)]
    assert not scheduler.of(Requeue)
    scheduler.submit("new", **CALL)
    assert scheduler.sent_within(9.0)[1:] == [(8.0, "new", 1)]


@pytest.mark.parametrize("result", [7, ValueError("no"), None], ids=["succeeded", "failed", "none"])
def test_what_has_begun_is_not_sent_again(result: object) -> None:
    # Given two builds that have begun, of one of which the store may have the result
    scheduler = Forgetful(BUILD, BUILD, concurrency=2)
    scheduler.told(*({"type": "started", "id": name, "attempt": 1, "at": scheduler.now} for name in ("c0", "c1")))
    scheduler.stored(**({} if result is None else {"c1": result}))
    # When the node's word that it does not know them comes late, after a beat with both of them, or was said before they began; then it is
    # not believed
    asked_at = scheduler.now - 1.0
    node = scheduler.nodes["n"]
    scheduler.told({"type": "beat", "node": {**node, "running": ["c0", "c1"]}})
    scheduler.unknown(0, 1)
    assert scheduler.ends() == {}
    scheduler.wait(BEAT_S)
    scheduler.told({"type": "beat", "node": node})
    scheduler.unknown(0, 1, at=asked_at)
    assert scheduler.ends() == {}
    scheduler.unknown(0, 1, at=scheduler.now)
    # Then neither runs once more; where there is no result it is lost, and the scheduler has to tell that
    assert scheduler.broker.grants() == []
    stored = ("failed" if isinstance(result, Exception) else "succeeded", True)
    assert scheduler.ends() == {"c0": ("lost", False), "c1": ("lost", False) if result is None else stored}
    assert scheduler.broker.end("c0") == ("lost", "end_unknown")


def test_a_stop_is_sent_again_while_beats_show_the_action() -> None:
    # Given a build that runs, whose stop gets lost
    scheduler = Forgetful(BUILD)
    node = scheduler.nodes["n"]
    scheduler.told({"type": "started", "id": "c0", "attempt": 1, "at": scheduler.now})
    scheduler.asked({"cancel": {"ids": ["c0"]}})
    assert scheduler.broker.orders() == [("tangram.stop", "c0")]
    # When beats go on to show it; then it is sent again
    for _ in range(3):
        scheduler.wait(BEAT_S)
        scheduler.told({"type": "beat", "node": {**node, "running": ["c0"]}})
    assert ("tangram.stop", "c0") in scheduler.broker.orders()


def test_a_request_that_was_given_up_is_not_sent_again() -> None:
    scheduler = Forgetful(CALL, rate_per_s=10.0)
    scheduler.asked({"cancel": {"ids": ["c0"]}})
    scheduler.unknown(0)
    assert scheduler.broker.grants() == []
    assert scheduler.ends() == {"c0": ("cancelled", False)}


def test_what_cannot_be_delivered_is_given_up_at_last_and_old_tries_do_not_count() -> None:
    scheduler = Forgetful(CALL, rate_per_s=10.0)
    scheduler.unknown(0, attempt=7)
    scheduler.unknown(1)
    assert (scheduler.broker.grants(), scheduler.disowned) == ([], [])
    for attempt in range(1, MOST_RESENT + 2):
        scheduler.now += BEAT_S + 1.0
        scheduler.unknown(0, attempt=attempt)
    assert scheduler.ends() == {"c0": ("lost", False)}
    assert len(scheduler.broker.grants()) == MOST_RESENT
