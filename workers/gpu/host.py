"""The services of one node: carries out the scheduler's decisions, and refuses those that cannot be carried out.

The scheduler chooses cells and evictions. The host itself chooses which copies are dropped from host memory, and evicts what a decision
could not know of: an instance that is in the way, or a sleeper whose residue takes the room. A service has one
instance for each set of cells, with an engine that is made when it is first needed. `scheduler/model/lifecycle.py` has the states of an
instance; every change is reported to the listener. `eviction.py` says how an instance leaves its cells.

An instance comes onto its cells in the first of these ways that is possible: it is resident already; its own copy in host memory is
restored; the copy of an instance of the same service on other cells is restored; its engine, or a fresh one, loads the model from its
folder. A restore that brings back spoilt weights (`engines/canary.py`) is followed by a start from the folder.

One lock for each instance serialises its changes, and one for each cell those of all instances there; instances on different cells move at
the same time. The locks of the books are held for moments only. Whoever holds the lock of one instance never waits for that of
another, and whoever holds the locks of cells waits for no instance, so there are no deadlocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from app.services_file import ServiceConfig
from scheduler.model.lifecycle import ServiceState
from workers.gpu.device_memory import DeviceMemory, device_memory
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.factory import create_engine
from workers.gpu.errors import DeviceError, EngineFailed, GpuError, NotResident, UnknownService, WrongAnswer, WrongState
from workers.gpu.eviction import Eviction
from workers.gpu.host_memory import HostMemory
from workers.gpu.instances import Instance, InstanceName, InstanceStatus
from workers.gpu.reservations import Reservations

T = TypeVar("T")
EngineFactory = Callable[[str, ServiceConfig, Path, DeviceMemory], Engine]
Listener = Callable[[InstanceStatus], None]

log = logging.getLogger(__name__)


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
        host_memory_mb: float = float("inf"),
        memory: DeviceMemory | None = None,
        settle_s: float = 5.0,
        on_change: Listener = lambda status: None,
    ) -> None:
        """Make the host of these services, none of which has an instance.

        There is a device for each cell, in the order of the cell numbers. `state_dir` is the folder for host copies of models on CPU
        devices, `host_memory_mb` the budget of all copies in host memory. `factory` makes the engine of a service. An eviction waits for
        running calls for `drain_s`, a reservation for `settle_s` until its devices have as much free memory. `memory` measures the devices,
        by default what measures devices of their kind. `on_change` is called with every change of an instance, in order. Raises
        `ConfigError` when an engine of a service cannot be made.
        """
        self._devices = tuple(devices)
        self._state_dir, self._factory, self._drain_s = state_dir, factory, drain_s
        self._memory = memory or device_memory(devices)
        self._on_change = on_change
        self._services = dict(services)
        self._spare = {name: self._made(name, config) for name, config in services.items()}
        self._instances: dict[InstanceName, Instance] = {}
        self._names = threading.Lock()
        self._reservations = Reservations(devices, self._all, self._memory)
        self._copies = HostMemory(host_memory_mb, self._all, lambda instance: self._eviction.stop(instance))
        self._eviction = Eviction(self._reservations, self._copies, self._publish, drain_s=drain_s, settle_s=settle_s)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, one per cell."""
        return self._devices

    @property
    def services(self) -> Mapping[str, ServiceConfig]:
        """The declared services, by name."""
        return dict(self._services)

    def listen(self, on_change: Listener) -> None:
        """Report every change from now on to `on_change`."""
        self._on_change = on_change

    def ensure_resident(self, service: str, cells: Iterable[int], evict: Iterable[InstanceName] = ()) -> float:
        """Evict the named instances in order, then bring `service` onto exactly these cells; return the seconds spent.

        A decision that is carried out twice does no harm: instances to evict that are unknown or not resident are passed over, and
        a resident instance stays as it is. A failed instance is started from its folder. Raises `UnknownService` when no such service is
        declared; `DeviceError` when there are no such cells, or the service does not take as many; `OverBudget` when it does not fit beside
        the other instances; `EngineBusy` when the calls of an instance to evict do not end; `EngineFailed` when the engine fails, or the
        memory of an evicted instance does not become free.
        """
        began = time.monotonic()
        with self._brought(service, cells, evict):
            return time.monotonic() - began

    def evict(self, name: InstanceName) -> None:
        """Take an instance off its cells, if it is there. Raises `EngineBusy` and `EngineFailed` as `ensure_resident` does."""
        self._make_room(name, [name])

    @contextmanager
    def serving(self, service: str, cells: Iterable[int], evict: Iterable[InstanceName] = ()) -> Iterator[Engine]:
        """Do as `ensure_resident`, and give the engine to the block; it stays resident until the block ends."""
        with self._brought(service, cells, evict) as instance:
            instance.use()
            engine = instance.engine
        try:
            if engine is None:
                raise NotResident(f"{instance.name} is absent, not resident")
            yield engine
        finally:
            instance.release()

    def run(self, service: str, cells: Iterable[int], call: Callable[[Engine], T]) -> T:
        """Call the engine of an instance as it is, e.g. `run("rm", (0,), lambda engine: engine.score(items))`.

        Raises `UnknownService`, `NotResident` and whatever the engine's method raises.
        """
        instance = self._instances.get(InstanceName(service, tuple(sorted(cells))))
        engine = instance.engine if instance is not None else None
        if instance is None or engine is None:
            self._config(service)
            raise NotResident(f"{InstanceName(service, tuple(cells))} is absent, not resident")
        instance.used_at = time.monotonic()
        return call(engine)

    def in_the_way(self, service: str, cells: Iterable[int], evict: Iterable[InstanceName] = ()) -> list[InstanceName]:
        """Return the instances to evict, besides `evict`, for `service` to fit on the cells; none if it fits, or never would.

        This is for a scheduler that was restarted and may not know yet what is resident. Pinned and busy instances stay. First go
        instances of the service itself beyond the number that a node may hold, then the least recently used on these cells.
        """
        name, config = InstanceName(service, tuple(sorted(cells))), self._services.get(service)
        if config is None:
            return []
        gone = [instance for other in evict if (instance := self._instances.get(other)) is not None]
        here = self._instances.get(name)
        if here is not None and here.state == "resident":
            return []
        needed_mb = self._reservations.needed_mb(name, config)
        idle = [one for one in self._all() if one.reserved and one not in gone and not one.busy and not one.config.pinned]
        idle.sort(key=lambda one: one.used_at)
        own = [one for one in self._all() if one.reserved and one.name.service == service and one not in gone]
        surplus = len(own) + 1 - config.instances if config.instances is not None else 0
        out = [one for one in idle if one.name.service == service][: max(0, surplus)]
        for candidate in (one for one in idle if set(one.name.cells) & set(name.cells) and one not in out):
            if self._reservations.room_for(needed_mb, name.cells, [*gone, *out]):
                break
            out.append(candidate)
        return [one.name for one in out] if self._reservations.room_for(needed_mb, name.cells, [*gone, *out]) else []

    def status(self) -> list[InstanceStatus]:
        """Return every instance that there ever was as it is now, in the order of names; waits for nothing."""
        return [instance.status() for instance in sorted(self._all(), key=lambda one: one.name)]

    def publish(self, name: InstanceName, reason: str = "") -> None:
        """Report an instance though it may not have changed; with `reason`, that it could not be made resident."""
        instance = self._instances.get(name)
        status = instance.status() if instance is not None else InstanceStatus(name=name)
        if reason and status.state != "resident":
            status = replace(status, state="failed", reason=reason)
        self._on_change(status)

    def needed_mb(self, service: str, config: ServiceConfig) -> float:
        """Return the MiB of each of its cells that a service takes: as declared or, if that is more, as measured."""
        return self._reservations.described_mb(service, config)

    def held_mb(self, cell: int) -> float:
        """Return the MiB booked on a cell. Raises `DeviceError` for one that is not there."""
        return self._reservations.booked_mb(cell)

    def host_mb(self) -> float:
        """Return the MiB of host memory that copies take: as measured or, for a copy that is being made, as declared."""
        return self._copies.held_mb()

    def check(self) -> None:
        """Report changes that engines have made by themselves, and stop idle instances that are no longer declared so."""
        for instance in self._all():
            unwanted = instance.engine is not None and self._services.get(instance.name.service) != instance.config
            unpublished = (instance.state, instance.status().reason) != instance.published
            # An instance that is being changed is reported by whoever changes it.
            if (unwanted or unpublished or instance.leaking) and instance.lock.acquire(blocking=False):
                try:
                    self._eviction.note_end(instance)
                    self._eviction.retire(instance, self._services.get(instance.name.service))
                    self._publish(instance)
                finally:
                    instance.lock.release()

    def reload(self, services: Mapping[str, ServiceConfig]) -> None:
        """Go on with other services: what is no longer declared, or otherwise, goes with the next `check` at which it is idle.

        Raises `ConfigError` for a service whose engine cannot be made; then nothing has changed.
        """
        changed = {name: config for name, config in services.items() if self._services.get(name) != config}
        spare = {name: self._made(name, config) for name, config in changed.items()}
        with self._names:
            kept = {name: engine for name, engine in self._spare.items() if name in services and name not in changed}
            self._services, self._spare = dict(services), {**kept, **spare}

    def close(self) -> None:
        """Stop every instance; goes on after one that fails, then raises the first error."""
        problems = []
        for instance in self._all():
            with instance.lock:
                try:
                    self._eviction.stop(instance)
                except GpuError as error:
                    problems.append(error)
        if problems:
            raise problems[0]

    @contextmanager
    def _brought(self, service: str, cells: Iterable[int], evict: Iterable[InstanceName]) -> Iterator[Instance]:
        """Carry a decision out, and report it if that fails; within the block the instance cannot change."""
        name = InstanceName(service, tuple(sorted(cells)))
        try:
            self._check(name)
            self._make_room(name, evict)
            instance = self._instance(name)
            instance.lock.acquire()
        except GpuError as error:
            self.publish(name, str(error))
            raise
        try:
            try:
                self._bring(instance)
            except GpuError as error:
                self.publish(name, str(error))
                raise
            yield instance
        finally:
            instance.lock.release()

    def _make_room(self, name: InstanceName, evict: Iterable[InstanceName]) -> None:
        """Evict the named instances; those that are not there are passed over."""
        # The copy that is about to be restored must not be dropped for that of an evicted instance.
        for copy in (one for one in self._all() if one.name.service == name.service and one.state == "host"):
            copy.used_at = time.monotonic()
        for instance in [found for other in evict if (found := self._instances.get(other)) is not None]:
            with instance.lock:
                self._eviction.evict(instance)
            self._copies.settle()

    def _all(self) -> list[Instance]:
        with self._names:
            return list(self._instances.values())

    def _config(self, service: str) -> ServiceConfig:
        try:
            return self._services[service]
        except KeyError:
            raise UnknownService(f"no service {service!r} here; there are {', '.join(self._services) or 'none'}") from None

    def _check(self, name: InstanceName) -> None:
        """Raise `DeviceError` for cells that do not fit the service; an instance that is resident fits in any case."""
        if len(set(name.cells)) != len(name.cells):
            raise DeviceError(f"cells: {name.cells} names a cell twice")
        if strangers := [cell for cell in name.cells if not 0 <= cell < len(self._devices)]:
            raise DeviceError(f"cells: there is no cell {strangers[0]}, this node has {len(self._devices)}")
        here = self._instances.get(name)
        if here is not None and here.state == "resident":
            return
        allowed = self._config(name.service).cells
        if len(name.cells) not in allowed:
            raise DeviceError(f"cells: {name.service} takes {' or '.join(map(str, allowed))} cells, not {len(name.cells)}")

    def _instance(self, name: InstanceName) -> Instance:
        with self._names:
            instance = self._instances.get(name)
            if instance is None:
                instance = self._instances[name] = Instance(name=name, config=self._config(name.service))
            return instance

    def _bring(self, instance: Instance) -> None:
        """Bring an instance onto its cells. The caller holds its lock."""
        if instance.state == "resident" and not self._must_reload(instance):
            return
        self._eviction.must_have_left(instance)
        config = self._config(instance.name.service)
        if instance.config != config:
            self._eviction.stop(instance)
            instance.engine, instance.config, instance.reload_deadline = None, config, None
            self._check(instance.name)
        self._eviction.evict_sleepers(instance)
        self._reservations.reserve(instance)
        try:
            self._load(instance)
            instance.note, instance.used_at = "", time.monotonic()
        finally:
            self._reservations.settle(instance)
            self._publish(instance)
        self._copies.settle()

    def _must_reload(self, instance: Instance) -> bool:
        """Say whether a resident instance is to be restarted: its service is declared otherwise, and its calls have ended.

        The first caller after the change sets a deadline for the running calls, and later callers wait with it. If calls still run at the
        deadline, all callers are served by the instance as it is.
        """
        if self._services.get(instance.name.service, instance.config) == instance.config:
            return False
        if instance.reload_deadline is None:
            instance.reload_deadline = time.monotonic() + self._drain_s
        return instance.wait_idle(instance.reload_deadline - time.monotonic())

    def _load(self, instance: Instance) -> None:
        """Bring the weights: from host memory if there is a copy of this service's that comes back as it was, else from the folder."""
        devices = [self._devices[cell] for cell in instance.name.cells]
        own = instance.engine if instance.state == "host" and instance.engine is not None and instance.engine.can_restore(devices) else None
        if (engine := own or self._take_copy(instance, devices)) is not None:
            try:
                with self._eviction.entering(instance):
                    self._publish(instance, "restoring")
                    engine.restore(devices)
            except (EngineFailed, WrongState) as error:
                # Its answers are wrong, or its process has ended since it was asked.
                log.warning("%s; it is started from its folder", error)
                instance.wrong_answers += isinstance(error, WrongAnswer)
            else:
                instance.restores += 1
                return
        if (engine := instance.engine) is None:
            with self._names:
                # After a reload it is made for another declaration than the one that is being carried out.
                as_declared = self._services.get(instance.name.service) == instance.config
                spare = self._spare.pop(instance.name.service, None) if as_declared else None
            engine = instance.engine = spare or self._made(instance.name.service, instance.config)
        try:
            if engine.copies_at_start(devices):
                instance.used_at = time.monotonic()
                engine.may_copy(instance.declared_host_mb if self._copies.reserve(instance) else 0.0)
            with self._eviction.entering(instance):
                if instance.state == "host":
                    engine.stop(self._drain_s)
                self._publish(instance, "starting")
                engine.start(devices, self._reservations.room_mb(instance))
        finally:
            instance.copy_mb = 0.0
        instance.starts += 1

    def _made(self, service: str, config: ServiceConfig) -> Engine:
        return self._factory(service, config, self._state_dir, self._memory)

    def _take_copy(self, instance: Instance, devices: Sequence[Device]) -> Engine | None:
        """Move the engine of another instance of the service here, if its copy can be restored to these devices."""
        others = [one for one in self._all() if one.name.service == instance.name.service and one is not instance]
        for other in sorted(others, key=lambda one: (len(one.name.cells) != len(instance.name.cells), -one.used_at)):
            if other.state != "host" or not other.lock.acquire(blocking=False):
                continue
            try:
                engine = other.engine
                if engine is None or other.state != "host" or other.config != instance.config or not engine.can_restore(devices):
                    continue
                instance.engine, other.engine = engine, None
                self._reservations.settle(other)
                other.note = f"its copy went to {instance.name}"
                self._publish(other)
                return engine
            finally:
                other.lock.release()
        return None

    def _publish(self, instance: Instance, state: ServiceState | None = None) -> None:
        """Report a change, once. The caller holds the instance's lock."""
        status = instance.status()
        if state is not None:
            status = replace(status, state=state, reason="")
        if (status.state, status.reason) != instance.published:
            instance.published = (status.state, status.reason)
            self._on_change(status)
