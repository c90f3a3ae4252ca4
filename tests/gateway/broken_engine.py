"""What a worker includes to have services whose names begin with `broken` and whose weights cannot be read."""

from __future__ import annotations

from collections.abc import Sequence

from workers.gpu.devices import Device
from workers.gpu.engines.stub import StubEngine

start = StubEngine._start


def _start(self: StubEngine, devices: Sequence[Device]) -> None:
    if self.name.startswith("broken"):
        raise OSError("no tensors")
    start(self, devices)


StubEngine._start = _start  # type: ignore[method-assign]
