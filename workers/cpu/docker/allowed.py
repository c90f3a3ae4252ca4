"""What containers may reach: words of an allow-list, checked, and names turned into addresses. Nothing is put into force here.

| entry                  | what may be reached, by TCP                                                                   |
|------------------------|-----------------------------------------------------------------------------------------------|
| `10.0.0.5:443`         | that port of that address, also where it is an address of the host itself                     |
| `192.168.7.0/24:8000`  | that port of the range; never the host itself and never a link-local address in it            |
| `files.example:443`    | that port of the addresses that the name has when the worker starts; the container knows them |
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from tangram.errors import InvalidAction

LINK_LOCAL = IPv4Network("169.254.0.0/16")
NEVER = {
    IPv4Network("127.0.0.0/8"): "a loopback address, and a container has a loopback of its own",
    IPv4Network("224.0.0.0/4"): "a multicast address",
    IPv4Network("0.0.0.0/32"): "no address",
    IPv4Network("255.255.255.255/32"): "the broadcast address",
}
_LIKE = "10.0.0.5:443, 192.168.7.0/24:8000 or files.example:443"
_RANGE = re.compile(r"[\d.]+(/\d+)?")
_PORT = re.compile(r"[0-9]{1,5}")
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True, slots=True)
class Target:
    """One port of the addresses of a range."""

    range: IPv4Network
    port: int

    @property
    def is_single(self) -> bool:
        """Say whether it is one address."""
        return self.range.prefixlen == self.range.max_prefixlen


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an allow-list. `range` is None where `host` is a name."""

    host: str
    port: int
    range: IPv4Network | None

    @classmethod
    def of(cls, text: str) -> Entry:
        """Return what an entry means.

        Raises:
            InvalidAction: it means nothing, or something that cannot be allowed.

        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host:
            raise InvalidAction("allow", f"{text!r} is not an address and a port, like {_LIKE}")
        if ":" in host or "[" in host:
            raise InvalidAction("allow", f"{text!r} is not IPv4, like {_LIKE}")
        if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
            raise InvalidAction("allow", f"the port of {text!r} is not a number from 1 to 65535")
        if _RANGE.fullmatch(host):
            return cls(host, int(port), _range_of(text, host))
        if not _NAME.fullmatch(host):
            raise InvalidAction("allow", f"{host!r} of {text!r} is neither an IPv4 address, nor a range, nor a name")
        return cls(host, int(port), None)


def _range_of(text: str, host: str) -> IPv4Network:
    try:
        found = IPv4Network(host)
    except ValueError as error:
        raise InvalidAction("allow", f"{text!r}: {error}") from None
    _check(found, text)
    if found.prefixlen < found.max_prefixlen and found.subnet_of(LINK_LOCAL):
        raise InvalidAction("allow", f"{text!r}: link-local addresses are allowed one by one, not as a range")
    return found


def _check(found: IPv4Network, text: str) -> None:
    for never, reason in NEVER.items():
        if found.subnet_of(never):
            raise InvalidAction("allow", f"{text!r}: {found.network_address} is {reason}")


@dataclass(frozen=True, slots=True)
class AllowList:
    """What may be reached, all of it as addresses; `names` are the names that containers know, with their addresses."""

    targets: tuple[Target, ...]
    names: tuple[tuple[str, IPv4Address], ...]

    @classmethod
    def resolved(cls, entries: Sequence[Entry]) -> AllowList:
        """Return the list with each name looked up now.

        Raises:
            InvalidAction: a name has no address, or one that cannot be allowed.

        """
        targets, names = [], []
        for entry in entries:
            if entry.range is not None:
                targets.append(Target(entry.range, entry.port))
                continue
            for address in _addresses(entry):
                targets.append(Target(IPv4Network(address), entry.port))
                names.append((entry.host.rstrip("."), address))
        return cls(tuple(dict.fromkeys(targets)), tuple(dict.fromkeys(names)))


def _addresses(entry: Entry) -> list[IPv4Address]:
    text = f"{entry.host}:{entry.port}"
    try:
        found = {IPv4Address(each[4][0]) for each in socket.getaddrinfo(entry.host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise InvalidAction("allow", f"{text!r}: the name has no IPv4 address: {error}") from None
    for address in found:
        _check(IPv4Network(address), text)
        if address in LINK_LOCAL:
            raise InvalidAction("allow", f"{text!r}: the name is link-local ({address}), which only an address can allow")
    return sorted(found)
