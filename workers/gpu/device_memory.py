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

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

import psutil

from workers.gpu import nvml
from workers.gpu.devices import Device
from workers.memory import MIB


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

        The driver's list counts only if all of its processes exist here and one of `pids` is among them: otherwise its ids may be those
        of another namespace, in which a number names another process.
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


class Holdings:
    """What the processes of one server hold on each of its devices, MiB, as measured at the last change."""

    def __init__(self, memory: DeviceMemory, devices: Sequence[Device], pids: Callable[[], Collection[int]]) -> None:
        """Begin with nothing held; `pids` returns the server's processes that live."""
        self._memory, self._devices, self._pids = memory, tuple(devices), pids
        self.mb: tuple[float, ...] = tuple(0.0 for _ in devices)
        self._before: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Note what the devices hold just before a change."""
        self._before = [(held, self._memory.used_mb(device) or 0.0) for held, device in zip(self.mb, self._devices, strict=True)]

    def measure(self) -> tuple[float, ...]:
        """Measure after the change, by process ids, or else by the change of each device's used memory since `begin`."""
        pids = self._pids()
        self.mb = tuple(self._measured(device, pids, *before) for device, before in zip(self._devices, self._before, strict=True))
        return self.mb

    def _measured(self, device: Device, pids: Collection[int], held_mb: float, used_mb: float) -> float:
        exact = self._memory.held_mb(device, pids)
        if exact is not None:
            # The devices of the CPU are one: what a process holds of it counts on the first.
            return exact if device.kind == "cuda" or device is self._devices[0] else 0.0
        return max(0.0, held_mb + (self._memory.used_mb(device) or 0.0) - used_mb)
