"""Quotas against servers that count: nothing is refused, and what is refused anyway waits in the queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.local.stack import StackPlan
from bench.quotas import LEAST_USED, RATE, call_all, figures, refusals, seen
from tangram import AsyncClient, calls
from tests.live.support import Live, ended_calls, running_forks

pytestmark = pytest.mark.alone

LIMITS = f"rate={RATE}&concurrency=20"
QUOTAS = f"""
[quotas.search]
rate_per_s = {RATE}
concurrency = 20
hosts = ["127.0.0.1"]

[quotas.lowered]
rate_per_s = 50
concurrency = 20
hosts = ["127.0.0.1"]

[quotas.free]
rate_per_s = 20
hosts = ["127.0.0.1"]

[quotas.ordered]
rate_per_s = 20
hosts = ["127.0.0.1"]
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack with two API workers; each test has a quota to itself, but for the first and the last."""
    folder = tmp_path_factory.mktemp("quotas")
    (folder / "quotas.toml").write_text(QUOTAS)
    plan = StackPlan(nodes=0, api_nodes=2, services_file=folder / "quotas.toml")
    with running_forks(folder / "state", plan) as started:
        yield started


def test_a_fleet_keeps_a_strict_quota_and_uses_it(fleet: Live, server: str) -> None:
    # Given a server that lets 50 requests a second and 20 at a time in
    httpx.put(f"{server}/limits?account=strict&{LIMITS}").raise_for_status()
    # When a hundred trajectories, through two workers, make two calls each
    statuses = asyncio.run(call_all(fleet.settings, f"{server}/limited?account=strict&seconds=0.1", 100, 2))
    # Then nothing is refused once all are under way, and the quota is used
    counts = seen(server, "strict")
    found = figures(counts, statuses, RATE)
    assert statuses == [200] * 200
    assert [at for at in refusals(counts, RATE) if at > counts["arrivals"][0] + 1] == [], (found, counts["stalls"])
    assert found.most_running <= 20
    # A short run on a machine that others use, and a refusal in the first second costs a pause; `make bench-quotas` is strict.
    assert found.used >= (0.6 if found.refused else LEAST_USED - 0.05), found
    # And both workers had a part in it
    nodes = fleet.rows("select node, count(*) from actions where quota = 'search' group by node")
    assert sorted(name for name, _ in nodes) == ["api-0", "api-1"]


def test_a_lowered_limit_slows_the_whole_fleet_and_nobody_else(fleet: Live, server: str) -> None:
    # Given two accounts, of which one allows a third of what was declared
    httpx.put(f"{server}/limits?account=low&rate=15").raise_for_status()
    httpx.put(f"{server}/limits?account=free&rate=20").raise_for_status()
    url = f"{server}/limited?seconds=0.05&account="

    async def both() -> list[int]:
        async with AsyncClient(settings=fleet.settings) as client:
            asked = [client.call("lowered", url=url + "low") for _ in range(40)]
            asked += [client.call("free", url=url + "free") for _ in range(40)]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    # When both are called at once
    statuses = asyncio.run(both())
    # Then every trainer has its answer, the first account was refused now and then, the other never
    assert statuses == [200] * 80
    low, free = seen(server, "low"), seen(server, "free")
    assert 0 < low["let_in"].count(False) < 30
    assert not refusals(free, 20)
    # And after a refusal nothing came for as long as the server had asked, but what was under way
    at = next(at for at, let_in in zip(low["arrivals"], low["let_in"], strict=True) if not let_in)
    assert not [other for other in low["arrivals"] if at + 0.6 < other < at + 1.0]
    assert fleet.rows("select count(*) from actions where quota = 'lowered' and attempts > 1")[0][0] > 0


def test_what_has_priority_goes_out_first(fleet: Live, moody: Any) -> None:
    url, seen = moody
    with fleet.client("tests") as client:
        # Given a queue of three seconds at 20 requests a second
        low = [client.submit(calls.call("tests", "ordered", url=f"{url}/200/0/low-{number}", priority=1)) for number in range(60)]
        fleet.until(lambda: len(seen) > 2)
        # When a request of more priority comes
        high = client.submit(calls.call("tests", "ordered", url=f"{url}/200/0/high", priority=9))
        for handle in (*low, high):
            handle.result(60)
    # Then it overtakes all that were not on their way yet
    order = sorted(seen, key=lambda path: seen[path][0])
    assert order.index("/200/0/high") < 45


def test_a_restarted_scheduler_goes_on_at_the_same_rate(fleet: Live, server: str) -> None:
    # Given a full queue at a server that counts strictly
    httpx.put(f"{server}/limits?account=restart&{LIMITS}").raise_for_status()
    url, before = f"{server}/limited?account=restart&seconds=0.05", ended_calls(fleet, "search")
    found: list[int] = []
    calling = threading.Thread(target=lambda: found.extend(asyncio.run(call_all(fleet.settings, url, 150, 1))))
    calling.start()
    fleet.until(lambda: ended_calls(fleet, "search") > before + 60)
    # When the scheduler is killed and another one takes over
    fleet.process("scheduler").kill()
    fleet.until(lambda: "scheduler" in fleet.stack.dead())
    fleet.stack.restart("scheduler")
    calling.join(200.0)
    # Then the server never saw more than it allows, and everybody has an answer
    arrived = seen(server, "restart")
    assert [at for at in refusals(arrived, RATE) if at > arrived["arrivals"][0] + 1] == [], arrived["stalls"]
    assert found == [200] * 150
