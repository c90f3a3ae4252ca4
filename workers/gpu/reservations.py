"""Device memory: what is booked on each cell, and the locks under which it changes.

Several instances share a cell if the sum of what they are booked with fits into what the cell offers; docs/services.md says with how much
each is booked.

Changes on a device come one after another: a start, an eviction, a restore and a stop lock their cells. So a change of a device's used
memory is that of one instance. And a server may measure its device while it starts: nobody else changes it.

The first sleeps of a service on a number of cells set its residue. A residue that later grows is a leak.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from app.services_file import ServiceConfig
from workers.gpu.device_memory import DeviceMemory
from workers.gpu.devices import Device
from workers.gpu.errors import DeviceError, OverBudget
from workers.gpu.instances import Instance, InstanceName

log = logging.getLogger(__name__)

FIRST_SLEEPS = 3
"""Sleeps of a service that set its residue, which is the largest of theirs."""

GROWTH_PART, GROWTH_MB = 0.25, 512.0
"""A residue may grow by this part of itself, or by this many MiB if that is more."""

LEAST_FREED = 0.1
"""The part of what an instance held that its eviction must free at least."""


@dataclass(slots=True)
class _Learned:
    """What instances of a service on a number of cells were measured to hold of each cell, MiB."""

    config: ServiceConfig
    """As it was declared then."""
    needed_mb: float = 0.0
    """Resident, after the last start or restore."""
    residues: list[float] = field(default_factory=list)
    """Asleep, in the first sleeps."""


class Reservations:
    """The memory of a node's devices. Safe for many threads; only `cells_locked` waits for weights to move."""

    def __init__(self, devices: Sequence[Device], instances: Callable[[], Iterable[Instance]], memory: DeviceMemory) -> None:
        self._devices = tuple(devices)
        self._instances = instances
        self._memory = memory
        self._lock = threading.Lock()
        self._cell_locks = [threading.Lock() for _ in devices]
        self._learned: dict[tuple[str, int], _Learned] = {}

    @contextmanager
    def cells_locked(self, instance: Instance) -> Iterator[None]:
        """Change what an instance holds of its cells while nobody else changes them.

        The block must not wait for calls, nor for another instance. An instance that is not booked holds nothing, and waits for nobody.
        """
        with ExitStack() as locks:
            for cell in instance.name.cells if instance.booked_mb else ():
                locks.enter_context(self._cell_locks[cell])
            yield

    def needed_mb(self, name: InstanceName, config: ServiceConfig) -> float:
        """Return the MiB that an instance is booked with on each of its cells before it comes onto them."""
        learned = self._learned.get((name.service, len(name.cells)))
        if learned is None or learned.config != config:
            return config.memory_mb
        # What was measured may be too much; alone on its cells an instance may always try.
        most_mb = min(self._devices[cell].memory_mb for cell in name.cells)
        return max(config.memory_mb, min(learned.needed_mb, most_mb))

    def described_mb(self, service: str, config: ServiceConfig) -> float:
        """Return the MiB of a cell that a service takes, as declared or, if that is more, as measured; whole steps of 256 MiB then."""
        measured = [one.needed_mb for (name, _), one in list(self._learned.items()) if name == service and one.config == config]
        most_mb = max(measured, default=0.0)
        if most_mb <= config.memory_mb:
            return config.memory_mb
        return max(config.memory_mb, min(math.ceil(most_mb / 256) * 256.0, *(device.memory_mb for device in self._devices)))

    def reserve(self, instance: Instance) -> None:
        """Book an instance on all its cells or on none. Raises `OverBudget`."""
        with self._lock:
            for other in self._instances():
                # Nobody changes these: what is about to come is reserved, and not leaking.
                if (other.leaking or not other.reserved) and other.state in ("failed", "absent") and not other.memory_mb:
                    self._book(other, 0.0)
            needed = self.needed_mb(instance.name, instance.config)
            for cell in instance.name.cells:
                others = self._on(cell, but=instance)
                if not self._fits(needed, cell, others):
                    beside = ", ".join(f"{other.name.service} {other.booked_mb:g}" for other in others) or "nothing"
                    what = f"{instance.name.service} needs {needed:g} MiB on cell {cell}"
                    raise OverBudget(f"{what}, which has {self._devices[cell].memory_mb} MiB and holds {beside}")
            self._book(instance, needed, reserved=True)

    def settle(self, instance: Instance) -> None:
        """Book what an instance holds after a change; remember what it needs. The caller holds its lock."""
        held_mb, declared_mb = instance.held_mb, instance.config.memory_mb
        with self._lock:
            if instance.state == "resident":
                self._book(instance, max(held_mb, declared_mb), reserved=True)
                self._remember(instance, held_mb)
            elif instance.state == "host":
                self._book(instance, max([held_mb, *self._of(instance).residues]))
            else:
                self._book(instance, held_mb, reserved=held_mb > 0.0)
                instance.leaking = held_mb > 0.0

    def kept_too_much(self, instance: Instance, before_mb: float) -> str | None:
        """Learn what an instance that has just left its cells keeps of each; say what is wrong with that.

        `before_mb` is what it held of each before.
        """
        engine, residual_mb = instance.engine, instance.held_mb
        # What is assumed shows nothing. `before_mb` may be wrong then, too: what ended as the server woke made its change look small.
        if engine is None or not residual_mb or engine.assumed:
            return None
        if residual_mb > (1.0 - LEAST_FREED) * before_mb:
            return f"its eviction did not free the memory of its cells: it keeps {residual_mb:.0f} of {before_mb:.0f} MiB"
        residues = self._of(instance).residues
        if len(residues) < FIRST_SLEEPS:
            residues.append(residual_mb)
        usual_mb = max(residues)
        grown = residual_mb > usual_mb + max(GROWTH_PART * usual_mb, GROWTH_MB)
        instance.grown = instance.grown + 1 if grown else 0
        # A change of the whole device may be that of another program for once.
        if instance.grown > (0 if engine.measured_exactly else 1):
            # It may have leaked in its first sleeps, too.
            residues.clear()
            return f"it leaks: evicted, it keeps {residual_mb:.0f} MiB of a cell, and {usual_mb:.0f} in its first evictions"
        return None

    def lack(self, instance: Instance) -> str | None:
        """Say which device has less free memory than an instance is still to take; None where all have enough, or only a budget."""
        held = instance.engine.held_mb() if instance.engine is not None else ()
        for place, cell in enumerate(instance.name.cells):
            device = self._devices[cell]
            used_mb = self._memory.used_mb(device)
            if used_mb is None:
                continue
            needed_mb = instance.booked_mb - (held[place] if place < len(held) else 0.0)
            free_mb = self._memory.total_mb(device) - used_mb
            if free_mb < needed_mb:
                what = f"{instance.name.service} needs {needed_mb:.0f} MiB on cell {cell}"
                return f"{what}, and of the {self._memory.total_mb(device):.0f} MiB of {device.name} {free_mb:.0f} are free"
        return None

    def give_back(self, instance: Instance) -> None:
        """Have the other instances on the cells of an instance return memory that they only keep for reuse."""
        with self._lock:
            engines = [other.engine for cell in instance.name.cells for other in self._on(cell, but=instance)]
        for engine in engines:
            if engine is not None:
                engine.give_back()

    def room_mb(self, instance: Instance) -> float:
        """Return the most that an instance may hold of each of its cells beside the others."""
        with self._lock:
            return min(
                self._devices[cell].memory_mb - sum(other.booked_mb for other in self._on(cell, but=instance))
                for cell in instance.name.cells
            )

    def booked_mb(self, cell: int) -> float:
        """Return the MiB booked on a cell. Raises `DeviceError` for one that is not there."""
        if not 0 <= cell < len(self._devices):
            raise DeviceError(f"cells: there is no cell {cell}, this node has {len(self._devices)}")
        with self._lock:
            return sum(other.booked_mb for other in self._on(cell))

    def room_for(self, memory_mb: float, cells: Iterable[int], gone: Iterable[Instance]) -> bool:
        """Say whether `memory_mb` would fit on each of the cells without the instances `gone` and without any sleeper."""
        without = {id(instance) for instance in gone}
        with self._lock:
            return all(
                self._fits(memory_mb, cell, [one for one in self._on(cell) if one.reserved and id(one) not in without]) for cell in cells
            )

    def sleepers_on(self, instance: Instance) -> list[Instance]:
        """Return the other sleepers that keep memory of an instance's cells, the least recently used first, pinned ones last."""
        with self._lock:
            return self._sleepers_on(instance)

    def sleepers_in_the_way(self, instance: Instance) -> list[Instance]:
        """Return the sleepers that have to go for an instance to fit, in the order of `sleepers_on`; none if that is not enough."""
        needed, cells, going = self.needed_mb(instance.name, instance.config), instance.name.cells, list[Instance]()

        def fits(cell: int) -> bool:
            return self._fits(needed, cell, [one for one in self._on(cell, but=instance) if one not in going])

        # One look at all: a sleeper that begins to come back meanwhile would count as one that can go, and yet as one that stays.
        with self._lock:
            for sleeper in self._sleepers_on(instance):
                if not all(fits(cell) for cell in sleeper.name.cells if cell in cells):
                    going.append(sleeper)
            return going if all(map(fits, cells)) else []

    def _fits(self, memory_mb: float, cell: int, beside: Iterable[Instance]) -> bool:
        return sum(other.booked_mb for other in beside) + memory_mb <= self._devices[cell].memory_mb

    def _on(self, cell: int, but: Instance | None = None) -> list[Instance]:
        return [one for one in self._instances() if one.booked_mb and cell in one.name.cells and one is not but]

    def _sleepers_on(self, instance: Instance) -> list[Instance]:
        found = {id(one): one for cell in instance.name.cells for one in self._on(cell, but=instance) if one.state == "host"}
        return sorted((one for one in found.values() if not one.reserved), key=lambda one: (one.config.pinned, one.used_at))

    def _of(self, instance: Instance) -> _Learned:
        """Return what was learned of the service as it is declared for this instance."""
        key = (instance.name.service, len(instance.name.cells))
        learned = self._learned.get(key)
        if learned is None or learned.config != instance.config:
            learned = self._learned[key] = _Learned(instance.config)
        return learned

    def _remember(self, instance: Instance, held_mb: float) -> None:
        """Remember what a resident instance needs, and warn if that is more than ever and more than is declared."""
        learned, config = self._of(instance), instance.config
        if held_mb > max(config.memory_mb, learned.needed_mb):
            # A vLLM server takes all that it may of `memory_mb`; what is more comes on top.
            key, least_mb = ("memory_mb", held_mb)
            if config.engine == "vllm":
                key, least_mb = "vllm.process_mb", config.vllm.process_mb + held_mb - config.memory_mb
            what = f"{instance.name} holds {held_mb:.0f} MiB of a cell and declares {config.memory_mb:g}"
            log.warning("%s: declare services.%s.%s = %d", what, instance.name.service, key, math.ceil(least_mb))
        learned.needed_mb = held_mb

    @staticmethod
    def _book(instance: Instance, mb: float, *, reserved: bool = False) -> None:
        instance.booked_mb, instance.reserved, instance.leaking = mb, reserved, False
