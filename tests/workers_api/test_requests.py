"""Requests of an API worker go out when their grant says, and report when they do."""

from __future__ import annotations

import time
from typing import Any

import anyio
import httpx
import pytest

from app.hosts import Hosts
from app.scheduler_process import QUOTA_LEAD_S
from bench.quotas import outside
from workers.api.requests import LONGEST_LEAD_S, Outgoing, Requests


def outgoing(url: str, not_before: float = 0.0) -> Outgoing:
    """Return a request that may go to this machine."""
    hosts = Hosts.named(["127.0.0.1"])
    return Outgoing(method="GET", url=url, headers={}, content=None, timeout_s=60.0, limit=100, not_before=not_before, hosts=hosts)


def test_making_a_connection_is_no_part_of_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a server far away, to which a connection takes a quarter of a second
    connect = anyio.connect_tcp

    async def connect_far(*where: Any, **how: Any) -> Any:
        await anyio.sleep(0.25)
        return await connect(*where, **how)

    monkeypatch.setattr(anyio, "connect_tcp", connect_far)
    sent: list[float] = []
    with outside() as url:
        requests = Requests()
        # When the first request is sent
        before = time.time()
        requests.send(outgoing(f"{url}/limited?account=far"), lambda: sent.append(time.time())).result(60)
        requests.close()
    # Then it went out once that was over
    assert sent[0] - before >= 0.25


def test_a_request_waits_for_its_time_and_tells_when_it_goes() -> None:
    sent: list[float] = []
    with outside() as url:
        requests = Requests()
        # Given a request that may go in a fifth of a second, and one that may go at once
        for name, not_before in (("later", time.time() + 0.2), ("now", 0.0)):
            before, count = time.time(), len(sent)
            # When it is sent
            answer = requests.send(outgoing(f"{url}/limited?account={name}", not_before), lambda: sent.append(time.time())).result(60)
            # Then it goes at its time, and that is what is reported, once
            assert answer.status_code == 200
            assert len(sent) == count + 1
            assert max(before, not_before) - 0.002 <= sent[-1] <= time.time()
        requests.close()


def test_a_request_without_a_connection_is_never_sent() -> None:
    sent: list[float] = []
    requests = Requests()
    with pytest.raises(httpx.ConnectError):
        requests.send(outgoing("http://127.0.0.1:9/"), lambda: sent.append(time.time())).result(60)
    requests.close()
    assert sent == []


def test_no_secret_of_a_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with outside() as url, caplog.at_level("DEBUG"):
        requests = Requests()
        assert requests.send(outgoing(f"{url}/limited?account=log&key=geheim")).result(60).status_code == 200
        requests.close()
    assert "geheim" not in caplog.text


def test_no_scheduler_grants_further_ahead_than_a_worker_waits() -> None:
    assert QUOTA_LEAD_S < LONGEST_LEAD_S
