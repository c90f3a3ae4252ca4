"""The GPUs of this machine and their memory, as NVIDIA's management library reports them.

The library comes with the driver; its Python binding `pynvml` (the package `nvidia-ml-py`) is optional. Devices are named by their
UUIDs, as their numbers differ between this library, CUDA and `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from workers.gpu.errors import DeviceError
from workers.memory import MIB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the machine, in the order of the PCI bus, or a MIG device; visible to this process or not."""

    uuid: str
    name: str
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a GPU, MiB; what is not used is free."""

    total_mb: float
    used_mb: float


@cache
def library() -> ModuleType | None:
    """Return the binding, set up; None without it or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("NVML cannot be used: %s", error)
        return None
    module: ModuleType = pynvml
    return module


def gpus() -> list[Gpu] | None:
    """Return the GPUs of this machine."""
    nvml = library()
    if nvml is None:
        return None
    try:
        return [_described(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        log.warning("the GPUs cannot be listed: %s", error)
        return None


def mig_devices() -> dict[str, list[Gpu]]:
    """Return the MIG devices of each GPU on which MIG is enabled, by its UUID; none where NVML cannot be used."""
    nvml = library()
    found: dict[str, list[Gpu]] = {}
    if nvml is None:
        return found
    for gpu in gpus() or ():
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        with suppress(nvml.NVMLError):  # most kinds of GPUs have no MIG
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                found[gpu.uuid] = list(_mig_devices(nvml, handle))
    return found


def _mig_devices(nvml: ModuleType, handle: object) -> Iterator[Gpu]:
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # there may be fewer
            yield _described(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))


def memory(uuid: str) -> Memory:
    """Return the memory of a GPU, whichever processes hold it. Raises `DeviceError` where it cannot be read."""
    with _reading(uuid) as (nvml, handle):
        read = nvml.nvmlDeviceGetMemoryInfo(handle)
        return Memory(read.total / MIB, (read.total - read.free) / MIB)


def processes(uuid: str) -> dict[int, float | None]:
    """Return the MiB that each process holds of a GPU, by the driver's process ids; None for one whose memory it does not say.

    Raises `DeviceError` where they cannot be read.
    """
    with _reading(uuid) as (nvml, handle):
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return {int(one.pid): None if one.usedGpuMemory is None else one.usedGpuMemory / MIB for one in listed}


@contextmanager
def _reading(uuid: str) -> Iterator[tuple[ModuleType, Any]]:
    """Give the binding and a GPU's handle; errors of the binding become `DeviceError`."""
    nvml = library()
    if nvml is None:
        raise DeviceError("GPU memory cannot be measured: NVML or its Python binding (the package nvidia-ml-py) is not there")
    try:
        yield nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise DeviceError(f"the memory of the GPU {uuid or '(of unknown UUID)'} cannot be read: {error}") from error


def _described(nvml: ModuleType, handle: object) -> Gpu:
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(uuid, name, nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB)


def _text(value: str | bytes) -> str:
    """Return a text of the library; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
