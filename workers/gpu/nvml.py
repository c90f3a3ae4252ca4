"""What NVIDIA's management library says of the GPUs here: which there are, how they are linked, what is free on them.

The library comes with the driver; its Python binding `pynvml` (the package `nvidia-ml-py`) is optional. Devices are named by their
UUIDs, as their numbers differ between this library, CUDA and `CUDA_VISIBLE_DEVICES`. Whatever cannot be read is None.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from workers.gpu.links import HOST_BRIDGE, NUMA, NVLINK, SWITCH, SWITCHES, SYSTEM

log = logging.getLogger(__name__)

MIB = 1 << 20


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


def links(uuids: Sequence[str]) -> list[list[int]] | None:
    """Return how close the GPUs of these UUIDs are to each other, as `links.best_order` takes it."""
    nvml = library()
    if nvml is None:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return [[0 if one is other else _closeness(nvml, one, other) for other in handles] for one in handles]
    except nvml.NVMLError as error:
        log.warning("the links between GPUs cannot be read, their order stays as it is: %s", error)
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


def _closeness(nvml: ModuleType, one: Any, other: Any) -> int:
    if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
        return NVLINK + _nvlinks(nvml, one, other)
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    for most, closeness in (
        (nvml.NVML_TOPOLOGY_SINGLE, SWITCH),
        (nvml.NVML_TOPOLOGY_MULTIPLE, SWITCHES),
        (nvml.NVML_TOPOLOGY_HOSTBRIDGE, HOST_BRIDGE),
        (nvml.NVML_TOPOLOGY_NODE, NUMA),
    ):
        if ancestor <= most:
            return closeness
    return SYSTEM


def _nvlinks(nvml: ModuleType, one: Any, other: Any) -> int:
    """Count the links from one GPU to another; those to a switch lead to all that are on it."""
    bus_id, count = _text(nvml.nvmlDeviceGetPciInfo(other).busId), 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(one, link):
                continue
            to_switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(one, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            count += to_switch or _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId) == bus_id
        except nvml.NVMLError:
            # Asking for a link that this GPU does not have is an error.
            break
    return count


def _text(value: str | bytes) -> str:
    """Return a text of the library; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
