"""Cards for tests: CUDA devices whose memory is numbers, and the driver's own library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType, SimpleNamespace

from tests.workers_gpu.support import Mortal
from workers.gpu.device_memory import Holdings
from workers.gpu.devices import MIB, Device


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


class Server(Mortal):
    """Holds memory of cards as the process of a server does, and keeps `residue_mb` of each while it sleeps.

    Where it cannot be measured, it is assumed to hold `assumed_mb`.
    """

    def __init__(
        self,
        name: str,
        declared_mb: float,
        cards: Cards,
        *,
        held_mb: float | None = None,
        residue_mb: float = 300.0,
        assumed_mb: float = 0.0,
    ) -> None:
        super().__init__(name, "score", declared_mb, 4)
        self.cards, self.awake_mb, self.residue_mb = cards, declared_mb if held_mb is None else held_mb, residue_mb
        self.assumed_mb = assumed_mb
        self.on: list[Device] = []
        self.holdings: Holdings | None = None
        self.copied: list[bool] = []

    def held_mb(self) -> Sequence[float]:
        return self.holdings.mb if self.holdings is not None else ()

    @property
    def measured_exactly(self) -> bool:
        return self.holdings is None or self.holdings.exact

    @property
    def assumed(self) -> bool:
        return self.holdings is not None and self.holdings.assumed

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
        self.holdings.measure([id(self)], self.assumed_mb)


class NoSuch(Exception):
    """NVML's own error."""


class FakeNvml(ModuleType):
    """NVML on a machine of these GPUs; a handle is a UUID. Memory is 80,000 MiB each, of which 7 are free; a MIG device has a quarter."""

    NVMLError = NoSuch
    TOTAL_MB = 80_000

    def __init__(self, *uuids: str) -> None:
        super().__init__("pynvml")
        self.uuids, self.driver = list(uuids), True
        self.names = dict.fromkeys(uuids, b"H100")
        self.free_mb: dict[str, int] = {}
        self.processes: list[tuple[int, int | None]] = []
        self.modes: dict[str, list[int]] = {}
        self.parts: dict[str, list[str]] = {}

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NoSuch("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (*self.uuids, *chain.from_iterable(self.parts.values())):
            raise NoSuch("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes | str:
        return self.names.get(handle, "H100 MIG 2g.20gb")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        total_mb = self.TOTAL_MB if handle in self.uuids else self.TOTAL_MB // 4
        return SimpleNamespace(total=total_mb * MIB, free=self.free_mb.get(handle, 7) * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=None if mb is None else mb * MIB) for pid, mb in self.processes]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle not in self.modes:
            raise NoSuch("Not Supported")
        return self.modes[handle]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index >= len(self.parts[handle]):
            raise NoSuch("Not Found")
        return self.parts[handle][index]
