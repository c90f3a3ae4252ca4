"""The subscription: nothing is lost when connections break, and nothing kills it."""

from __future__ import annotations

from typing import Any

import pytest

from app.local.processes import wait_until
from tangram import Action, Client, Settings
from tangram.publisher import Publisher
from tangram.session import Session
from tangram.wire import RESULT_KEY_PREFIX


def test_a_deaf_subscription_is_noticed_and_made_anew(
    peer: Any, settings: Settings, redis_urls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given results that are stored but never published
    monkeypatch.setattr("tangram.feed.SWEEP_S", 0.2)
    monkeypatch.setattr("tangram.feed._LISTEN_S", 0.1)
    peer.behave = lambda seen: peer.HOLD
    with Client(settings=settings) as client, redis_urls.client() as redis:
        handle = client.submit(Action(kind="my.task"))
        redis.set(RESULT_KEY_PREFIX + handle.id, '{"status": "SUCCESS", "result": 5}')
        assert handle.result(20) == 5
        # And the one after it is pushed again
        peer.behave = lambda seen: 6
        assert client.submit(Action(kind="my.task")).result(20) == 6


@pytest.mark.parametrize("first", ["publisher", "feed"])
def test_what_processes_submit_under_one_id_runs_once(peer: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    publish = Publisher._publish

    def publish_late(publisher: Publisher, batch: Any) -> None:
        assert wait_until(lambda: publisher._inbox.waiting_for("shared-1") is None, 60)
        publish(publisher, batch)

    # Given two processes that count as one client; when one submits an action under an id, and the other one after its end
    action = Action(kind="my.task")
    for number in range(2):
        if number:
            # Nobody announces the result again, so the feed looks for it.
            monkeypatch.setattr("tangram.feed.SWEEP_S", 0.2)
            monkeypatch.setattr("tangram.feed._LISTEN_S", 0.1)
        if number and first == "feed":
            monkeypatch.setattr(Publisher, "_publish", publish_late)
        session = Session("default", settings, client_id="shared")
        for ready in session.start():
            ready.result(60)
        peer.behave = lambda seen: f"run {len(peer.seen)}"
        result = session.submit(action, "shared-1").result(60)
        # What has been sent before this has been seen. (A client that is impatient may send this one again.)
        session.submit(Action(kind="my.mark")).result(60)
        session.stop()
        assert result == "run 1"
    assert peer.kinds().count("my.task") == 1
