"""Connections to the hosts that a quota names, and to no others (`app/hosts.py`).

A host is resolved once, every address that it resolves to is checked, and the connection goes to one of these addresses. So a name
that resolves differently the next time leads nowhere else. Proxies of the environment are not used: behind a proxy nobody
could check the address.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Sequence

import anyio
import httpcore
import httpx

from app.hosts import Hosts
from tangram.errors import TangramError

KEPT_ALIVE = 64
"""Idle connections that are kept for each set of hosts."""

_KEPT_ALIVE_S = 4.0
"""Less than the 5 s after which uvicorn and Node.js close an idle connection: a request that crosses that on its way is lost."""

_NEXT_ADDRESS_S = 2.0
"""Seconds after which the next address of a host is tried."""


class HostRefused(TangramError, ValueError):
    """Raised when a request would go to a host that its quota may not reach."""

    cause = "bad_input"


class NamedHosts(httpx.AsyncHTTPTransport):
    """Sends requests to the hosts that are named."""

    def __init__(self, hosts: Hosts, tls: ssl.SSLContext, most_bytes: int) -> None:
        """Reach `hosts`, whose answers, with all that comes before them, have at most `most_bytes`."""
        super().__init__(verify=tls)
        # httpx has no parameter for the backend of its pool.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=None,
            max_keepalive_connections=KEPT_ALIVE,
            keepalive_expiry=_KEPT_ALIVE_S,
            network_backend=_Backend(hosts, most_bytes),
        )


class _Bounded(httpcore.AsyncNetworkStream):
    """A connection over which so much may come for each request: httpcore passes over answers that only announce another, without end."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, most_bytes: int) -> None:
        self._stream, self._most_bytes, self._bytes = stream, most_bytes, 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._bytes += len(data)
        if self._bytes > self._most_bytes:
            raise httpcore.ReadError(f"the server sends more than {self._most_bytes} bytes")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._bytes = 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Bounded(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._most_bytes)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


class _Backend(httpcore.AnyIOBackend):
    """Makes the connections of a pool."""

    def __init__(self, hosts: Hosts, most_bytes: int) -> None:
        self._hosts, self._most_bytes = hosts, most_bytes

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a host. Raises `HostRefused`."""
        *others, last = await self._addresses(host, port)
        for address in others:
            try:
                return _Bounded(await super().connect_tcp(address, port, _NEXT_ADDRESS_S, local_address, socket_options), self._most_bytes)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return _Bounded(await super().connect_tcp(last, port, timeout, local_address, socket_options), self._most_bytes)

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        if not self._hosts.names_host(host):
            raise HostRefused(f"the quota does not name the host {host}")
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = list(dict.fromkeys(str(address) for *_, (address, *_) in found))
        if refused := [address for address in addresses if not self._hosts.allows(address)]:
            found_as = host if host == refused[0] else f"{host} ({refused[0]})"
            raise HostRefused(f"{found_as} is no public address, and the quota does not name it")
        return addresses
