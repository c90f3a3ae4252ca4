"""The devices of this machine: one per GPU cell, in the order of their cell numbers.

CUDA devices come in CUDA's order or in a declared one. A machine without CUDA has CPU devices with a memory budget instead, so that
the same services run everywhere. torch is optional here. Without torch, NVML lists the GPUs that `CUDA_VISIBLE_DEVICES` leaves visible.
Without either there are CPU devices, which the stub engine can use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from workers.gpu import mig, nvml
from workers.gpu.errors import DeviceError
from workers.memory import MIB, usable_mb

DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg", "/dev/kfd")
"""On Linux, what the driver of a GPU that torch calls CUDA makes: NVIDIA's, that of Tegra, that under Windows, and AMD's."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one cell."""

    name: str
    """For people."""
    kind: Literal["cuda", "cpu"]
    memory_mb: int
    """Its budget, MiB."""
    torch_device: str
    """Its name in torch."""
    uuid: str = ""
    """The name of a GPU or a MIG device in CUDA, NVML and `CUDA_VISIBLE_DEVICES`, in full; empty if it is not known."""

    @property
    def model(self) -> str:
        """Its name without its number: devices of the same model compute the same bits."""
        return self.name.partition(" ")[2]


def discover(cells: int | None = None, memory_mb: int | None = None, order: Sequence[int] | None = None) -> list[Device]:
    """Find the devices of this machine.

    `cells` is how many to use; none: every CUDA device, or one CPU device. `memory_mb` is the budget of each in MiB;
    none: what the CUDA device has, or for CPU devices an equal share of half the memory that the worker may use. `order` are numbers
    of CUDA devices, as CUDA counts those that are visible, in the order of the cells; none: all, in CUDA's order.

    Raises `DeviceError` in four cases. There are fewer CUDA devices than asked for. One has less memory than asked for. There are none,
    but an order of them is given. Or `CUDA_VISIBLE_DEVICES` does not say clearly which there are.
    """
    found = _cuda_devices()
    if not found:
        if order is not None:
            # Computing on the CPU instead would only show by its pace.
            raise DeviceError(f"gpu_order: {','.join(map(str, order))} are declared, and no CUDA device is found here")
        return _cpu_devices(cells or 1, memory_mb)
    ordered = _in_order(found, order)
    if cells is not None and cells > len(ordered):
        raise DeviceError(f"cells: {cells} asked for, this machine has {len(ordered)} CUDA devices")
    return [_budgeted(device, memory_mb) for device in ordered[:cells]]


def visible(uuids: Sequence[str], said: str | None) -> list[str]:
    """Return the UUIDs that a value of `CUDA_VISIBLE_DEVICES` leaves, in its order: numbers into `uuids`, or beginnings of UUIDs.

    As CUDA has it, the first entry that names no device ends the list, and one that comes twice leaves none.
    """
    if said is None:
        return list(uuids)
    left: list[str] = []
    for entry in (part.strip() for part in said.split(",")):
        if mig.is_number(entry):
            named = list(uuids[int(entry) : int(entry) + 1])
        else:
            named = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in left:
            return []
        left += named
    return left


def _in_order(devices: Sequence[Device], order: Sequence[int] | None) -> list[Device]:
    """Return the devices in the declared order; those that it does not name are left out."""
    if order is None:
        return list(devices)
    if len(set(order)) != len(order) or not order:
        raise DeviceError(f"gpu_order: must name each device once, not {','.join(map(str, order))}")
    if strangers := [number for number in order if not 0 <= number < len(devices)]:
        raise DeviceError(f"gpu_order: there is no CUDA device {strangers[0]}, this machine has {len(devices)}")
    return [devices[number] for number in order]


def _cuda_devices() -> list[Device]:
    """List the CUDA devices that are visible here, as CUDA counts them, with all the memory they have."""
    if sys.platform == "linux" and not any(map(os.path.exists, DRIVER_FILES)):
        return []  # torch would say so, too, after the seconds that importing it takes
    said = os.environ.get(mig.VARIABLE)
    instance = mig.named_instance(said)
    try:
        import torch
    except ImportError:
        return _nvml_devices(said, instance)
    if not torch.cuda.is_available():
        if mig.entries(said):
            raise DeviceError(f"{_no_device(said)}; and torch must be built with CUDA")
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if " MIG " in properties.name and instance is None:  # NVML could not be asked
            raise DeviceError(f"{properties.name} is a MIG device: set {mig.VARIABLE} to its UUID, which `nvidia-smi -L` shows")
        bare = instance or str(getattr(properties, "uuid", ""))
        uuid = bare if not bare or bare.startswith(("GPU-", "MIG-")) else f"GPU-{bare}"
        devices.append(Device(f"cuda:{index} ({properties.name})", "cuda", properties.total_memory // MIB, f"cuda:{index}", uuid))
    return devices


def _nvml_devices(said: str | None, instance: str | None) -> list[Device]:
    """List the visible GPUs without torch, or the MIG device; CUDA counts GPUs by the PCI bus where they are all of one kind."""
    gpus = [part for parts in nvml.mig_devices().values() for part in parts] if instance else nvml.gpus()
    if gpus is None:
        return []
    in_bus_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if any(map(mig.is_number, mig.entries(said))) and not in_bus_order:
        first = "CUDA counts GPUs of several kinds by their speed, which is not known without torch"
        raise DeviceError(f"{mig.VARIABLE}={said}: {first}: name GPUs by their UUIDs, or set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    there = {gpu.uuid: gpu for gpu in gpus}
    left = visible(list(there), instance or said)
    if mig.entries(said) and not left:
        raise DeviceError(_no_device(said))
    return [
        Device(f"cuda:{index} ({there[uuid].name})", "cuda", there[uuid].memory_mb, f"cuda:{index}", uuid)
        for index, uuid in enumerate(left)
    ]


def _no_device(said: str | None) -> str:
    return f"{mig.VARIABLE}={said} leaves no device: one that does not exist ends the list, and one that comes twice empties it"


def _cpu_devices(cells: int, memory_mb: int | None) -> list[Device]:
    """Make CPU devices; the default budget is half the memory that the worker may use, shared equally."""
    each = memory_mb if memory_mb is not None else usable_mb() // 2 // cells
    return [Device(f"cpu:{index} (no GPU here, computing on the CPU)", "cpu", each, "cpu") for index in range(cells)]


def _budgeted(device: Device, memory_mb: int | None) -> Device:
    """Hold a CUDA device to the declared budget."""
    if memory_mb is None:
        return device
    if memory_mb > device.memory_mb:
        raise DeviceError(f"memory_mb: {memory_mb} asked for, {device.name} has {device.memory_mb}")
    return replace(device, memory_mb=memory_mb)
