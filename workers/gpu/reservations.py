"""Device memory: what is reserved on each cell, and whether what left a cell has freed it.

Several instances share a cell if the memory that they declare fits. An instance reserves its memory before its weights arrive. The
reservation ends when the memory is measured to be free. The engine measures it. On a CUDA device that has no other instance, the free
memory that the device reports must have grown, too; on a shared device it says nothing about one instance.

The process of a sleeping server keeps a part of its device. That part stays reserved, and the server is stopped if a start would not
fit beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from workers.gpu.devices import Device
from workers.gpu.errors import DeviceError, OverBudget
from workers.gpu.instances import Instance

FreeMb = Callable[[Device], float | None]
"""Measures the free MiB of a device; None where that cannot be measured or means nothing."""

PART_FREED = 0.9
"""The part of an engine's memory, less `BLURRED_MB`, by which the free memory of its device must grow in an eviction."""

BLURRED_MB = 1024.0
"""MiB by which a device's free memory may change for other reasons. For an engine that may keep more, that counts instead."""

_POLL_S = 0.05


class Reservations:
    """The memory of a node's devices. Safe for many threads; nothing here waits for weights to move."""

    def __init__(self, devices: Sequence[Device], instances: Callable[[], Iterable[Instance]], free_mb: FreeMb, freed_s: float) -> None:
        """Begin with nothing reserved. `freed_s` is how many seconds a device has to report memory as free."""
        self._devices = tuple(devices)
        self._instances = instances
        self._free_mb = free_mb
        self._freed_s = freed_s
        self._lock = threading.Lock()

    def reserve(self, instance: Instance) -> None:
        """Reserve the declared memory on all cells of an instance or on none. Raises `OverBudget`."""
        with self._lock:
            for other in self._instances():
                if other.leaking and self._is_gone(other):
                    self._drop(other)
            for cell in instance.name.cells:
                others = [other for other in self._on(cell) if other is not instance]
                needed, device = instance.config.memory_mb, self._devices[cell]
                if not self._fits(needed, cell, others):
                    beside = ", ".join(f"{other.name.service} {other.reserved_mb:g}" for other in others) or "nothing"
                    what = f"{instance.name.service} needs {needed:g} MiB on cell {cell}"
                    raise OverBudget(f"{what}, which has {device.memory_mb} MiB and holds {beside}")
            instance.residual_mb = 0.0
            instance.reserved = True

    def release(self, instance: Instance, residual_mb: float = 0.0) -> None:
        """End the reservation of an instance, except for `residual_mb` MiB on each of its cells."""
        with self._lock:
            self._drop(instance)
            instance.residual_mb = residual_mb

    def held_mb(self, cell: int) -> float:
        """Return the MiB reserved on a cell. Raises `DeviceError` for one that is not there."""
        if not 0 <= cell < len(self._devices):
            raise DeviceError(f"cells: there is no cell {cell}, this node has {len(self._devices)}")
        with self._lock:
            return sum(other.reserved_mb for other in self._on(cell))

    def room_for(self, memory_mb: float, cells: Iterable[int], gone: Iterable[Instance]) -> bool:
        """Say whether `memory_mb` would fit on each of the cells without the instances `gone` and without any sleeper."""
        without = {id(instance) for instance in gone}
        with self._lock:
            return all(
                self._fits(memory_mb, cell, [one for one in self._on(cell) if one.reserved and id(one) not in without]) for cell in cells
            )

    def sleepers_in_the_way(self, instance: Instance) -> list[Instance]:
        """Return the sleepers that keep memory that an instance needs, the least recently used first, pinned ones last."""
        needed, cells, going = instance.config.memory_mb, instance.name.cells, list[Instance]()
        with self._lock:
            here = {cell: [one for one in self._on(cell) if one is not instance] for cell in cells}

        def fits(cell: int) -> bool:
            return self._fits(needed, cell, [one for one in here[cell] if one not in going])

        sleepers = {id(one): one for others in here.values() for one in others if not one.reserved}
        for sleeper in sorted(sleepers.values(), key=lambda one: (one.config.pinned, one.used_at)):
            if not all(fits(cell) for cell in sleeper.name.cells if cell in here):
                going.append(sleeper)
        return going if all(map(fits, cells)) else []

    def watch(self, instance: Instance) -> None:
        """Note, before an instance leaves its cells, how much memory its devices must report as free afterwards."""
        each = instance.memory_mb / len(instance.name.cells)
        residual_mb = max(BLURRED_MB, instance.engine.residual_mb() if instance.engine is not None else 0.0)
        if (freed_mb := PART_FREED * each - residual_mb) <= 0.0:
            # So little does not show in the free memory.
            instance.demanded_mb = {}
            return
        with self._lock:
            alone = [cell for cell in instance.name.cells if not self._beside(instance, cell)]
        measured = {cell: self._free_mb(self._devices[cell]) for cell in alone}
        instance.demanded_mb = {cell: free + freed_mb for cell, free in measured.items() if free is not None}

    def left(self, instance: Instance) -> bool:
        """Wait for the devices of an instance to report its memory as free; say whether they do."""
        until = time.monotonic() + self._freed_s
        while True:
            with self._lock:
                if self._is_gone(instance):
                    return True
                # A device frees the memory of a process a little after its end. An engine needs no such time.
                if instance.memory_mb > 0.0 or time.monotonic() >= until:
                    return False
            time.sleep(_POLL_S)

    def has_left(self, instance: Instance) -> bool:
        """Say whether the memory of an instance is measured to be free now."""
        with self._lock:
            return self._is_gone(instance)

    def _is_gone(self, instance: Instance) -> bool:
        if instance.memory_mb > 0.0:
            return False
        for cell, demanded_mb in instance.demanded_mb.items():
            free_mb = self._free_mb(self._devices[cell])
            if free_mb is not None and free_mb < demanded_mb and not self._beside(instance, cell):
                return False
        return True

    def _fits(self, memory_mb: float, cell: int, beside: Iterable[Instance]) -> bool:
        return sum(other.reserved_mb for other in beside) + memory_mb <= self._devices[cell].memory_mb

    def _on(self, cell: int) -> list[Instance]:
        return [one for one in self._instances() if one.reserved_mb and cell in one.name.cells]

    def _beside(self, instance: Instance, cell: int) -> list[Instance]:
        return [other for other in self._on(cell) if other.reserved and other is not instance]

    def _drop(self, instance: Instance) -> None:
        instance.reserved = instance.leaking = False
        instance.residual_mb = 0.0
        instance.demanded_mb = {}
