"""Host memory is a budget, too: which copies of evicted models go, so that the others fit.

What goes is absent and comes back from its folder on disk. Of those that may go:

1. a copy that would not fit even if it were the only one goes at once, since all others would have to go for it in vain;
2. then the least recently used, pinned services last, until the rest fits.

Copies that resident instances keep count and stay: they are given back only with their instance. Room for a copy is booked before
a start or an eviction makes it. An instance whose own copy would have to go for that makes none: it is started without, or, on its
way out, stopped instead.
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
    """What one instance holds of the budget: `mb` MiB, last used at `used_at`; `stays` where it cannot be dropped now."""

    name: InstanceName
    mb: float
    used_at: float
    pinned: bool = False
    stays: bool = False


def to_drop(copies: Iterable[Copy], budget_mb: float) -> list[InstanceName]:
    """Return the copies to be dropped, in order, so that the others fit into `budget_mb` as far as that can be."""
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
    """The budget of a node's copies: `budget_mb` MiB. `stop` gives back all that an instance holds; its lock is held then."""

    def __init__(self, budget_mb: float, instances: Callable[[], Iterable[Instance]], stop: Callable[[Instance], None]) -> None:
        self.budget_mb = budget_mb
        self._instances = instances
        self._stop = stop
        self._lock = threading.Lock()

    def held_mb(self) -> float:
        """Return the MiB that copies take, as measured or, for those on their way there, as booked."""
        return sum(instance.claimed_host_mb for instance in self._instances())

    def book(self, instance: Instance) -> bool:
        """Make room for the copy that an instance is about to make; say whether it may make one. The caller holds its lock."""
        with self._lock:
            instance.copy_mb = instance.host_mb or instance.declared_host_mb
            kept = self._fit(instance)
            if not kept:
                instance.copy_mb = 0.0
        if not kept:
            log.warning("host memory: %s keeps no copy, %.0f of %g MiB are taken", instance.name, self.held_mb(), self.budget_mb)
        return kept

    def settle(self) -> None:
        """Drop what does not fit."""
        with self._lock:
            self._fit(None)

    def drop(self, instance: Instance, why: str) -> bool:
        """Give the copy of an instance back; False where that cannot be now, as it is being changed or its memory stays taken."""
        if not instance.lock.acquire(blocking=False):
            return False
        try:
            if instance.state == "host":
                instance.note, copy_mb = f"its copy was dropped, {why}", instance.host_mb
                self._stop(instance)
                log.warning("host memory: dropped the copy of %s, %.0f MiB: %s", instance.name, copy_mb, why)
            return True
        except GpuError as error:
            # Whoever needs the room is not to suffer for it.
            log.warning("host memory: %s cannot be stopped: %s", instance.name, error)
            return instance.host_mb == 0.0
        finally:
            instance.lock.release()

    def _fit(self, booking: Instance | None) -> bool:
        """Drop what does not fit; False where that is the copy of who is booking. The caller holds the lock of the budget.

        A copy that is being restored is on its way out, but takes its memory until it is: others go for it.
        """
        changing = set[InstanceName]()
        while True:
            names = to_drop(self._copies(booking, changing), self.budget_mb)
            if booking is not None and booking.name in names:
                return False
            if not names:
                return True
            there = {one.name: one for one in self._instances()}
            why = f"the budget of host memory is {self.budget_mb:g} MiB"
            changing.update(name for name in names if not self.drop(there[name], why))

    def _copies(self, booking: Instance | None, changing: Container[InstanceName]) -> list[Copy]:
        return [
            Copy(
                name=one.name,
                mb=one.claimed_host_mb,
                used_at=one.used_at,
                pinned=one.config.pinned,
                stays=one is not booking and (one.state != "host" or one.name in changing),
            )
            for one in self._instances()
        ]
