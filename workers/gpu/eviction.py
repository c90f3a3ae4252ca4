"""How an instance leaves its cells: evicted to host memory, or stopped.

| an instance leaves | because | and ends |
|---|---|---|
| by `evict` | its cells are wanted | `host`, or `absent` if its copy has no room |
| by `stop` | it is started with another declaration, or its worker ends | `absent` |
| by `stop` | its copy is dropped from host memory (`host_memory.py`) | `absent` |
| by `retire` | its service is declared otherwise or no longer, and nobody calls it | `absent`, without an engine |
| by `evict_sleepers` | its sleeping server keeps a part of cells on which another does not fit | `absent` |
| by itself | its process ended | `failed`; `note_end` ends its reservation |

In each case the reservation ends when the memory of the cells is measured to be free. If an engine keeps the memory, its instance
keeps engine and reservation and says so until the memory is free. The caller holds the instance's lock, except for `evict_sleepers`.
"""

from __future__ import annotations

import logging
from typing import Protocol

from app.services_file import ServiceConfig
from scheduler.model.lifecycle import ServiceState
from workers.gpu.engines.abstract import Engine
from workers.gpu.errors import EngineBusy, EngineFailed, GpuError, WrongState
from workers.gpu.host_memory import HostMemory
from workers.gpu.instances import Instance
from workers.gpu.reservations import Reservations

log = logging.getLogger(__name__)


class Publish(Protocol):
    """Reports a change of an instance, once; with `state`, a state that it is on its way to."""

    def __call__(self, instance: Instance, state: ServiceState | None = None) -> None:
        """Report. The caller holds the instance's lock."""


class Eviction:
    """Takes instances off their cells, to host memory as far as `copies` has room. Safe for many threads."""

    def __init__(self, reservations: Reservations, copies: HostMemory, drain_s: float, publish: Publish) -> None:
        """`drain_s` is how many seconds running calls have to end; `publish` is called with every change."""
        self._reservations, self._copies, self._drain_s, self._publish = reservations, copies, drain_s, publish

    def evict(self, instance: Instance) -> None:
        """Take a resident instance off its cells and check that the memory is free."""
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
        self._reservations.watch(instance)
        kept = self._copies.reserve(instance)
        if not kept:
            instance.note = f"its copy does not fit into the {self._copies.budget_mb:g} MiB of host memory"
        self._publish(instance, "evicting")
        try:
            if kept:
                engine.evict(self._drain_s)
            else:
                engine.stop(self._drain_s)
            instance.evictions += 1
        except EngineBusy:
            self._publish(instance)
            raise
        except (EngineFailed, WrongState) as error:
            # It is failed and will be loaded from its folder. Its cells are free for the next instance all the same.
            log.warning("%s", error)
        finally:
            instance.copy_mb = 0.0
        if not self._reservations.left(instance):
            instance.leaks += 1
            instance.note = "its eviction did not free the memory of its cells"
            log.warning("%s: the eviction did not free its memory, stopping the engine", instance.name)
            self._end(instance, engine)
        self._give_up(instance)
        self._publish(instance)

    def stop(self, instance: Instance) -> None:
        """Give back all that an instance holds."""
        if instance.engine is None:
            return
        if not instance.leaking:
            self._reservations.watch(instance)
        self._end(instance, instance.engine)
        self._give_up(instance)
        self._publish(instance)

    def must_have_left(self, instance: Instance) -> None:
        """Check that the memory of a leaking instance is free by now. Raises `EngineFailed` if it is not."""
        if instance.leaking:
            self._give_up(instance)

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
        """End the reservation of an instance that failed by itself, or whose memory has become free."""
        if instance.reserved_mb and instance.state in ("failed", "absent") and self._reservations.has_left(instance):
            self._reservations.release(instance)

    def evict_sleepers(self, instance: Instance) -> None:
        """Stop the sleepers that keep memory that an instance needs."""
        for sleeper in self._reservations.sleepers_in_the_way(instance):
            self._copies.drop(sleeper, f"{instance.name} does not fit beside what it keeps of its cells")

    def _end(self, instance: Instance, engine: Engine) -> None:
        """Stop an engine. An error counts only if the engine still holds memory, which is measured afterwards."""
        try:
            engine.stop(self._drain_s)
        except EngineFailed as error:
            log.warning("%s: %s", instance.name, error)

    def _give_up(self, instance: Instance) -> None:
        """End the reservation if the memory is measured to be free; otherwise mark the instance as leaking."""
        if self._reservations.left(instance):
            asleep = instance.engine is not None and instance.state == "host"
            self._reservations.release(instance, instance.engine.residual_mb() if asleep and instance.engine else 0.0)
            return
        instance.leaking = True
        self._publish(instance)
        raise EngineFailed(f"{instance.name}: {instance.leak()}")
