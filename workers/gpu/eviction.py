"""How an instance leaves its cells, evicted to host memory or stopped, and how others make room for it.

| an instance leaves | because | and ends |
|---|---|---|
| by `evict` | its cells are wanted | `host`; or `absent` if its copy has no room, or its memory was not freed |
| by `stop` | it is started with another declaration, or its worker ends | `absent` |
| by `stop` | its copy is dropped from host memory (`host_memory.py`) | `absent` |
| by `retire` | its service is declared otherwise or no longer, and nobody calls it | `absent`, without an engine |
| by `evict_sleepers`, `entering` | its sleeping server keeps a part of cells on which another does not fit | `absent` |
| by itself | its process ended | `failed`; `note_end` ends its booking |

Afterwards an instance is booked with what it is measured to hold. If an engine that was stopped keeps memory, its instance keeps the
engine and says so until the memory is free. The caller holds the instance's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from app.services_file import ServiceConfig
from scheduler.model.lifecycle import ServiceState
from workers.gpu.engines.abstract import Engine
from workers.gpu.errors import EngineBusy, EngineFailed, GpuError, OverBudget, WrongState
from workers.gpu.host_memory import HostMemory
from workers.gpu.instances import Instance
from workers.gpu.reservations import Reservations

log = logging.getLogger(__name__)

_POLL_S = 0.1


class Publish(Protocol):
    """Reports a change of an instance, once; with `state`, a state that it is on its way to."""

    def __call__(self, instance: Instance, state: ServiceState | None = None) -> None:
        """Report. The caller holds the instance's lock."""


class Eviction:
    """Takes instances off their cells, to host memory as far as `copies` has room. Safe for many threads."""

    def __init__(self, reservations: Reservations, copies: HostMemory, publish: Publish, *, drain_s: float, settle_s: float) -> None:
        """Take instances off their cells.

        `publish` is called with every change. `drain_s` is how many seconds running calls have to end, `settle_s` how many a device has
        to report the memory of a process as free that has ended, or of another program.
        """
        self._reservations, self._copies, self._publish = reservations, copies, publish
        self._drain_s, self._settle_s = drain_s, settle_s

    def evict(self, instance: Instance) -> None:
        """Take a resident instance off its cells, to host memory if there is room, and check what it keeps."""
        engine = instance.engine
        if engine is None or instance.state != "resident":
            self.note_end(instance)
            return
        if not instance.wait_idle(self._drain_s):
            raise EngineBusy(f"{instance.name}: calls were still running after {self._drain_s:g} s")
        if instance.state != "resident":
            # Its process ended meanwhile, and its calls with it.
            self.note_end(instance)
            self._publish(instance)
            return
        copied = self._copies.reserve(instance)
        if not copied:
            instance.note = f"its copy does not fit into the {self._copies.budget_mb:g} MiB of host memory"
        try:
            with self._reservations.cells_locked(instance):
                self._publish(instance, "evicting")
                self._leave(instance, engine, copied)
        except (EngineFailed, WrongState) as error:
            # It is failed and will be loaded from its folder. Its cells are free for the next instance all the same.
            log.warning("%s", error)
        finally:
            instance.copy_mb = 0.0
            self._settled(instance)

    def stop(self, instance: Instance) -> None:
        """Give back all that an instance holds."""
        if instance.engine is None:
            return
        until = time.monotonic() + self._drain_s
        instance.wait_idle(self._drain_s)
        with self._reservations.cells_locked(instance):
            self._end(instance, instance.engine, max(0.0, until - time.monotonic()))
        self._settled(instance)

    def must_have_left(self, instance: Instance) -> None:
        """Check that the memory of a leaking instance is free by now. Raises `EngineFailed` if it is not."""
        if instance.leaking:
            self._settled(instance)

    @contextmanager
    def entering(self, instance: Instance) -> Iterator[None]:
        """Lock the cells of an instance, once their devices have the memory that it is booked with.

        If that is not free for `settle_s` seconds, a sleeper that keeps memory of these cells is stopped, and then the next. Raises
        `OverBudget` with figures if that is not enough.
        """
        until = time.monotonic() + self._settle_s
        while True:
            with self._reservations.cells_locked(instance):
                lack = self._reservations.lack(instance)
                if lack is None:
                    yield
                    return
                self._reservations.give_back(instance)
            if time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            why = f"{instance.name} needs what it keeps of its cells"
            if not any(self._copies.drop(sleeper, why) for sleeper in self._reservations.sleepers_on(instance)):
                raise OverBudget(lack)
            until = time.monotonic() + self._settle_s

    def retire(self, instance: Instance, declared: ServiceConfig | None) -> None:
        """Stop an idle instance whose service is no longer declared, or declared otherwise."""
        if declared == instance.config or instance.busy or instance.leaking or instance.engine is None:
            return
        instance.note = "its service is no longer declared" if declared is None else "its service is declared otherwise now"
        log.warning("%s is stopped: %s", instance.name, instance.note)
        try:
            self.stop(instance)
            instance.engine = None
        except GpuError as error:
            log.warning("%s cannot be stopped yet: %s", instance.name, error)

    def note_end(self, instance: Instance) -> None:
        """End the booking of an instance that failed by itself, or whose memory has become free."""
        if instance.booked_mb and instance.state in ("failed", "absent"):
            self._reservations.settle(instance)

    def evict_sleepers(self, instance: Instance) -> None:
        """Stop the sleepers beside which an instance does not fit."""
        for sleeper in self._reservations.sleepers_in_the_way(instance):
            self._copies.drop(sleeper, f"{instance.name} does not fit beside what it keeps of its cells")

    def _leave(self, instance: Instance, engine: Engine, copied: bool) -> None:
        """Evict an engine, or stop it if it cannot be evicted or does not free its cells."""
        before_mb = instance.held_mb
        if copied:
            engine.evict(self._drain_s)
        elif engine.leaves_without_copy():
            engine.evict(self._drain_s, copy=False)
        else:
            engine.stop(self._drain_s)
        instance.evictions += 1
        if problem := self._reservations.kept_too_much(instance, before_mb):
            instance.leaks += 1
            instance.note = problem
            log.warning("%s is stopped: %s", instance.name, problem)
            self._end(instance, engine, self._drain_s)

    def _end(self, instance: Instance, engine: Engine, drain_s: float) -> None:
        """Stop an engine. An error counts only if the engine still holds memory, which is measured afterwards."""
        try:
            engine.stop(drain_s)
        except EngineFailed as error:
            log.warning("%s: %s", instance.name, error)

    def _settled(self, instance: Instance) -> None:
        """Book what an instance holds now and report it. Raises `EngineFailed` if that is memory that should be free."""
        self._reservations.settle(instance)
        self._publish(instance)
        if instance.leaking:
            raise EngineFailed(f"{instance.name}: {instance.leak()}")
