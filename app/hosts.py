"""Which hosts the requests of a quota may reach. Pure: names and addresses in, an answer out.

A request may reach a host if both hold:

1. the host of its URL is named: as itself, below a `*.` name, by `*`, or, where the URL has an address, by a network;
2. every address that the host resolves to is public, or lies in a network that is named.

So a name alone never leads into a private network, whatever its DNS record says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated, Self

from pydantic import AfterValidator, Field

ANY = "*"
"""Stands for every host with public addresses; what a quota that names no hosts may reach."""

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_NAT64 = IPv6Network("64:ff9b::/96")

Address = IPv4Address | IPv6Address

_NOT_PUBLIC = (
    IPv4Network("168.63.129.16/32"),  # Azure answers each virtual machine here, as others do at 169.254.169.254
    IPv4Network("192.0.0.0/24"),  # protocols with the next router, and Oracle's metadata
    IPv6Network("fec0::/10"),  # private networks, before there was fc00::/7
    IPv6Network("3fff::/20"),  # for documents
)
"""Networks that Python, or one of its versions, calls global."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts that a quota names: names in lower case, and networks."""

    names: frozenset[str] = frozenset({ANY})
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def named(cls, entries: Iterable[str]) -> Self:
        """Read names (`api.example.com`, `*.example.com`, `*`), addresses and networks (`10.1.0.0/16`); none: `*`.

        Raises `ValueError` when an entry is none of these.
        """
        names, networks = set[str](), []
        for entry in entries:
            network = _network(entry)
            if network is not None:
                networks.append(network)
            elif entry == ANY or _is_name(entry.lower()):
                names.add(entry.lower())
            else:
                raise ValueError(f"{entry!r} is no host name, address or network")
        return cls(frozenset(names), tuple(networks)) if names or networks else cls()

    def names_host(self, host: str) -> bool:
        """Say whether a URL may have this host: a name, or an address without brackets."""
        if ANY in self.names:
            return True
        address = _address(host)
        if address is not None:
            return self._in_networks(address)
        name = host.lower().removesuffix(".")
        return name in self.names or any(f"*.{parent}" in self.names for parent in _parents(name))

    def allows(self, address: str) -> bool:
        """Say whether a connection may go to an address: it is public, or in a network that is named."""
        found = _address(address)
        return found is not None and (_is_public(found) or self._in_networks(found))

    def _in_networks(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def _checked(entries: tuple[str, ...]) -> tuple[str, ...]:
    Hosts.named(entries)
    return entries


HostNames = Annotated[tuple[str, ...], Field(min_length=1, strict=False), AfterValidator(_checked)]
"""The key `hosts` of a quota, as it is written in a services file and in the header of a trace."""


def _is_public(address: Address) -> bool:
    """Say whether an address is anybody's on the internet: not private, shared, loopback, link-local, multicast or reserved."""
    known = address.is_global and not (address.is_multicast or address.is_reserved)
    return known and not any(address in network for network in _NOT_PUBLIC)


def _address(text: str) -> Address | None:
    """Read an address, None where the text is a name. An IPv4 address inside an IPv6 one is what counts."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour
    return inner or (IPv4Address(address.packed[-4:]) if address in _NAT64 else address)


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    address = _address(entry)
    if address is not None:
        return ip_network(address)
    try:
        return ip_network(entry)
    except ValueError:
        return None


def _is_name(entry: str) -> bool:
    """Say whether an entry is a host name; one that ends in a number would be read as an address, and a bad one at that."""
    return len(entry) <= 253 and _NAME.fullmatch(entry) is not None and not entry.rpartition(".")[2].isdigit()


def _parents(name: str) -> Iterable[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name
