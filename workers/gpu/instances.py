"""An instance of a service: an engine, or none, under the name of its service and its cells.

The name stays when the engine goes. If a copy in host memory is wanted on other cells, its engine moves to the instance of those cells
and leaves an absent instance behind. So no two instances share a name, and the counters of a name only grow.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from app.services_file import ServiceConfig
from scheduler.model import InstanceFacts
from scheduler.model.copied import filled, shared
from scheduler.model.lifecycle import ServiceState
from tangram.wire import WireEvicted, WireInstance
from workers.gpu.engines.abstract import Engine


class InstanceName(NamedTuple):
    """Which instance is meant; `cells` ascend."""

    service: str
    cells: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.service} on {'cell' if len(self.cells) == 1 else 'cells'} {', '.join(map(str, self.cells))}"

    @classmethod
    def of_wire(cls, said: WireEvicted) -> InstanceName:
        """Read one as it stands in a grant: `{"service", "cell_ids"}`."""
        return cls(said["service"], tuple(sorted(said["cell_ids"])))


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus(InstanceFacts):
    """One instance as it is now. Its wrong answers are those of `engines/canary.py`."""

    name: InstanceName
    state: ServiceState = "absent"
    reserved: bool = False
    """Whether it is booked as one that is on its cells."""
    running: int = 0
    """Calls in it."""

    def to_wire(self) -> WireInstance:
        """Return it as it stands in reports and beats."""
        rounded = {"memory_mb": round(self.memory_mb, 1), "host_mb": round(self.host_mb, 1)}
        named = {"service": self.name.service, "cell_ids": list(self.name.cells), "state": self.state}
        return cast(WireInstance, {**named, **shared(InstanceFacts, self), **rounded})


@dataclass(slots=True, eq=False)
class Instance:
    """What the host keeps of an instance. Whoever changes its state holds `lock`."""

    name: InstanceName
    config: ServiceConfig
    engine: Engine | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: threading.Condition = field(default_factory=threading.Condition)
    users: int = 0
    """Callers to whom it was promised that it stays resident."""
    used_at: float = field(default_factory=time.monotonic)
    reserved: bool = False
    """Whether it is booked as one that is on its cells, or about to come; otherwise only with what it keeps of them."""
    booked_mb: float = 0.0
    """MiB of each of its cells that nobody else gets."""
    leaking: bool = False
    """Whether its memory was not free after its engine was stopped."""
    grown: int = 0
    """Evictions in a row after which it kept more than in its first ones."""
    reload_deadline: float | None = None
    """When waiting for its calls to end, before it is restarted as its service is declared, is given up."""
    copy_mb: float = 0.0
    """MiB of host memory that are reserved for a copy that is being made."""
    note: str = ""
    starts: int = 0
    restores: int = 0
    evictions: int = 0
    leaks: int = 0
    wrong_answers: int = 0
    published: tuple[ServiceState, str] = ("absent", "")
    """State and reason that were reported last."""

    @property
    def state(self) -> ServiceState:
        """The state of its engine; absent without one."""
        return self.engine.state if self.engine is not None else "absent"

    @property
    def memory_mb(self) -> float:
        """The MiB of device memory that it holds, as measured by its engine."""
        return self.engine.memory_mb() if self.engine is not None else 0.0

    @property
    def host_mb(self) -> float:
        """The MiB of host memory that its copy holds, as measured by its engine."""
        return self.engine.host_mb() if self.engine is not None else 0.0

    @property
    def held_mb(self) -> float:
        """The MiB that it holds of the cell of which it holds most, as measured by its engine."""
        return max(self.engine.held_mb(), default=0.0) if self.engine is not None else 0.0

    @property
    def charged_host_mb(self) -> float:
        """The MiB that it takes of the budget of host memory: measured, or reserved for a copy that is being made."""
        return max(self.host_mb, self.copy_mb)

    @property
    def busy(self) -> bool:
        """Whether somebody calls it or is about to."""
        return self.users > 0 or (self.engine is not None and self.engine.running > 0)

    @property
    def declared_host_mb(self) -> float:
        """The MiB of host memory that its copy takes by declaration."""
        declared = self.config.host_memory_mb
        return declared if declared is not None else self.config.memory_mb * self.config.cells[0]

    def use(self) -> None:
        """Count a caller. The caller of this method holds `lock`, so that no change is under way."""
        with self.idle:
            self.users += 1
            self.used_at = time.monotonic()

    def release(self) -> None:
        """Count a caller less."""
        with self.idle:
            self.users -= 1
            self.used_at = time.monotonic()
            self.idle.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until there are no callers; False if the time was not enough."""
        with self.idle:
            return self.idle.wait_for(lambda: self.users == 0, timeout_s)

    def leak(self) -> str:
        """Say that its memory is still taken."""
        return f"{self.memory_mb:.1f} MiB are still taken after the engine was stopped; if they stay so, restart the worker"

    def status(self) -> InstanceStatus:
        """Return it as it is now; waits for nothing."""
        engine = self.engine
        reason = (engine.failure if engine is not None else "") or (self.leak() if self.leaking else self.note)
        return filled(InstanceStatus, self, reason=reason, running=engine.running if engine is not None else 0)
