"""How an instance leaves its cells: evicted to host memory, or stopped; and what is seen to before its reserving is given up.

| an instance goes | because | and ends |
|---|---|---|
| by `evict` | its cells are wanted | `host`, or `absent` where its copy has no room |
| by `stop` | it is to be started otherwise, or its worker ends | `absent` |
| by `retire` | its service is declared otherwise or no longer, and nobody calls it | `absent`, its engine is gone |
| by itself | its process ended | `failed`; `note_end` gives its reserving up |
| by `stop` | its copy has to go from host memory (`host_memory.py`) | `absent` |
| by `evict_sleepers` | it keeps a part of cells, as a sleeping server does, and another does not fit | `absent` |

Whichever way it goes, its reserving is given up only when the memory of its cells is measured to be free.
An engine that keeps it is not forgotten: its instance keeps engine and reserving, and says so, until it is gone.
The caller of all but `evict_sleepers` holds the instance's lock.
"""

from __future__ import annotations

import logging
from typing import Protocol

from app.services_file import ServiceConfig
from scheduler.lifecycle import ServiceState
from workers.gpu.engines.abstract import Engine
from workers.gpu.errors import EngineBusy, EngineFailed, GpuError, WrongState
from workers.gpu.host_memory import HostMemory
from workers.gpu.instances import Instance
from workers.gpu.reservations import Reservations

log = logging.getLogger(__name__)


class Publish(Protocol):
    """Tells of a change of an instance, once; with `state`, of one that it is on its way to."""

    def __call__(self, instance: Instance, state: ServiceState | None = None) -> None:
        """Publish. The caller holds the instance's lock."""


class Eviction:
    """Takes instances off the cells that `reservations` keeps, to host memory as far as `copies` has room. Safe for many threads."""

    def __init__(self, reservations: Reservations, copies: HostMemory, drain_s: float, publish: Publish) -> None:
        """`drain_s` is how many seconds running calls have to end; `tell` hears of every change."""
        self._reservations, self._copies, self._drain_s, self._publish = reservations, copies, drain_s, publish

    def evict(self, instance: Instance) -> None:
        """Take a resident instance off its cells and see that the memory is free."""
        engine = instance.engine
        if engine is None or instance.state != "resident":
            self.note_end(instance)
            return
        if not instance.wait_idle(self._drain_s):
            raise EngineBusy(f"{instance.name}: calls were still running after {self._drain_s:g} s")
        if instance.state != "resident":
            # Its process ended while it was waited for, which ends its calls, too.
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
            # It is failed and will be loaded from its folder again; whoever wants its cells need not suffer for it.
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
        """See that what an instance has kept is free by now. Raises `EngineFailed` where it is not."""
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
        """Give up the reserving of an instance that failed by itself, or whose memory has become free at last."""
        if instance.reserved_mb and instance.state in ("failed", "absent") and self._reservations.has_left(instance):
            self._reservations.release(instance)

    def evict_sleepers(self, instance: Instance) -> None:
        """Stop what is in host memory and keeps a part of the cells that an instance needs to fit."""
        for sleeper in self._reservations.sleepers_in_the_way(instance):
            self._copies.drop(sleeper, f"{instance.name} does not fit beside what it keeps of its cells")

    def _end(self, instance: Instance, engine: Engine) -> None:
        """Stop an engine; how it fails at that matters to nobody if it holds nothing afterwards."""
        try:
            engine.stop(self._drain_s)
        except EngineFailed as error:
            log.warning("%s: %s", instance.name, error)

    def _give_up(self, instance: Instance) -> None:
        """Give the reserving up if the memory is measured to be free; else it stays, and the engine with it, until it is."""
        if self._reservations.left(instance):
            asleep = instance.engine is not None and instance.state == "host"
            self._reservations.release(instance, instance.engine.residual_mb() if asleep and instance.engine else 0.0)
            return
        instance.leaking = True
        self._publish(instance)
        raise EngineFailed(f"{instance.name}: {instance.leak()}")
