"""How much memory a device has, how much of it is used, and how much certain processes hold.

| | CUDA devices | CPU devices |
|---|---|---|
| in all | as the driver says, through NVML | the host's memory |
| used | by all processes together | not known: such a device has only a budget |
| held by processes | as the driver says, if it counts processes as this machine does | their proportional set size |

In a container the driver may list process ids of the host, or none. Then the change of a device's used memory says what a server took or
gave back. Changes on a device come one after another (`reservations.py`), so a change is that of one instance.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import psutil

from workers.gpu import nvml
from workers.gpu.devices import Device
from workers.memory import MIB

log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """Measures the memory of devices, in MiB. Safe for many threads. Raises `DeviceError` where a device cannot be read."""

    def total_mb(self, device: Device) -> float:
        """Return what the device has in all."""

    def used_mb(self, device: Device) -> float | None:
        """Return what all processes together hold of the device; None for a CPU device."""

    def held_mb(self, device: Device, pids: Collection[int]) -> float | None:
        """Return what these processes hold of the device; None if the driver's process ids cannot be matched with them."""


class NvmlMemory:
    """The memory of CUDA devices, which are named by their UUIDs."""

    def total_mb(self, device: Device) -> float:
        """Return the MiB that the device has."""
        return nvml.memory(device.uuid).total_mb

    def used_mb(self, device: Device) -> float:
        """Return the MiB that are not free."""
        return nvml.memory(device.uuid).used_mb

    def held_mb(self, device: Device, pids: Collection[int]) -> float | None:
        """Return the MiB of the processes.

        The driver's list counts only if all of its processes exist here and one of `pids` is among them. Otherwise its ids may belong to
        another namespace, where the same number names another process.
        """
        if not pids:
            return 0.0
        listed = nvml.processes(device.uuid)
        mine = [mb for pid, mb in listed.items() if pid in pids]
        if not mine or None in mine or not all(map(psutil.pid_exists, listed)):
            return None
        return sum(mb for mb in mine if mb is not None)


class CpuMemory:
    """The memory of CPU devices, which is the host's."""

    def total_mb(self, device: Device) -> float:
        """Return the MiB that the host has."""
        return psutil.virtual_memory().total / MIB

    def used_mb(self, device: Device) -> None:
        """Return None: other programs use this memory, too."""
        return

    def held_mb(self, device: Device, pids: Collection[int]) -> float:
        """Return the MiB that the processes hold of the host's memory."""
        return host_mb(pids)


def device_memory(devices: Sequence[Device]) -> DeviceMemory:
    """Return what measures these devices, which are all of one kind."""
    return NvmlMemory() if any(device.kind == "cuda" for device in devices) else CpuMemory()


def host_mb(pids: Collection[int]) -> float:
    """Return the host memory of processes, MiB; a page that they share counts once. A process that has ended counts nothing."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            info = psutil.Process(pid).memory_full_info()
            total += getattr(info, "pss", info.rss)
    return total / MIB


def offered(devices: Sequence[Device], memory: DeviceMemory, declared_mb: int | None) -> list[Device]:
    """Return the devices with what each offers: what is declared, or else what is free of it now."""
    offers = []
    for device in devices:
        used_mb = memory.used_mb(device)
        free_mb = device.memory_mb if used_mb is None else int(memory.total_mb(device) - used_mb)
        if declared_mb is not None and declared_mb > free_mb:
            log.warning("%s: %d MiB are declared, and %d are free", device.name, declared_mb, free_mb)
        offers.append(replace(device, memory_mb=free_mb if declared_mb is None else declared_mb))
    return offers


class Holdings:
    """What the processes of one server hold on each of its devices, MiB, as measured at the last change."""

    def __init__(self, memory: DeviceMemory, devices: Sequence[Device]) -> None:
        self._memory, self._devices = memory, tuple(devices)
        self.mb: tuple[float, ...] = tuple(0.0 for _ in devices)
        self.exact = True
        """Whether the last measurement is that of the processes, and not the change of a device."""
        self.assumed = False
        """Whether the last change of every device was also that of others, so that nothing is known of the processes."""
        self._before: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Note what the devices hold just before a change."""
        self._before = [(held, self._memory.used_mb(device) or 0.0) for held, device in zip(self.mb, self._devices, strict=True)]

    def measure(self, pids: Collection[int], otherwise_mb: float = 0.0) -> None:
        """Measure what the processes hold after the change, by their ids, or else by the change of each device since `begin`.

        A change after which they would hold nothing is also that of others, who have freed memory. Then `otherwise_mb` is assumed.
        """
        held = [self._memory.held_mb(device, pids) for device in self._devices]
        self.exact = None not in held
        after = [
            held_mb + (self._memory.used_mb(device) or 0.0) - used_mb if exact_mb is None else exact_mb
            for device, exact_mb, (held_mb, used_mb) in zip(self._devices, held, self._before, strict=True)
        ]
        unknown = [mb <= 0.0 and exact_mb is None for mb, exact_mb in zip(after, held, strict=True)]
        self.assumed = all(unknown)
        self.mb = tuple(otherwise_mb if is_unknown else mb for mb, is_unknown in zip(after, unknown, strict=True))
