"""What the tests of GPU workers share: tiny models, CPU devices, a machine with NVML."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.engines.fixtures import models, shelf
from workers.gpu import devices as devices_here
from workers.gpu import nvml
from workers.gpu.devices import Device

__all__ = ["models", "shelf"]


@pytest.fixture
def cells() -> list[Device]:
    """Return two CPU devices of 1000 MiB."""
    return [Device(f"cpu:{index}", "cpu", 1000, "cpu") for index in range(2)]


@pytest.fixture
def with_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType], None]]:
    """Return a function that makes this a machine with a driver and the given binding of NVML, and without torch."""

    def use(binding: ModuleType) -> None:
        monkeypatch.setattr(devices_here, "DRIVER_FILES", (__file__,))
        monkeypatch.setitem(sys.modules, "pynvml", binding)
        monkeypatch.setitem(sys.modules, "torch", None)
        for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(variable, raising=False)
        nvml.library.cache_clear()

    yield use
    nvml.library.cache_clear()
