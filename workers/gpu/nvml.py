"""The GPUs of this machine and their free memory, as NVIDIA's management library reports them.

The library comes with the driver; its Python binding `pynvml` (the package `nvidia-ml-py`) is optional. Devices are named by their
UUIDs, as their numbers differ between this library, CUDA and `CUDA_VISIBLE_DEVICES`. What cannot be read is None.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from workers.memory import MIB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of the machine, in the order of the PCI bus, visible to this process or not."""

    uuid: str
    name: str
    memory_mb: int


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
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                _text(nvml.nvmlDeviceGetUUID(handle)),
                _text(nvml.nvmlDeviceGetName(handle)),
                nvml.nvmlDeviceGetMemoryInfo(handle).total // MIB,
            )
            for handle in handles
        ]
    except nvml.NVMLError as error:
        log.warning("the GPUs cannot be listed: %s", error)
        return None


def free_mb(uuid: str) -> float | None:
    """Return the MiB that are free on a GPU, whichever processes hold the rest."""
    nvml = library()
    if nvml is None:
        return None
    try:
        return float(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).free) / MIB
    except nvml.NVMLError as error:
        log.warning("the free memory of %s cannot be read: %s", uuid, error)
        return None


def _text(value: str | bytes) -> str:
    """Return a text of the library; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
