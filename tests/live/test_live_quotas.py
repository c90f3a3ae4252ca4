"""A quota holds for a fleet of API workers, also while the scheduler changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.local.stack import StackPlan
from bench.quotas import call_all, seen
from tests.live.support import Live, ended_calls, running

PLACES = 4
QUOTAS = f'[quotas.search]\nconcurrency = {PLACES}\nhosts = ["127.0.0.1"]\n'


@pytest.fixture
def fleet(real_component: None, tmp_path: Path) -> Iterator[Live]:
    """Run a stack with two API workers."""
    (tmp_path / "quotas.toml").write_text(QUOTAS)
    plan = StackPlan(nodes=0, api_nodes=2, services_file=tmp_path / "quotas.toml")
    with running(tmp_path / "state", plan) as started:
        yield started


def test_a_fleet_takes_no_more_places_than_its_quota_has_even_when_the_scheduler_is_restarted(fleet: Live, server: str) -> None:
    # Given more requests than the quota has places
    url, found = f"{server}/limited?account=restart&seconds=0.05", list[int]()
    calling = threading.Thread(target=lambda: found.extend(asyncio.run(call_all(fleet.settings, url, 100, 1))))
    calling.start()
    fleet.until(lambda: ended_calls(fleet, "search") > 40)
    # When the scheduler is killed and another one takes over
    fleet.replace_scheduler()
    calling.join(200.0)
    # Then everybody has an answer, the server never had more at a time, and both workers had a part in it
    assert found == [200] * 100
    assert seen(server, "restart")["most_running"] <= PLACES
    nodes = fleet.rows("select distinct node from actions where quota = 'search'")
    assert sorted(name for (name,) in nodes) == ["api-0", "api-1"]
