"""The services of one node: carries out what the scheduler decided, and refuses what cannot be.

The scheduler chooses cells and victims; here nothing is chosen. Every service has an entry with its engine and the
cells it is booked on. A booking is made before weights arrive and given up only when they are measured to be gone,
so the sum over a cell never exceeds its device. One lock per service orders its changes; one more guards bookings
and is never held while weights move, so services on different cells move at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from app.services_file import ServiceConfig
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.factory import create_engine
from workers.gpu.engines.lifecycle import State
from workers.gpu.errors import DeviceError, EngineFailed, GpuError, OverBudget, UnknownService, WrongState

T = TypeVar("T")
EngineFactory = Callable[[str, ServiceConfig, Path], Engine]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One service as it is now.

    `cells` are those it is booked on, `memory_mb` the measured MiB of device memory over all of them, `running` the
    calls in it, `reason` why it is failed; `starts`, `restores`, `evictions` and `leaks` (evictions that did not
    free the memory) are counts since the worker began.
    """

    name: str
    state: State
    reason: str
    cells: tuple[int, ...]
    memory_mb: float
    running: int
    starts: int
    restores: int
    evictions: int
    leaks: int


@dataclass(slots=True)
class _Entry:
    name: str
    config: ServiceConfig
    engine: Engine
    lock: threading.Lock = field(default_factory=threading.Lock)
    cells: tuple[int, ...] = ()
    leaking: bool = False
    starts: int = 0
    restores: int = 0
    evictions: int = 0
    leaks: int = 0


class ServiceHost:
    """The devices of a node and the services on them. Safe for many threads."""

    def __init__(
        self,
        devices: Sequence[Device],
        services: Mapping[str, ServiceConfig],
        state_dir: Path,
        *,
        factory: EngineFactory = create_engine,
        drain_s: float = 60.0,
    ) -> None:
        """Make the host of these services, all absent.

        `devices` are one per cell, in the order of the cell numbers; `state_dir` is the folder for host copies of models on
        CPU devices; `factory` makes the engine of a service; `drain_s` is how many seconds an eviction waits for calls.

        Raises `ConfigError` for a service whose engine cannot be made.
        """
        self._devices = tuple(devices)
        self._state_dir, self._factory, self._drain_s = state_dir, factory, drain_s
        self._entries = {name: _Entry(name, config, factory(name, config, state_dir)) for name, config in services.items()}
        self._bookings = threading.Lock()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, one per cell."""
        return self._devices

    def ensure_resident(self, service: str, cells: tuple[int, ...], evict: Iterable[str] = ()) -> float:
        """Evict the named services in order, then have `service` on exactly these cells.

        Evicting one that is not resident does nothing, and so does a service that is there already; both make a
        decision that is carried out twice harmless. A failed service is started afresh from its folder.

        Returns the seconds spent. Raises `UnknownService`, `DeviceError` for cells that are not there or not as many
        as the service takes, `OverBudget`, `WrongState` for a service resident on other cells, `EngineBusy` when calls
        on a victim do not end, `EngineFailed`, also for a victim whose memory is measured not to be free after it was stopped.
        """
        began = time.monotonic()
        entry, victims = self._entry(service), [self._entry(name) for name in evict]
        wanted = self._checked_cells(entry, cells)
        for victim in victims:
            with victim.lock:
                self._evict(victim)
        with entry.lock:
            self._bring(entry, wanted)
        return time.monotonic() - began

    def run(self, service: str, call: Callable[[Engine], T]) -> T:
        """Call the engine of a service, e.g. `run("rm", lambda engine: engine.score(items))`.

        Raises `UnknownService`, `NotResident` and whatever the engine's method raises.
        """
        return call(self._entry(service).engine)

    def status(self) -> list[ServiceStatus]:
        """Return every service as it is now, in the order of the services file; waits for nothing."""
        return [_status(entry) for entry in self._entries.values()]

    def held_mb(self, cell: int) -> float:
        """Return the MiB booked on a cell. Raises `DeviceError` for one that is not there."""
        if not 0 <= cell < len(self._devices):
            raise DeviceError(f"cells: there is no cell {cell}, this node has {len(self._devices)}")
        with self._bookings:
            return sum(entry.config.memory_mb for entry in self._entries.values() if cell in entry.cells)

    def close(self) -> None:
        """Stop every service; goes on after one that fails, then raises the first error."""
        problems = []
        for entry in self._entries.values():
            with entry.lock:
                try:
                    entry.engine.stop(self._drain_s)
                    self._unbook(entry)
                except GpuError as error:
                    problems.append(error)
        if problems:
            raise problems[0]

    def _entry(self, service: str) -> _Entry:
        try:
            return self._entries[service]
        except KeyError:
            raise UnknownService(f"no service {service!r} here; there are {', '.join(self._entries) or 'none'}") from None

    def _checked_cells(self, entry: _Entry, cells: Iterable[int]) -> tuple[int, ...]:
        wanted = tuple(sorted(cells))
        if len(set(wanted)) != len(wanted):
            raise DeviceError(f"cells: {wanted} names a cell twice")
        if strangers := [cell for cell in wanted if not 0 <= cell < len(self._devices)]:
            raise DeviceError(f"cells: there is no cell {strangers[0]}, this node has {len(self._devices)}")
        if len(wanted) not in entry.config.cells:
            raise DeviceError(f"cells: {entry.name} takes {' or '.join(map(str, entry.config.cells))} cells, not {len(wanted)}")
        return wanted

    def _evict(self, entry: _Entry) -> None:
        """Take a resident service off its cells and see that the memory is free. The caller holds the entry's lock."""
        if entry.engine.state != "resident":
            return
        try:
            entry.engine.evict(self._drain_s)
            entry.evictions += 1
        except EngineFailed as error:
            # It is failed and will be loaded from its folder again; whoever wants its cells need not suffer for it.
            log.warning("%s", error)
        if entry.engine.memory_mb() > 0.0:
            entry.leaks += 1
            log.warning("%s: the eviction did not free its memory, stopping the engine", entry.name)
            entry.engine.stop(self._drain_s)
        entry.leaking = entry.engine.memory_mb() > 0.0
        if entry.leaking:
            raise EngineFailed(f"{entry.name}: {_leak(entry)}")
        self._unbook(entry)

    def _bring(self, entry: _Entry, cells: tuple[int, ...]) -> None:
        """Have a service on the cells. The caller holds the entry's lock."""
        engine = entry.engine
        state = engine.state
        if state == "resident":
            if entry.cells != cells:
                raise WrongState(f"{entry.name} is resident on cells {entry.cells}, asked for on {cells}: evict it first")
            return
        if entry.leaking and engine.memory_mb() > 0.0:
            raise EngineFailed(f"{entry.name}: {_leak(entry)}")
        self._book(entry, cells)
        devices = [self._devices[cell] for cell in cells]
        try:
            if state == "host":
                engine.restore(devices)
                entry.restores += 1
            else:
                engine.start(devices, entry.config.memory_mb)
                entry.starts += 1
        except BaseException:
            entry.leaking = engine.memory_mb() > 0.0
            if not entry.leaking:
                self._unbook(entry)
            raise

    def _book(self, entry: _Entry, cells: tuple[int, ...]) -> None:
        """Reserve the declared memory on all cells or on none. Raises `OverBudget`."""
        with self._bookings:
            for other in self._entries.values():
                if other.leaking and other.engine.memory_mb() == 0.0:
                    other.leaking, other.cells = False, ()
            for cell in cells:
                there = (other for other in self._entries.values() if cell in other.cells and other is not entry)
                others = {other.name: other.config.memory_mb for other in there}
                device = self._devices[cell]
                if sum(others.values()) + entry.config.memory_mb > device.memory_mb:
                    beside = ", ".join(f"{name} {held:g}" for name, held in others.items()) or "nothing"
                    needs = f"{entry.name} needs {entry.config.memory_mb:g} MiB on cell {cell}"
                    raise OverBudget(f"{needs}, which has {device.memory_mb} MiB and holds {beside}")
            entry.cells = cells

    def _unbook(self, entry: _Entry) -> None:
        with self._bookings:
            entry.cells = ()


def _leak(entry: _Entry) -> str:
    return f"{entry.engine.memory_mb():.1f} MiB are still taken after the engine was stopped; if they stay so, restart the worker"


def _status(entry: _Entry) -> ServiceStatus:
    engine = entry.engine
    return ServiceStatus(
        name=entry.name,
        state=engine.state,
        reason=engine.failure or (_leak(entry) if entry.leaking else ""),
        cells=entry.cells,
        memory_mb=engine.memory_mb(),
        running=engine.running,
        starts=entry.starts,
        restores=entry.restores,
        evictions=entry.evictions,
        leaks=entry.leaks,
    )
