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

LOOPBACK = Hosts.named(["127.0.0.1"])


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
        outgoing = Outgoing(
            method="GET", url=f"{url}/limited?account=far", headers={}, content=None, timeout_s=60.0, limit=100, hosts=LOOPBACK
        )
        # When the first request is sent
        before = time.time()
        requests.send(outgoing, lambda: sent.append(time.time())).result(60)
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
            outgoing = Outgoing(
                method="GET",
                url=f"{url}/limited?account={name}",
                headers={},
                content=None,
                timeout_s=60.0,
                limit=100,
                not_before=not_before,
                hosts=LOOPBACK,
            )
            # When it is sent
            answer = requests.send(outgoing, lambda: sent.append(time.time())).result(60)
            # Then it goes at its time, and that is what is reported, once
            assert answer.status_code == 200
            assert len(sent) == count + 1
            assert max(before, not_before) - 0.002 <= sent[-1] <= time.time()
        requests.close()


def test_a_request_without_a_connection_is_never_sent() -> None:
    sent: list[float] = []
    requests = Requests()
    outgoing = Outgoing(method="GET", url="http://127.0.0.1:9/", headers={}, content=None, timeout_s=60.0, limit=100, hosts=LOOPBACK)
    with pytest.raises(httpx.ConnectError):
        requests.send(outgoing, lambda: sent.append(time.time())).result(60)
    requests.close()
    assert sent == []


def test_no_secret_of_a_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with outside() as url, caplog.at_level("DEBUG"):
        requests = Requests()
        with_key = f"{url}/limited?account=log&key=geheim"
        outgoing = Outgoing(method="GET", url=with_key, headers={}, content=None, timeout_s=60.0, limit=100, hosts=LOOPBACK)
        assert requests.send(outgoing).result(60).status_code == 200
        requests.close()
    assert "geheim" not in caplog.text


def test_no_scheduler_grants_further_ahead_than_a_worker_waits() -> None:
    assert QUOTA_LEAD_S < LONGEST_LEAD_S
