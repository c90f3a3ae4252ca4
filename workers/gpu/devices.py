"""The devices of this machine: one per GPU cell, in the order of their cell numbers.

A machine without CUDA has CPU devices instead, with a declared memory budget, so that the same services run
everywhere. torch is optional here: without it there are CPU devices, which the stub engine can use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil

from workers.gpu.errors import DeviceError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """What stands behind one cell.

    `name` is for people, `memory_mb` the budget in MiB, `torch_device` what torch calls it.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_mb: int
    torch_device: str


def discover(cells: int | None = None, memory_mb: int | None = None) -> list[Device]:
    """Find the devices of this machine.

    `cells` is how many to use; none: every CUDA device, or one CPU device. `memory_mb` is the budget of each in MiB;
    none: what the CUDA device has, or for CPU devices an equal share of half the host's memory.

    Raises `DeviceError` where there are fewer CUDA devices, or less memory on one, than asked for.
    """
    if cells is not None and cells < 1:
        raise DeviceError(f"cells: must be at least 1, not {cells}")
    if memory_mb is not None and memory_mb < 1:
        raise DeviceError(f"memory_mb: must be at least 1, not {memory_mb}")
    found = _cuda_devices()
    if not found:
        return _cpu_devices(cells or 1, memory_mb)
    if cells is not None and cells > len(found):
        raise DeviceError(f"cells: {cells} asked for, this machine has {len(found)} CUDA devices")
    return [_budgeted(device, memory_mb) for device in found[:cells]]


def _cuda_devices() -> list[Device]:
    """List the CUDA devices, with all the memory they have; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(index).total_memory
        devices.append(Device(f"cuda:{index} ({torch.cuda.get_device_name(index)})", "cuda", total // MIB, f"cuda:{index}"))
    return devices


def _cpu_devices(cells: int, memory_mb: int | None) -> list[Device]:
    """Make CPU devices; the default budget is half the host's memory, shared equally."""
    each = memory_mb if memory_mb is not None else psutil.virtual_memory().total // MIB // 2 // cells
    return [Device(f"cpu:{index} (no GPU here, computing on the CPU)", "cpu", each, "cpu") for index in range(cells)]


def _budgeted(device: Device, memory_mb: int | None) -> Device:
    """Hold a CUDA device to the declared budget."""
    if memory_mb is None:
        return device
    if memory_mb > device.memory_mb:
        raise DeviceError(f"memory_mb: {memory_mb} asked for, {device.name} has {device.memory_mb}")
    return Device(device.name, device.kind, memory_mb, device.torch_device)
