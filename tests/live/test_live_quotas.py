"""Quotas against servers that count: nothing is refused, and what is refused anyway waits in the queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from bench.quotas import LEAST_USED, RATE, call_all, figures, outside, refusals, seen
from tangram import AsyncClient, Client, calls
from tests.live.support import Live

pytestmark = pytest.mark.alone

LIMITS = f"rate={RATE}&concurrency=20"
QUOTAS = f"""
[quotas.search]
rate_per_s = {RATE}
concurrency = 20
hosts = ["127.0.0.1"]

[quotas.other]
rate_per_s = 20
hosts = ["127.0.0.1"]

[quotas.llm]
tokens_per_min = 600
hosts = ["127.0.0.1"]

[quotas.costly]
tokens_per_min = 600
hosts = ["127.0.0.1"]
usage_header = "X-Cost"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run a server that counts, in a process of its own."""
    with outside() as url:
        yield url


@pytest.fixture
def fleet(own_stack: Callable[..., Live], tmp_path: Any) -> Live:
    """Run a stack with two API workers."""
    path = tmp_path / "quotas.toml"
    path.write_text(QUOTAS)
    return own_stack(cores=1, api_nodes=2, services_file=path)


def ended(fleet: Live, count: int) -> None:
    """Wait until the scheduler knows of the ends, which trainers learn of a little earlier."""
    fleet.until(lambda: fleet.rows("select count(*) from actions where ended_at is not null")[0][0] >= count)


def test_a_fleet_keeps_a_strict_quota_and_uses_it(fleet: Live, server: str) -> None:
    # Given a server that lets 50 requests a second and 20 at a time in
    httpx.put(f"{server}/limits?account=strict&{LIMITS}").raise_for_status()
    # When a hundred trajectories, through two workers, make three calls each
    statuses = asyncio.run(call_all(fleet.settings, f"{server}/limited?account=strict&seconds=0.1", 100, 3))
    # Then nothing is refused once all are under way, and the quota is used
    counts = seen(server, "strict")
    found = figures(counts, statuses, RATE)
    assert statuses == [200] * 300
    assert [at for at in refusals(counts, RATE) if at > counts["arrivals"][0] + 1] == [], (found, counts["stalls"])
    assert found.most_running <= 20
    # A short run on a machine that others use, and a refusal in the first second costs a pause; `make bench-quotas` is strict.
    assert found.used >= (0.6 if found.refused else LEAST_USED - 0.05), found
    # And both workers had a part in it
    nodes = fleet.rows("select node, count(*) from actions where kind = 'api.call' group by node")
    assert sorted(name for name, _ in nodes) == ["api-0", "api-1"]


def test_a_lowered_limit_slows_the_whole_fleet_and_nobody_else(fleet: Live, server: str) -> None:
    # Given two accounts, of which one allows a third of what was declared
    httpx.put(f"{server}/limits?account=low&rate=15").raise_for_status()
    httpx.put(f"{server}/limits?account=free&rate=20").raise_for_status()
    url = f"{server}/limited?seconds=0.05&account="

    async def both() -> list[int]:
        async with AsyncClient(settings=fleet.settings) as client:
            asked = [client.call("search", url=url + "low") for _ in range(60)]
            asked += [client.call("other", url=url + "free") for _ in range(60)]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    # When both are called at once
    statuses = asyncio.run(both())
    # Then every trainer has its answer, the first account was refused now and then, the other never
    assert statuses == [200] * 120
    low, free = seen(server, "low"), seen(server, "free")
    assert 0 < low["let_in"].count(False) < 30
    assert not refusals(free, 20)
    # And after a refusal nothing came for as long as the server had asked, but what was under way
    at = next(at for at, let_in in zip(low["arrivals"], low["let_in"], strict=True) if not let_in)
    assert not [other for other in low["arrivals"] if at + 0.3 < other < at + 1.0]
    assert fleet.rows("select count(*) from actions where quota = 'search' and attempts > 1")[0][0] > 0


def test_what_has_priority_goes_out_first(fleet: Live, moody: Any) -> None:
    url, seen = moody
    with fleet.client("tests") as client:
        # Given a queue of a second and a half at 20 requests a second
        low = [client.submit(calls.call("tests", "other", url=f"{url}/200/0/low-{number}", priority=1)) for number in range(30)]
        fleet.until(lambda: len(seen) > 2)
        # When a request of more priority comes
        high = client.submit(calls.call("tests", "other", url=f"{url}/200/0/high", priority=9))
        for handle in (*low, high):
            handle.result(20)
    # Then it overtakes all that were not on their way yet
    order = sorted(seen, key=lambda path: seen[path][0])
    assert order.index("/200/0/high") < 15


def test_tokens_that_answers_name_are_waited_for(fleet: Live, server: str) -> None:
    with fleet.client("tests") as client:
        # Given 10 tokens a second, and an answer that cost 20 though none were declared
        client.call("llm", url=f"{server}/limited?account=any&tokens=20")
        ended(fleet, 1)
        # When the next one comes
        began = time.monotonic()
        client.call("llm", url=f"{server}/limited?account=any", tokens=1)
        # Then it waits for them
        assert 1.5 < time.monotonic() - began < 4.0


class _Moody(BaseHTTPRequestHandler):
    """Refuses, breaks or answers as its path says, so many times; then answers 200."""

    protocol_version = "HTTP/1.1"
    seen: dict[str, list[float]]

    def _reply(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind, times = self.path.strip("/").split("/")[:2]
        seen = self.seen.setdefault(self.path, [])
        seen.append(time.monotonic())
        if len(seen) > int(times):
            self._send(200, {})
        elif kind == "broken":
            self.close_connection = True
        elif kind == "date":
            self._send(429, {"Retry-After": self.date_time_string(int(time.time()) + 2)})
        elif kind == "cost":
            self._send(200, {"X-Cost": "20"})
        else:
            self._send(int(kind), {})

    do_GET = do_POST = _reply

    def _send(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def moody() -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Run a server that fails as it is told to; give where it is and when each path was asked for."""
    seen: dict[str, list[float]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Moody,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.parametrize("kind", ["502", "503", "504", "broken"])
def test_what_passes_is_repeated_by_the_worker_for_idempotent_requests_only(client: Client, moody: Any, kind: str) -> None:
    url, seen = moody
    # Given servers that fail twice
    assert client.call("search", url=f"{url}/{kind}/2/a").status_code == 200
    # When the request may not be repeated, then it is not
    if kind == "broken":
        with pytest.raises(Exception, match="POST"):
            client.call("search", method="POST", url=f"{url}/{kind}/2/b")
    else:
        assert client.call("search", method="POST", url=f"{url}/{kind}/2/b").status_code == int(kind)
    assert [len(times) for times in seen.values()] == [3, 1]


def test_an_answer_that_never_passes_is_the_trainers_and_comes_soon(client: Client, moody: Any) -> None:
    url, seen = moody
    assert client.call("search", url=f"{url}/502/99/x").status_code == 502
    (times,) = seen.values()
    assert len(times) == 3 and times[-1] - times[0] < 2.0


def test_repeats_end_with_the_actions_timeout(client: Client, moody: Any) -> None:
    url, _ = moody
    with pytest.raises(Exception, match="no answer within"):
        client.call("search", url=f"{url}/502/99/y", timeout_s=0.05)


def test_retry_after_may_be_a_date_and_a_post_gets_its_refusal(fleet: Live, moody: Any) -> None:
    url, seen = moody
    with fleet.client("tests") as client:
        # Given a POST that is refused with a date two seconds ahead
        assert client.call("other", method="POST", url=f"{url}/date/1/p").status_code == 429
        ended(fleet, 1)
        # When another request of the account comes
        assert client.call("other", url=f"{url}/date/0/q").status_code == 200
        # Then it has waited for that date, which names whole seconds
        (first,), (second,) = seen.values()
        assert 0.9 < second - first < 4.0
        # And what is idempotent waits itself
        assert client.call("other", method="POST", url=f"{url}/date/1/r", idempotent=True).status_code == 200


def test_the_cost_of_an_answer_may_be_in_a_header(fleet: Live, moody: Any) -> None:
    url, _ = moody
    with fleet.client("tests") as client:
        client.call("costly", url=f"{url}/cost/1/a")
        ended(fleet, 1)
        began = time.monotonic()
        client.call("costly", url=f"{url}/cost/0/b", tokens=1)
        assert 1.5 < time.monotonic() - began < 4.0


def test_a_restarted_scheduler_goes_on_at_the_same_rate(fleet: Live, server: str) -> None:
    # Given a full queue at a server that counts strictly
    httpx.put(f"{server}/limits?account=restart&{LIMITS}").raise_for_status()
    url = f"{server}/limited?account=restart&seconds=0.05"
    found: list[int] = []
    calling = threading.Thread(target=lambda: found.extend(asyncio.run(call_all(fleet.settings, url, 150, 1))))
    calling.start()
    fleet.until(lambda: fleet.rows("select count(*) from actions where ended_at is not null")[0][0] > 60)
    # When the scheduler is killed and another one takes over
    fleet.process("scheduler").kill()
    fleet.until(lambda: "scheduler" in fleet.stack.dead())
    fleet.stack.restart("scheduler")
    calling.join(30.0)
    # Then the server never saw more than it allows, and everybody has an answer
    arrived = seen(server, "restart")
    assert [at for at in refusals(arrived, RATE) if at > arrived["arrivals"][0] + 1] == [], arrived["stalls"]
    assert found == [200] * 150
