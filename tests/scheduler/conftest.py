"""A small world to tell stories in: a core, a clock that the test moves, and what became of each action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.core import Core
from scheduler.learning.durations import Observation
from scheduler.model import Grant, Limits, NodeSpec, QuotaSpec, ServiceSpec, commands, events
from scheduler.policies import Policy, make_policy
from scheduler.quotas.answers import may_wait_again
from tangram.action import DEFAULT_JOB, Action, Cost
from tangram.elasticity import FLAT, Amdahl
from tangram.ends import CAUSES


class World:
    """A core with a clock; keeps grants and ends by action id."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        services: tuple[ServiceSpec, ...],
        quotas: tuple[QuotaSpec, ...],
        history: tuple[Observation, ...] = (),
    ) -> None:
        self.core = Core(policy, limits=limits, services=services, quotas=quotas, history=history)
        self.now = 0.0
        self.grants: dict[str, Grant] = {}
        self.ends: dict[str, commands.Finish] = {}
        self.started: list[str] = []
        self.out: list[commands.Command] = []

    def handle(self, event: events.Event) -> list[commands.Command]:
        """Hand an event to the core and keep what follows; return it, too."""
        out = self.core.handle(event, self.now)
        self.out += out
        for command in out:
            if isinstance(command, commands.Start):
                self.started.append(command.id)
                self.grants[command.id] = command.grant
            elif isinstance(command, commands.Resize):
                now = {"units": command.units, "core_ids": command.core_ids, "background": command.background}
                self.grants[command.id] = replace(self.grants[command.id], **now)
            elif isinstance(command, commands.Requeue):
                del self.grants[command.id]
            elif isinstance(command, commands.Finish):
                assert not command.cause or command.status in CAUSES[command.cause].ends, f"no {command.cause} ends as {command.status}"
                self.ends[command.id] = command
                self.grants.pop(command.id, None)
        return out

    def node(self, name: str = "n0", **spec: Any) -> World:
        """Let a node join, of every pool and with 8 cores, unless told otherwise. Return this world."""
        given = {"pools": ("cpu", "gpu", "api"), "cores": 8, "labels": frozenset(), **spec}
        self.handle(events.NodeJoined(node=NodeSpec(name=name, **given)))
        return self

    def submit(self, id: str, kind: str, *, cost: dict[str, Any] | None = None, parallel: float | None = None, **fields: Any) -> None:
        """Submit an action; `parallel` is the fraction of Amdahl's law."""
        curve = FLAT if parallel is None else Amdahl(parallel)
        if (standing := self.core.state.environments.get(fields.get("environment", ""))) is not None:
            fields.setdefault("job", standing.job)
        action = Action(kind=kind, cost=Cost.of(**(cost or {})), curve=curve, **{"job": DEFAULT_JOB, **fields})
        self.handle(events.Submitted(id=id, action=action, submitted_at=self.now))

    def several(self, do: Callable[..., object], prefix: str, numbers: int | range, *what: Any, **fields: Any) -> None:
        """Do something with ids that are numbered, the first `numbers` of them or those."""
        for number in range(numbers) if isinstance(numbers, int) else numbers:
            do(f"{prefix}{number}", *what, **fields)

    def run(self, id: str, cores: Any = 1, **fields: Any) -> None:
        """Submit an action that may run on any node."""
        self.submit(id, "build", cost={"cores": cores}, **fields)

    def open(self, environment: str, *, finish: bool = True, **fields: Any) -> World:
        """Submit `cpu.open` under the id `open-<environment>`, and have it succeed at once where it started. Return this world."""
        cost: dict[str, Any] = {key: fields.pop(key) for key in ("memory_mb", "cores") if key in fields}
        self.submit(f"open-{environment}", "cpu.open", cost=cost, environment=environment, **fields)
        if finish and f"open-{environment}" in self.grants:
            self.finish(f"open-{environment}")
        return self

    def exec(self, id: str, environment: str, cores: Any = 1, **fields: Any) -> None:
        """Submit a command to an environment."""
        self.submit(id, "cpu.exec", cost={"cores": cores}, environment=environment, **fields)

    def close(self, environment: str, *, finish: bool = False) -> None:
        """Submit `cpu.close` under the id `close-<environment>`, and have it succeed where that is wanted."""
        self.submit(f"close-{environment}", "cpu.close", environment=environment)
        if finish:
            self.finish(f"close-{environment}")

    def score(self, id: str, service: str, cells: Any = None, *, finish: bool = False, **fields: Any) -> None:
        """Submit an action for a model, and have it succeed where that is wanted."""
        self.submit(id, "gpu.score", cost={} if cells is None else {"cells": cells}, service=service, **fields)
        if finish:
            self.finish(id)

    def call(self, id: str, *quotas: str, **fields: Any) -> None:
        """Submit a request to an outside API."""
        tokens = fields.pop("tokens", 0)
        cost = {f"quota:{quota}": 1 for quota in quotas} | {f"tokens:{quota}": tokens for quota in quotas if tokens}
        self.submit(id, "api.call", cost=cost, **fields)

    def finish(self, id: str, status: Any = "succeeded", **fields: Any) -> None:
        """Have the worker report an end."""
        self.handle(events.Finished(id=id, attempt=self.grants[id].attempt, status=status, **fields))

    def answer(self, id: str, status: int, **fields: Any) -> None:
        """Have the worker report an API's answer, and keep a refusal to itself where it may."""
        refused = events.Answer(status=status, **fields)
        again = refused.refuses and may_wait_again(self.core.state.running[id].waiting.action, self.grants[id])
        self.finish(id, answer=refused, waits_again=again)

    def used(self, id: str, background_cpu_s: float) -> None:
        """Have the worker report what an action has got in the background so far."""
        self.handle(events.Used(id=id, attempt=self.grants[id].attempt, background_cpu_s=background_cpu_s))

    def lose(self, node: str = "n0") -> None:
        """Lose a node."""
        self.handle(events.NodeLost(name=node, reason="it burned"))

    def beat(
        self, node: str = "n0", running: tuple[str, ...] = (), environments: tuple[str, ...] = (), **said: tuple[events.Allowed, ...]
    ) -> None:
        """Let a node beat."""
        self.handle(events.NodeBeat(name=node, running=frozenset(running), environments=frozenset(environments), **said))

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass."""
        self.now += seconds
        self.handle(events.Tick())

    def wake(self) -> None:
        """Let time pass until the core wants to be woken."""
        at = self.core.next_wake(self.now)
        assert at is not None, "nothing waits for time"
        self.now = max(self.now, at)
        self.handle(events.Tick())

    def of(self, sort: type[Any]) -> list[Any]:
        """Return the commands of one sort so far."""
        return [command for command in self.out if isinstance(command, sort)]

    def states(self, environment: str) -> list[str]:
        """Return the states that an environment went through."""
        return [note.state for note in self.of(commands.NoteEnvironment) if note.id == environment]

    def evicted(self, id: str) -> list[str]:
        """Return the services that an action's grant throws off their cells, in order."""
        return [one.service for one in self.grants[id].evict]

    def report(self, service: str, cell_ids: tuple[int, ...], state: Any, node: str = "n0") -> None:
        """Have a worker report the state of an instance."""
        self.handle(events.ServiceChanged(node=node, service=service, cell_ids=cell_ids, state=state))

    @property
    def waiting(self) -> list[str]:
        """The ids that wait, in order of arrival."""
        return list(self.core.state.waiting)

    @property
    def background(self) -> list[str]:
        """The ids of what runs in the background, in order of id."""
        return sorted(action_id for action_id, grant in self.grants.items() if grant.background)

    @property
    def units(self) -> dict[str, int]:
        """The units of what runs."""
        return {action_id: grant.units for action_id, grant in self.grants.items()}

    def ended(self, id: str) -> tuple[str, str]:
        """Return how an action ended, and why."""
        return self.ends[id].status, self.ends[id].reason


@pytest.fixture(scope="session")
def world() -> Callable[..., World]:
    """Give a function that makes worlds. A service that is a mere name is restored in half a second, and is as usual else."""

    def make(
        policy: str = "elastic", *, services: Any = (), quotas: Any = (), history: Any = (), without: Any = (), **limits: Any
    ) -> World:
        specs = tuple(ServiceSpec(name=one, restore_s=0.5) if isinstance(one, str) else one for one in services)
        return World(make_policy(policy, without=without), Limits(**limits), specs, tuple(quotas), tuple(history))

    return make
