"""A live replay whose stack breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.local.processes import StackError
from app.replay.live_trainer import LiveReplay
from app.replay.traces import read_trace
from tangram import Settings
from tangram.connection import open_store
from tests.client.conftest import Peer
from tests.conftest import RedisUrls

TRACE = Path(__file__).resolve().parents[2] / "examples" / "rollouts.jsonl"


def test_a_replay_waits_for_no_result_and_closes_no_environment_of_a_stack_that_is_broken(redis_urls: RedisUrls) -> None:
    def broken() -> None:
        if "cpu.exec" in peer.kinds():
            raise StackError("scheduler ended")

    settings = Settings(broker_url=redis_urls.broker, result_url=redis_urls.result, connect_timeout_s=60)
    with Peer(redis_urls.broker, redis_urls.result).running() as peer, open_store(redis_urls.result, 60.0) as store:
        # Given a replay whose environments are open, and whose commands run
        peer.behave = lambda seen: peer.payload() if seen.kind == "cpu.open" else peer.HOLD
        trainer = LiveReplay(read_trace(TRACE), settings, store, folder=TRACE.parent, api_url="", check=broken)
        # When a process of its stack has ended; then it says so, waits for no result, and asks for nothing more
        with pytest.raises(StackError, match="scheduler ended"):
            trainer.run()
        assert "cpu.close" not in peer.kinds()
