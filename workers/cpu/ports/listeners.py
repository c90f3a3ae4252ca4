"""Who listens on a TCP port of the worker's own network, as the kernel says it over netlink (see `sock_diag(7)`).

/proc/net/tcp says the same. But it is written by a walk over all connections, which takes some 10 ms.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from workers.cpu.errors import SandboxError

_NETLINK_SOCK_DIAG, _BY_FAMILY = 4, 20
_REQUEST_DUMP, _ERROR, _DONE = 0x301, 2, 3
_LISTENING = 1 << 10
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBxI")
_SOCKET = struct.Struct("!HH16s16s12x")
_FOUND = struct.Struct("=4x")
_USE = struct.Struct("=IIIII")
_READ_BYTES, _ALIGNED = 1 << 16, 4


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens at `address`."""

    address: IPv4Address | IPv6Address
    inode: int

    def may_take(self, loopback: str) -> bool:
        """Say whether a connection to `loopback` may be this socket's: it listens there, or at every address of the kind.

        A socket at every address of IPv6 mostly takes connections of IPv4 as well; there is no telling which do not.
        """
        at = self.address.ipv4_mapped or self.address if isinstance(self.address, IPv6Address) else self.address
        if str(at) == loopback or at == IPv6Address("::"):
            return True
        return loopback == "127.0.0.1" and at == IPv4Address("0.0.0.0")


def listeners(port: int) -> list[Listener]:
    """Return what listens on a port of this network. Raises `SandboxError` where the kernel does not say."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
            return [each for family in (socket.AF_INET, socket.AF_INET6) for each in _listeners(kernel, family, port)]
    except OSError as error:
        raise SandboxError(f"the kernel does not say what listens on port {port}: {error.strerror}") from error


def _listeners(kernel: socket.socket, family: int, port: int) -> Iterator[Listener]:
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, _LISTENING) + _SOCKET.pack(port, 0, bytes(16), bytes(16))
    kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + asked)
    while True:
        answer = kernel.recv(_READ_BYTES)
        while answer:
            length, kind, _, _, _ = _HEADER.unpack_from(answer)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
                raise OSError(number, os.strerror(number))
            at = _HEADER.size + _FOUND.size
            listens_on, _, address, _ = _SOCKET.unpack_from(answer, at)
            inode = _USE.unpack_from(answer, at + _SOCKET.size)[-1]
            if listens_on == port:
                yield Listener(IPv4Address(address[:4]) if family == socket.AF_INET else IPv6Address(address), inode)
            answer = answer[-(-length // _ALIGNED) * _ALIGNED :]


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the sockets that processes have open; those of a process that is gone, or is not ours to read, are missing."""
    found = set()
    for pid in pids:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(int(target[len("socket:[") : -1]))
    return found
