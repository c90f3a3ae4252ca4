"""Requests of an API worker go out when their grant says, and report when they do."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from threading import Thread
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from app.hosts import Hosts
from app.scheduler_process import QUOTA_LEAD_S
from workers.api.requests import LONGEST_LEAD_S, Outgoing, Requests

from .conftest import Served

PACKED = gzip.compress(b"text", mtime=0)


def outgoing(url: str, not_before: float = 0.0) -> Outgoing:
    hosts = Hosts.named(["127.0.0.1"])
    return Outgoing(method="GET", url=url, headers={}, content=None, timeout_s=60.0, limit=100, not_before=not_before, hosts=hosts)


def test_a_request_is_told_to_go_once_its_connection_is_made(requests: Requests, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, done = anyio.connect_tcp, list[str]()

    async def connect_and_tell(*where: Any, **how: Any) -> Any:
        stream = await connect(*where, **how)
        done.append("connected")
        return stream

    monkeypatch.setattr(anyio, "connect_tcp", connect_and_tell)
    requests.send(outgoing(f"http://127.0.0.1:{server[0]}/"), lambda sent: done.append("goes")).result(60)
    assert done == ["connected", "goes"]


def test_a_connection_is_left_before_a_server_that_closes_it_after_5_s_does(
    requests: Requests, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, connected = anyio.connect_tcp, list[object]()

    async def connect_and_count(*where: Any, **how: Any) -> Any:
        connected.append(where)
        return await connect(*where, **how)

    monkeypatch.setattr(anyio, "connect_tcp", connect_and_count)
    for passed_s, connections in ((0.0, 1), (3.5, 1), (8.0, 2)):  # it is idle for 3.5 s, and then for 4.5 s
        monkeypatch.setattr("httpcore._async.http11.time", SimpleNamespace(monotonic=lambda passed_s=passed_s: passed_s))
        requests.send(outgoing(f"http://127.0.0.1:{server[0]}/")).result(60)
        assert len(connected) == connections


def test_a_request_waits_for_its_time_and_tells_when_it_goes(requests: Requests, server: Served) -> None:
    sent: list[float] = []
    # Given a request that may go in a fifth of a second, and one that may go at once
    for not_before in (time.time() + 0.2, 0.0):
        before, count = time.time(), len(sent)
        answer = requests.send(outgoing(f"http://127.0.0.1:{server[0]}/", not_before), lambda _: sent.append(time.time())).result(60)
        # Then it goes at its time, and that is what is reported, once
        assert answer.status_code == 200
        assert len(sent) == count + 1
        assert max(before, not_before) - 0.002 <= sent[-1] <= time.time()


@contextmanager
def answering(parts: Iterable[bytes]) -> Iterator[str]:
    """Answer one request with these bytes, as far as they are wanted; give the address."""

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            for part in parts:
                connection.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        thread.join(60)


def chunked(encoding: str, parts: list[bytes]) -> list[bytes]:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))]


@pytest.mark.parametrize(
    ("encoding", "parts", "body", "is_cut"),
    [
        ("gzip", [PACKED[:9], PACKED[9:]], b"text", False),
        ("gzip", [gzip.compress(bytes(1 << 20), mtime=0)], bytes(100), True),
        ("gzip, gzip", [PACKED], PACKED, False),
        ("br", [b"packed"], b"packed", False),
        ("identity", [b"x"] * 11, b"x" * 11, True),
        ("gzip", [b"none"], None, False),
    ],
    ids=["once", "much", "twice", "otherwise", "in crumbs", "not at all"],
)
def test_an_answer_is_unpacked_once_and_up_to_its_bounds(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, encoding: str, parts: list[bytes], body: bytes | None, is_cut: bool
) -> None:
    monkeypatch.setattr("workers.api.requests.MOST_PARTS", 10)
    with answering(chunked(encoding, parts)) as url:
        pending = requests.send(outgoing(url))
        if body is None:
            with pytest.raises(httpx.DecodingError):
                pending.result(60)
        else:
            answer = pending.result(60)
            assert (answer.body, answer.truncated) == (body, is_cut)


def test_a_request_without_a_connection_is_never_sent(requests: Requests) -> None:
    sent: list[float] = []
    with pytest.raises(httpx.ConnectError):
        requests.send(outgoing("http://127.0.0.1:9/"), lambda _: sent.append(time.time())).result(60)
    assert sent == []


def test_a_server_that_only_announces_answers_is_left(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.api.requests._BESIDE_BODY_BYTES", 100_000)

    announcements = repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
    with answering(announcements) as url, pytest.raises(httpx.ReadError, match="more than"):
        requests.send(outgoing(url)).result(60)


def test_no_secret_of_a_request_is_logged(requests: Requests, server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        assert requests.send(outgoing(f"http://127.0.0.1:{server[0]}/?key=geheim")).result(60).status_code == 200
    assert "geheim" not in caplog.text


def test_no_scheduler_grants_further_ahead_than_a_worker_waits() -> None:
    assert QUOTA_LEAD_S < LONGEST_LEAD_S
