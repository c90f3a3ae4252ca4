"""A line between two network namespaces, carried by a process: `python -m tests.hosts.link`.

A kernel need not have netem. Each end of the line is a TUN device. This process reads packets from one device and writes them to
the other, later, or not at all. It takes settings as lines of JSON from its standard input, and answers each with an empty line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

_NEW_NETWORK = 0x40000000
_SET_DEVICE = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
_LONGEST_PACKET = 65_536

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Weather:
    """What a line does with packets, in each direction: `delay_s` seconds, `loss` a share."""

    delay_s: float = 0.0
    loss: float = 0.0
    inward: bool = True
    """Whether packets to the hub arrive."""
    outward: bool = True
    """Whether packets from the hub arrive."""

    def to_json(self) -> str:
        """Return the line that the process takes."""
        return json.dumps(asdict(self))


def worst(weathers: Sequence[Weather]) -> Weather:
    """Return what a line does on which all of these are at a time."""
    return Weather(
        delay_s=max((one.delay_s for one in weathers), default=0.0),
        loss=max((one.loss for one in weathers), default=0.0),
        inward=all(one.inward for one in weathers),
        outward=all(one.outward for one in weathers),
    )


def enter(namespace: Path) -> None:
    """Move this thread, and what it starts from now on, into a network namespace. Raises OSError."""
    with namespace.open() as file:
        if _libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))


def _device(namespace: Path, name: str) -> int:
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return device


class _Direction:
    """Packets under way from one device to another."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.waiting: list[tuple[float, int, bytes]] = []
        self._order = count()

    def take(self, weather: Weather, arrives: bool, chance: random.Random) -> None:
        """Take what has come; each packet is lost or has a time of arrival."""
        while True:
            try:
                packet = os.read(self.source, _LONGEST_PACKET)
            except BlockingIOError:
                return
            if arrives and chance.random() >= weather.loss:
                heapq.heappush(self.waiting, (time.monotonic() + weather.delay_s, next(self._order), packet))

    def give(self) -> float | None:
        """Hand over what is due; return in how many seconds the next packet is, None for none."""
        while self.waiting:
            left_s = self.waiting[0][0] - time.monotonic()
            if left_s > 0:
                return left_s
            with contextlib.suppress(OSError):  # a device that is not up takes nothing
                os.write(self.target, heapq.heappop(self.waiting)[2])
        return None


def main(hub: Path, host: Path, name: str, seed: int) -> None:
    """Carry packets until the standard input ends."""
    at_hub, at_host = _device(hub, name), _device(host, "hub")
    inward, outward = _Direction(at_host, at_hub), _Direction(at_hub, at_host)
    weather, chance = Weather(), random.Random(seed)
    print(flush=True)
    while True:
        waits = [left for direction in (inward, outward) if (left := direction.give()) is not None]
        ready, _, _ = select.select([sys.stdin, at_hub, at_host], [], [], min(waits, default=None))
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            weather = Weather(**json.loads(line))
            print(flush=True)
        inward.take(weather, weather.inward, chance)
        outward.take(weather, weather.outward, chance)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
