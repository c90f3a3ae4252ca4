"""Cards for tests: CUDA devices whose memory is numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from workers.gpu.device_memory import Holdings
from workers.gpu.devices import Device
from workers.gpu.engines.stub import StubEngine


def gpu(number: int = 0, memory_mb: int = 10_000) -> Device:
    """Return a CUDA device."""
    return Device(f"cuda:{number} (made up)", "cuda", memory_mb, f"cuda:{number}", f"GPU-{number}")


@dataclass
class Cards:
    """The memory of CUDA devices of `total` MiB each; a driver whose process ids match ours knows what each process holds."""

    total: float = 10_000.0
    used: dict[str, float] = field(default_factory=dict)
    ids_match: bool = False
    held: dict[tuple[str, int], float] = field(default_factory=dict)

    def total_mb(self, device: Device) -> float:
        return self.total

    def used_mb(self, device: Device) -> float | None:
        return self.used.get(device.uuid, 0.0) if device.kind == "cuda" else None

    def held_mb(self, device: Device, pids: Collection[int]) -> float | None:
        return sum(self.held.get((device.uuid, pid), 0.0) for pid in pids) if self.ids_match else None

    def take(self, device: Device, mb: float, pid: int = 1) -> None:
        """Have a process use so much more of a device; less if negative."""
        self.used[device.uuid] = self.used.get(device.uuid, 0.0) + mb
        self.held[device.uuid, pid] = self.held.get((device.uuid, pid), 0.0) + mb


class Server(StubEngine):
    """Holds memory of cards as the process of a server does, and keeps `residue_mb` of each while it sleeps."""

    def __init__(self, name: str, declared_mb: float, cards: Cards, *, held_mb: float | None = None, residue_mb: float = 300.0) -> None:
        super().__init__(name, "score", declared_mb, 4)
        self.cards, self.awake_mb, self.residue_mb = cards, declared_mb if held_mb is None else held_mb, residue_mb
        self.on: list[Device] = []
        self.holdings: Holdings | None = None
        self.copied: list[bool] = []

    def die(self) -> None:
        """End by itself; its memory is free."""
        self._free()
        assert self._life.broke("its server ended by itself with signal 9")

    def held_mb(self) -> Sequence[float]:
        return self.holdings.mb if self.holdings is not None else ()

    @property
    def measured_exactly(self) -> bool:
        return self.holdings is None or self.holdings.exact

    def can_restore(self, devices: Sequence[Device]) -> bool:
        return list(devices) == self.on

    def leaves_without_copy(self) -> bool:
        return True

    def host_mb(self) -> float:
        return 0.0 if self.state != "host" else 1000.0 if self.copied[-1] else 50.0

    def keeps_mb(self, device: Device) -> float:
        """Return what it keeps of a device while it sleeps."""
        return self.residue_mb

    def _start(self, devices: Sequence[Device]) -> None:
        self.on, self.holdings = list(devices), Holdings(self.cards, devices)
        self._have(lambda device: self.awake_mb)

    def _evict(self) -> None:
        self.copied.append(True)
        self._have(self.keeps_mb)

    def _evict_without_copy(self) -> None:
        self.copied.append(False)
        self._have(self.keeps_mb)

    def _restore(self, devices: Sequence[Device]) -> None:
        self._have(lambda device: self.awake_mb)

    def _free(self) -> None:
        for device in self.on:
            self.cards.take(device, -self.cards.held[device.uuid, id(self)], id(self))
        self.on, self.holdings = [], None

    def _have(self, mb: Callable[[Device], float]) -> None:
        assert self.holdings is not None
        self.holdings.begin()
        for device in self.on:
            self.cards.take(device, mb(device) - self.cards.held.get((device.uuid, id(self)), 0.0), id(self))
        self.holdings.measure([id(self)])
