"""How much memory a server's processes hold: on GPUs as the driver says, on the CPU as the operating system does.

On GPUs the driver's list of processes comes first. In a container the list may have process ids of another namespace. Then the
growth of the device's used memory since the start of the server counts, which other users of the device blur.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import psutil

from workers.gpu.devices import Device
from workers.memory import MIB

_ASK_S = 30.0


class Meter(Protocol):
    """What measures a server."""

    def device_mb(self, devices: Sequence[str]) -> float:
        """Return the MiB that the smallest of the devices has in all."""

    def begin(self, devices: Sequence[str]) -> None:
        """Take note of what the devices hold before the server is started."""

    def held_mb(self, processes: Sequence[psutil.Process]) -> float:
        """Return the MiB that the processes hold now, over all the devices."""


class HostMeter:
    """Measures processes that compute on the CPU, where a device's memory is the host's."""

    def device_mb(self, devices: Sequence[str]) -> float:
        """Return the host's memory."""
        return psutil.virtual_memory().total / MIB

    def begin(self, devices: Sequence[str]) -> None:
        """Need nothing: the operating system counts by process."""

    def held_mb(self, processes: Sequence[psutil.Process]) -> float:
        """Return what would be free if the processes were gone, MiB."""
        return host_mb(processes)


class GpuMeter:
    """Measures through `nvidia-smi`, which comes with every driver."""

    def __init__(self) -> None:
        """Measure nothing yet."""
        self._devices: Sequence[str] = ()
        self._before_mb = 0.0

    def device_mb(self, devices: Sequence[str]) -> float:
        """Return the smallest of the devices' totals, MiB."""
        return min(float(row[0]) for row in _ask("--query-gpu=memory.total", devices))

    def begin(self, devices: Sequence[str]) -> None:
        """Take note of what the devices hold, all processes together."""
        self._devices = devices
        self._before_mb = self._used_mb()

    def held_mb(self, processes: Sequence[psutil.Process]) -> float:
        """Return what the processes hold on the devices, MiB."""
        if not processes:
            return 0.0
        ours = {process.pid for process in processes}
        listed = [row for row in _ask("--query-compute-apps=pid,used_memory", self._devices) if row[1].replace(".", "").isdigit()]
        mine = [float(row[1]) for row in listed if int(row[0]) in ours]
        return sum(mine) if mine else max(0.0, self._used_mb() - self._before_mb)

    def _used_mb(self) -> float:
        return sum(float(row[0]) for row in _ask("--query-gpu=memory.used", self._devices))


def host_mb(processes: Sequence[psutil.Process]) -> float:
    """Return the host memory of processes, MiB; a page that they share counts once."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)
    return total / MIB


def meter_for(device: Device) -> Meter:
    """Return what measures servers on devices of this kind."""
    return GpuMeter() if device.kind == "cuda" else HostMeter()


def _ask(query: str, devices: Sequence[str]) -> list[list[str]]:
    """Return the rows of a query, without units. Raises `RuntimeError` where the driver's tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise RuntimeError("nvidia-smi is not on PATH, and GPU memory cannot be measured without it")
    words = [tool, query, "--format=csv,noheader,nounits", f"--id={','.join(devices)}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, check=False)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi failed: {' '.join(done.stdout.split() + done.stderr.split())[:200]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
