"""The memory of simulated environments, as a worker and the kernel keep it.

A recorded action says the most that its environment holds while it runs (`memory_mb`), and what the environment holds after it
(`resident_mb`). The simulated environment comes to the most at the start of the action, which is the hardest case. Without `memory_mb` an
action adds nothing, and without `resident_mb` the environment holds after it what it held before. An environment never passes its limit.

Where this comes within `CUSHION_MB` of an allowance below the limit, the environment asks for more, and all its actions stand still until
it has enough.

The simulation keeps its own sums of the allowances, which follow from grants alone. A grant beyond the memory of a node ends the
replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.model import NodeSpec
from scheduler.model.events import MemoryWanted
from scheduler.sim.progress import Live
from scheduler.sim.trace import Trajectory
from tangram.wire import CUSHION_MB, HEADROOM_MB


class BrokenAllowance(RuntimeError):
    """Raised when environments may use more memory than their node has."""


@dataclass(slots=True, eq=False)
class _Held:
    """The memory of one environment, in MB; `running` has its actions."""

    limit_mb: int
    node: str = ""
    allowance_mb: int = 0
    holding_mb: int = 0
    running: dict[str, Live] = field(default_factory=dict)
    halted: bool = False

    @property
    def used_mb(self) -> int:
        """The memory that its programs want to use now."""
        wanted_mb = (live.recorded.memory_mb or 0 for live in self.running.values())
        return min(self.limit_mb, max([self.holding_mb, *wanted_mb]))


def says_memory(trajectory: Trajectory) -> bool:
    """Say whether a trajectory has a limit of memory, and its actions say what they use."""
    return bool(trajectory.memory_mb) and any(action.memory_mb is not None for action in trajectory.actions())


class SimulatedMemory:
    """The environments that are granted memory.

    `halt` and `go_on` are called with an action and the time, `ask` with the time and what is wanted. `pauses` counts the actions that
    stood still for some time, each time that they did, `paused_s` has the seconds by action, and `asks` counts what was wanted.
    """

    def __init__(
        self, halt: Callable[[Live, float], None], go_on: Callable[[Live, float], None], ask: Callable[[float, MemoryWanted], None]
    ) -> None:
        self._halt, self._go_on, self._ask = halt, go_on, ask
        self._left_mb: dict[str, int] = {}
        self._held: dict[str, _Held] = {}
        self._halted_at: dict[str, float] = {}
        self.asks = 0
        self.pauses = 0
        self.paused_s: dict[str, float] = {}

    def join(self, spec: NodeSpec) -> None:
        """Take in a node, on which nothing is held."""
        self._left_mb[spec.name] = spec.memory_mb

    def open(self, environment: str, limit_mb: int) -> None:
        """Take in an environment that is to be opened."""
        self._held[environment] = _Held(limit_mb)

    def opened(self, environment: str, node: str, allowance_mb: int) -> int | None:
        """Note that an environment stands. Return what it holds, None where it has its limit."""
        held = self._held.get(environment)
        if held is None or not allowance_mb:
            self._held.pop(environment, None)
            return None
        held.node = node
        self._set(held, allowance_mb)
        self._set(held, min(allowance_mb, HEADROOM_MB))
        return 0

    def close(self, environment: str) -> None:
        """Forget an environment."""
        held = self._held.pop(environment, None)
        if held is not None:
            self._set(held, 0)

    def _set(self, held: _Held, allowance_mb: int) -> None:
        self._left_mb[held.node] -= allowance_mb - held.allowance_mb
        held.allowance_mb = allowance_mb
        if self._left_mb[held.node] < 0:
            raise BrokenAllowance(f"node {held.node} has {-self._left_mb[held.node]} MB less memory than its environments may use")

    def begin(self, environment: str, live: Live, allowance_mb: int, now: float) -> None:
        """Let an action begin in an environment."""
        held = self._held.get(environment)
        if held is not None:
            held.running[live.id] = live
            self._set(held, max(held.allowance_mb, allowance_mb))
            if held.halted:
                self._stop(live, now)
            self._look(environment, held, now)

    def allow(self, environment: str, allowance_mb: int, now: float) -> None:
        """Change an environment's allowance."""
        held = self._held.get(environment)
        if held is not None:
            self._set(held, allowance_mb)
            self._look(environment, held, now)

    def end(self, environment: str, live: Live, now: float) -> tuple[int | None, int | None]:
        """End an action. Return the most that its environment held, and what it holds now if nothing else runs in it."""
        held = self._held.get(environment)
        if held is None or live.id not in held.running:
            return None, None
        most_mb = min(held.used_mb, held.allowance_mb)
        del held.running[live.id]
        self._count(live, now)
        if held.running:
            self._look(environment, held, now)
            return most_mb, None
        resident_mb = live.recorded.resident_mb
        held.halted = False
        held.holding_mb = min(held.holding_mb if resident_mb is None else resident_mb, held.limit_mb)
        self._set(held, min(held.allowance_mb, held.holding_mb + HEADROOM_MB))
        return most_mb, held.holding_mb

    def _look(self, environment: str, held: _Held, now: float) -> None:
        if held.allowance_mb < held.limit_mb and held.used_mb > held.allowance_mb - CUSHION_MB:
            if not held.halted:
                held.halted = True
                for live in held.running.values():
                    self._stop(live, now)
            self.asks += 1
            self._ask(now, MemoryWanted(environment=environment, allowance_mb=held.allowance_mb))
        elif held.halted:
            held.halted = False
            for live in list(held.running.values()):
                self._count(live, now)
                self._go_on(live, now)

    def _stop(self, live: Live, now: float) -> None:
        self._halted_at[live.id] = now
        self._halt(live, now)

    def _count(self, live: Live, now: float) -> None:
        """Count the time for which an action stood still."""
        paused_s = now - self._halted_at.pop(live.id, now)
        if paused_s > 0:
            live.waited_s += paused_s
            self.pauses += 1
            self.paused_s[live.id] = self.paused_s.get(live.id, 0.0) + paused_s
