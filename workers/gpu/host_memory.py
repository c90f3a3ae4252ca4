"""The budget of host memory: which copies of evicted models are dropped so that the others fit.

An instance whose copy is dropped is absent and is loaded from its folder the next time. Copies are dropped in this order:

1. a copy that would not fit even alone, since all others would have to go for it in vain;
2. the least recently used copy, those of pinned services last, until the rest fits.

Copies of resident instances count and stay until the instance goes. Room for a copy is reserved before a start or an eviction
makes it. If an instance's own copy would have to go for that, it makes none: it starts without a copy, leaves its cells without one if its
engine can, or is stopped instead of evicted.

To drop a copy is to stop its engine, which can take half a minute. No lock of the budget is held meanwhile. A copy that is being
dropped keeps its memory until its engine has stopped. Only an instance that reserves this memory waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from workers.gpu.errors import GpuError
from workers.gpu.instances import Instance, InstanceName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """What an instance holds of the budget: `mb` MiB, last used at `used_at`; one that `stays` cannot be dropped."""

    name: InstanceName
    mb: float
    used_at: float
    pinned: bool = False
    stays: bool = False


def to_drop(copies: Iterable[Copy], budget_mb: float) -> list[InstanceName]:
    """Return the copies to drop, in order, so that the others fit into `budget_mb` as far as possible."""
    held = list(copies)
    total = sum(copy.mb for copy in held)
    most = budget_mb - sum(copy.mb for copy in held if copy.stays)
    dropped = []
    for copy in sorted((one for one in held if not one.stays and one.mb > 0), key=lambda one: (one.mb <= most, one.pinned, one.used_at)):
        if total <= budget_mb:
            break
        dropped.append(copy.name)
        total -= copy.mb
    return dropped


class HostMemory:
    """The budget of a node's copies: `budget_mb` MiB. Safe for many threads.

    `stop` gives back all that an instance holds; the instance's lock is held then.
    """

    def __init__(self, budget_mb: float, instances: Callable[[], Iterable[Instance]], stop: Callable[[Instance], None]) -> None:
        self.budget_mb = budget_mb
        self._instances = instances
        self._stop = stop
        self._changed = threading.Condition()
        self._dropping: set[InstanceName] = set()

    def held_mb(self) -> float:
        """Return the MiB that copies take: as measured or, for a copy that is being made, as reserved."""
        return sum(instance.charged_host_mb for instance in self._instances())

    def reserve(self, instance: Instance) -> bool:
        """Make room for the copy that an instance is about to make; say whether it may. The caller holds its lock."""
        with self._changed:
            instance.copy_mb = instance.host_mb or instance.declared_host_mb
        if self._fit(instance):
            return True
        log.warning("host memory: %s keeps no copy, %.0f of %g MiB are taken", instance.name, self.held_mb(), self.budget_mb)
        return False

    def settle(self) -> None:
        """Drop what does not fit."""
        self._fit(None)

    def drop(self, instance: Instance, why: str) -> bool:
        """Drop the copy of an instance; False if that is not possible: it is being changed, or its memory stays taken."""
        if not instance.lock.acquire(blocking=False):
            return False
        try:
            if instance.state == "host":
                instance.note, copy_mb = f"its copy was dropped, {why}", instance.host_mb
                self._stop(instance)
                log.warning("host memory: dropped the copy of %s, %.0f MiB: %s", instance.name, copy_mb, why)
            return True
        except GpuError as error:
            # The instance that needs the room must not fail for this.
            log.warning("host memory: %s cannot be stopped: %s", instance.name, error)
            return instance.host_mb == 0.0
        finally:
            instance.lock.release()

    def _fit(self, reserving: Instance | None) -> bool:
        """Drop what does not fit; False if that is the copy of `reserving`, whose reservation then ends.

        If a copy cannot be dropped, since its instance is being changed, another one is dropped in its place.
        """
        stuck = set[InstanceName]()
        while (name := self._next_to_drop(reserving, stuck)) is not None:
            there = {one.name: one for one in self._instances()}
            try:
                if not self.drop(there[name], f"the budget of host memory is {self.budget_mb:g} MiB"):
                    stuck.add(name)
            finally:
                with self._changed:
                    self._dropping.discard(name)
                    self._changed.notify_all()
        return reserving is None or reserving.copy_mb > 0.0

    def _next_to_drop(self, reserving: Instance | None, stuck: Container[InstanceName]) -> InstanceName | None:
        """Return a copy that the caller has to drop; None if there is none.

        The caller waits here for copies that other threads are dropping, but only if it has reserved their memory.
        """
        with self._changed:
            while True:
                names = to_drop(self._copies(reserving, stuck), self.budget_mb)
                if reserving is not None and reserving.name in names:
                    reserving.copy_mb = 0.0
                    return None
                if names:
                    self._dropping.add(names[0])
                    return names[0]
                if reserving is None or not self._dropping or self.held_mb() <= self.budget_mb:
                    return None
                self._changed.wait()

    def _copies(self, reserving: Instance | None, stuck: Container[InstanceName]) -> list[Copy]:
        return [
            Copy(
                name=one.name,
                mb=one.charged_host_mb,
                used_at=one.used_at,
                pinned=one.config.pinned,
                stays=one is not reserving and (one.state != "host" or one.name in stuck),
            )
            for one in self._instances()
            if one.name not in self._dropping
        ]
