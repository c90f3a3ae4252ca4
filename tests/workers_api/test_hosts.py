"""Requests reach the hosts that their quota names, and otherwise public addresses only."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.hosts import Hosts
from workers.api.connections import HostRefused
from workers.api.requests import Answer, Outgoing, Requests

from .conftest import Served

PUBLIC = "93.184.216.34"


def get(requests: Requests, url: str, *hosts: str, idempotent: bool = True) -> Answer:
    outgoing = Outgoing(
        method="GET", url=url, headers={}, content=None, timeout_s=60.0, limit=100, idempotent=idempotent, hosts=Hosts.named(hosts)
    )
    return requests.send(outgoing).result(60)


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: Sequence[str]) -> None:
    """Have every look-up of a name give the next of these answers, and the last one from then on."""
    left = list(answers)

    async def getaddrinfo(host: str, port: int, **how: Any) -> list[Any]:
        addresses = left.pop(0) if len(left) > 1 else left[0]
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in zip(families, addresses, strict=True)]

    monkeypatch.setattr(anyio, "getaddrinfo", getaddrinfo)


NOT_PUBLIC = (
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "localhost", "0.0.0.0", "[::1]", "[::127.0.0.1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
    *("169.254.169.254", "[fe80::1]", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "[fd00::1]", "224.0.0.1"),
    *("168.63.129.16", "192.0.0.9", "192.0.0.192", "[fec0::1]", "[3fff::1]", "[2001:0:7f00:1::]", "[64:ff9b::a83f:8110]"),
)


def test_a_quota_that_names_no_hosts_reaches_public_addresses_only(requests: Requests, server: Served) -> None:
    port, seen = server
    for host in NOT_PUBLIC:
        with pytest.raises(HostRefused, match="is no public address, and the quota does not name it"):
            get(requests, f"http://{host}:{port}/")
        assert seen == [], host


def test_a_private_address_that_is_named_is_reached(requests: Requests, server: Served) -> None:
    port, seen = server
    assert get(requests, f"http://127.0.0.1:{port}/a", "127.0.0.1").status_code == 200
    assert get(requests, f"http://localhost:{port}/b", "localhost", "127.0.0.0/8", "::1").status_code == 200
    assert [path for path, _ in seen] == ["/a", "/b"]


def test_a_host_that_is_not_named_is_refused_whatever_its_address(requests: Requests, server: Served) -> None:
    port, seen = server
    for host, named in (("localhost", "127.0.0.0/8"), ("127.0.0.1", "api.example.com"), ("api.example.org", "api.example.com")):
        with pytest.raises(HostRefused, match=f"the quota does not name the host {host}"):
            get(requests, f"http://{host}:{port}/", named)
    assert seen == []


def test_a_name_that_is_named_leads_to_no_private_address(requests: Requests, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    port, seen = server
    for addresses in (["127.0.0.1"], ["::1"], [PUBLIC, "127.0.0.1"]):
        resolving(monkeypatch, addresses)
        with pytest.raises(HostRefused, match=r"api.example.com \((127.0.0.1|::1)\) is no public address"):
            get(requests, f"http://api.example.com:{port}/", "api.example.com")
    assert seen == []


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    # The name has a public address, and that of this machine from the second look on
    resolving(monkeypatch, [PUBLIC], ["127.0.0.1"])
    connected: list[str] = []

    async def connect(remote_host: str, remote_port: int, **how: Any) -> Any:
        connected.append(remote_host)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    with pytest.raises(httpx.ConnectError):
        get(requests, "http://rebinding.example.com/", idempotent=False)
    assert connected == [PUBLIC]
    # And when it is repeated, the second look refuses it
    resolving(monkeypatch, [PUBLIC], ["127.0.0.1"])
    with pytest.raises(HostRefused, match=r"rebinding.example.com \(127.0.0.1\)"):
        get(requests, "http://rebinding.example.com/")
    assert connected == [PUBLIC, PUBLIC]


def test_the_next_address_of_a_host_is_tried_where_one_refuses(requests: Requests, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    port, seen = server
    resolving(monkeypatch, ["127.0.0.9", "127.0.0.1"])
    assert get(requests, f"http://api.test:{port}/", "api.test", "127.0.0.0/8", idempotent=False).status_code == 200
    assert len(seen) == 1


def test_no_answer_leads_to_a_request_or_goes_into_the_next_one(requests: Requests, server: Served) -> None:
    port, seen = server
    answers = [get(requests, f"http://127.0.0.1:{port}/redirect", "127.0.0.1") for _ in range(2)]
    assert [(answer.status_code, answer.headers["location"]) for answer in answers] == [(302, "/secret")] * 2
    # Then the redirect was not followed, and the cookie of the first answer not sent
    assert seen == [("/redirect", None)] * 2


def test_a_connection_that_one_quota_has_open_serves_no_other_that_may_not_reach_its_host(requests: Requests, server: Served) -> None:
    port, seen = server
    get(requests, f"http://localhost:{port}/", "localhost", "127.0.0.0/8", "::1")
    with pytest.raises(HostRefused):
        get(requests, f"http://localhost:{port}/")
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("named", "host", "allowed"),
    [
        (["API.example.com"], "api.EXAMPLE.com.", True),
        (["*.example.com"], "a.b.example.com", True),
        (["*.example.com"], "example.com", False),
        (["*.example.com"], "badexample.com", False),
        (["*"], "anything.example", True),
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "::ffff:10.1.2.3", True),
        (["10.0.0.0/8"], "11.1.2.3", False),
        ([], "anything.example", True),
    ],
)
def test_names_and_networks(named: list[str], host: str, allowed: bool) -> None:
    assert Hosts.named(named).names_host(host) == allowed


@pytest.mark.parametrize("entry", ["", "http://api", "a/b", "10.0.0.1/8", "a..b", "*.*.a", "a b", "127.1", "api:80", "-a", "a" * 254])
def test_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host name, address or network"):
        Hosts.named([entry])


@given(st.ip_addresses())
def test_an_address_is_allowed_if_it_is_public_or_named(address: Any) -> None:
    assert Hosts.named([str(address)]).allows(str(address))
    if Hosts().allows(str(address)):
        assert not (address.is_private or address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified)
