"""MIG devices: parts of a GPU, each of which CUDA counts as a device of its own.

Up to R525, a driver shows a process one MIG device, the first in `CUDA_VISIBLE_DEVICES`, and no whole GPU beside it. From R570 on it shows
one of each GPU instance beside whole GPUs. torch may report the UUID of the whole GPU for either. So a worker has one MIG device, and
takes its name from the variable. See "CUDA Device Enumeration" in NVIDIA's MIG User Guide.
"""

from __future__ import annotations

from workers.gpu import nvml
from workers.gpu.errors import DeviceError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def entries(said: str | None) -> list[str]:
    """Return what a value of `CUDA_VISIBLE_DEVICES` lists; a value that names no device first, such as `-1`, hides them all."""
    listed = [entry.strip() for entry in (said or "").split(",")]
    return listed if is_number(listed[0]) or listed[0].startswith(("GPU-", "MIG-")) else []


def is_number(entry: str) -> bool:
    """Say whether an entry is the number of a device."""
    return entry.isascii() and entry.isdigit()


def named_instance(said: str | None) -> str | None:
    """Return the whole UUID of the MIG device that a value of `CUDA_VISIBLE_DEVICES` names; None where it is about whole GPUs.

    Raises `DeviceError` where it names several devices and a MIG device among them, or one that is not there, and where a GPU with MIG may
    be visible though no MIG device is named. Numbers do not say which, on a machine with such a GPU.
    """
    named, divided = entries(said), nvml.mig_devices()
    there = [part.uuid for parts in divided.values() for part in parts]
    if any(entry.startswith("MIG-") for entry in named):
        if len(named) > 1:
            raise DeviceError(f"{VARIABLE}={said}: a worker has one MIG device and nothing beside it: start a worker for each")
        found = [uuid for uuid in there if uuid.startswith(named[0])]
        if divided and len(found) != 1:
            raise DeviceError(f"{VARIABLE}={said}: must name one of {', '.join(there) or 'no MIG device, as there is none'}")
        return found[0] if found else named[0]
    if said is not None and not named:
        return None
    by_uuid = said is not None and all(entry.startswith("GPU-") for entry in named)
    if seen := [gpu for gpu in divided if not by_uuid or gpu.startswith(tuple(named))]:
        value = f"{VARIABLE}={said}" if said is not None else f"{VARIABLE} is not set"
        which = f"one MIG device ({', '.join(there) or 'there is none yet'})"
        raise DeviceError(f"{value}, and MIG is enabled on {', '.join(seen)}: set it to {which} or to the UUIDs of GPUs without MIG")
    return None
