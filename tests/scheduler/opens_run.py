"""Environments that come, live and go in loops, on a clock of their own, and how long each open waited beside how long it may."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.open_order import KEPT_AFTER_S
from scheduler.model import commands


@dataclass(frozen=True)
class Step:
    """An environment of a loop: how large it is, how long it lives once open, and how long the loop rests after it."""

    job: str
    memory_mb: int
    life_s: float
    pause_s: float = 0.0
    requires: tuple[str, ...] = ()
    priority: int = 5


@dataclass(frozen=True)
class Setting:
    """What there is to share out, and who shares it. Each node has its memory and its labels; each loop its steps, again and again."""

    nodes: tuple[tuple[int, tuple[str, ...]], ...]
    loops: tuple[tuple[Step, ...], ...]
    weights: tuple[tuple[str, float], ...] = ()
    starting_limit: int = 1 << 60
    starts_per_s: float | None = None
    opening_s: float = 0.5

    def bound_s(self, jobs: int) -> float:
        """Return the longest for which the first open of a job waits, as the module's claim has it."""
        memory_s = self.opening_s + max(step.life_s for loop in self.loops for step in loop)
        slot_s = self.opening_s + (1.0 / self.starts_per_s if self.starts_per_s else 0.0)
        return KEPT_AFTER_S + memory_s + jobs * (memory_s + slot_s)


@dataclass
class Wait:
    """An open's wait. `place` counts it, those of its job that it found waiting and, twice, those that came later and go before it."""

    job: str
    key: tuple[float, ...]
    came: float
    place: int
    began: float | None = None


@dataclass
class OpensRun:
    """Runs a setting."""

    world: Any
    setting: Setting
    waits: dict[str, Wait] = field(default_factory=dict)
    bound_s: float = field(init=False)
    shares: bool = field(init=False)
    _todo: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _begun: dict[str, Callable[[], None]] = field(default_factory=dict)
    _count: int = 0
    _seen: int = 0

    def __post_init__(self) -> None:
        jobs = {step.job for loop in self.setting.loops for step in loop}
        self.shares = self.world.core.policy.rules.shares
        self.bound_s = self.setting.bound_s(len(jobs) if self.shares else 1)
        for number, (memory_mb, labels) in enumerate(self.setting.nodes):
            self.world.node(f"n{number}", memory_mb=memory_mb, labels=frozenset(labels))
        for loop in self.setting.loops:
            self._at(0.0, self._step(loop, 0))

    def run(self, until_s: float) -> None:
        """Let the loops go round until then."""
        while self._todo:
            wake = self.world.core.next_wake(self.world.now)
            if wake is not None and wake < min(self._todo[0][0], until_s):
                self.world.now = max(self.world.now, wake)
                self.world.tick()
            elif self._todo[0][0] > until_s:
                break
            else:
                self.world.now, _, do = heapq.heappop(self._todo)
                do()
            self._read()
        self.world.now = until_s

    def late(self) -> list[str]:
        """Return the opens that waited for longer than they may."""
        return [name for name in self.waits if self.part(name) > 1.0]

    def part(self, name: str) -> float:
        """Return the part of its bound for which an open waited."""
        wait = self.waits[name]
        waited_s = (self.world.now if wait.began is None else wait.began) - wait.came
        return waited_s / (wait.place * self.bound_s)

    def _at(self, at: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._todo, (at, self._count, do))

    def _step(self, loop: tuple[Step, ...], number: int) -> Callable[[], None]:
        def begin() -> None:
            self._count += 1
            step, name = loop[number % len(loop)], f"e{self._count}"

            def close() -> None:
                self.world.close(name)
                self.world.finish(f"close-{name}")
                self._at(self.world.now + step.pause_s, self._step(loop, number + 1))

            def opened() -> None:
                self.world.finish(f"open-{name}")
                self._at(self.world.now + step.life_s, close)

            self._begun[name] = lambda: self._at(self.world.now + self.setting.opening_s, opened)
            self._ask(name, step)

        return begin

    def _ask(self, name: str, step: Step) -> None:
        now, world = self.world.now, self.world
        cost = {"memory_mb": step.memory_mb} if step.memory_mb else {}
        world.open(name, job=step.job, finish=False, requires=step.requires, priority=step.priority, **cost)
        waiting = world.core.state.waiting.get(f"open-{name}") or world.core.state.running[f"open-{name}"].waiting
        job = step.job if self.shares else ""
        others = [wait for wait in self.waits.values() if wait.job == job and wait.began is None]
        self.waits[name] = Wait(job, waiting.key, now, 1 + len(others))
        for wait in others:
            if waiting.key < wait.key:
                wait.place += 2

    def _read(self) -> None:
        """Note which opens have begun."""
        for command in self.world.out[self._seen :]:
            if isinstance(command, commands.Start) and command.id.startswith("open-"):
                name = command.id.removeprefix("open-")
                self.waits[name].began = self.world.now
                self._begun.pop(name)()
        self._seen = len(self.world.out)
