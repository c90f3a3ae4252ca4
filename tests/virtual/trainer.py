"""Rollouts in virtual time: unchanged sessions of the client that do what a script says, and remember what they were told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from celery import Celery

from app.broker.memory import SCHEME, use
from app.broker.memory_store import MemoryStore
from tangram import calls, clock
from tangram.action import DEFAULT_PRIORITY, Action, Cost
from tangram.calls import Place
from tangram.connection import Link
from tangram.elasticity import make_curve
from tangram.errors import ActionError, TangramError
from tangram.handles import Handle
from tangram.publisher import ControlRequest
from tangram.results import ExecResult
from tangram.session import Session
from tangram.settings import Settings
from tangram.wire import node_label
from tests.virtual.api import URL
from tests.virtual.clock import Process
from tests.virtual.gpu import SERVICES
from tests.virtual.network import Network

ASKS_EVERY_S = 5.0
"""After how long an operator asks again for what the journal does not say yet."""


@dataclass
class Told:
    """What a trainer was told of one action."""

    action: str
    kind: str
    idempotent: bool
    submitted_at: float
    asked: Any = None
    session: str = ""
    """The session of a command, with its environment."""
    cancelled_at: float | None = None
    times: int = 0
    told_at: float | None = None
    value: Any = None
    error: Exception | None = None

    @property
    def status(self) -> str:
        """The end that the trainer sees; empty for none yet, `unreachable` where it was told that the stack is."""
        if self.times == 0:
            return ""
        if isinstance(self.error, ActionError):
            return self.error.status
        if self.error is not None:
            return "unreachable"
        return self.value.status if isinstance(self.value, ExecResult) else "succeeded"


@dataclass(frozen=True)
class Step:
    """One step of a rollout: what it does after `think_s`, several commands at once where there are several."""

    think_s: float
    does: str
    commands: tuple[dict[str, Any], ...] = ()
    priority: int = DEFAULT_PRIORITY


@dataclass(frozen=True)
class Rollout:
    """One rollout: when it begins, and its steps."""

    name: str
    job: str
    begins_s: float
    steps: tuple[Step, ...]
    memory_mb: int = 64
    lease_s: float | None = None
    node: str = ""
    """The only node on which its environment may be, if that is given."""


@dataclass
class Trainer:
    """A trainer's process with one session, and its rollouts."""

    network: Network
    settings: Settings
    job: str
    told: list[Told] = field(default_factory=list)
    process: Process | None = None
    session: Session | None = None
    unfinished: int = 0
    closed: bool = False

    def start(self, rollouts: Sequence[Rollout]) -> None:
        """Start the process; it closes its session once all rollouts have ended."""
        self.process = Process(self.network.world, f"trainer {self.job}")
        self.unfinished = len(rollouts)
        self.process.run(lambda: self._run(rollouts), "trainer")

    def kill(self) -> None:
        """Kill the process."""
        assert self.process is not None
        self.process.kill()

    def _run(self, rollouts: Sequence[Rollout]) -> None:
        app = Celery(f"tangram.client.{self.job}", broker=f"{SCHEME}://", backend="disabled://", set_as_current=False)
        use(app, self.network.broker)
        app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"])
        link = Link(app, MemoryStore(self.network.broker), "memory")  # type: ignore[arg-type]
        while True:
            session = Session(self.job, self.settings, client_id=None, link=link)
            self.session = session
            ready = session.start()
            for future in ready:
                clock.wait([future])
            if all(future.exception() is None for future in ready):
                break
            session.stop(0.0)  # the stack is away: a trainer tries again
            clock.sleep(1.0)
        assert self.process is not None
        for rollout in rollouts:
            self.process.run(lambda rollout=rollout: self._roll(rollout), rollout.name)  # type: ignore[misc]
        while self.unfinished:
            clock.sleep(1.0)
        futures = session.begin_closing()
        for future in futures:
            clock.wait([future], 60.0)
        session.stop()
        self.closed = True

    def _roll(self, rollout: Rollout) -> None:
        try:
            clock.sleep(rollout.begins_s)
            self._steps(rollout)
        finally:
            self.unfinished -= 1

    def _steps(self, rollout: Rollout) -> None:
        session = self.session
        assert session is not None
        place: Place | None = None
        for step in rollout.steps:
            clock.sleep(step.think_s)
            submit = partial(self._all, session, step.priority)
            if step.does == "work":
                submit([Action(kind="virtual.work", job=self.job, **one) for one in map(_work, step.commands)])
            elif step.does == "score":
                submit([Action(kind="virtual.score", job=self.job, **_score(**one)) for one in step.commands], step.commands)
            elif step.does == "call":
                submit([_call(self.job, **one) for one in step.commands], step.commands)
            elif step.does in ("cancel", "cancel job"):
                whom = (rollout.name, None) if step.does == "cancel" else (None, self.job)
                waiting = [one for one in self.told if not one.times and one.kind != "cpu.close"] if step.does == "cancel job" else []
                if self._ask(partial(session.cancel, *whom)):
                    for one in waiting:
                        one.cancelled_at = one.cancelled_at or clock.monotonic()
                place = None
            elif step.does == "open":
                opening = calls.open_environment(
                    self.job,
                    trajectory=rollout.name,
                    memory_mb=rollout.memory_mb,
                    lease_s=rollout.lease_s,
                    queue_timeout_s=120.0,
                    requires=[node_label(rollout.node)] if rollout.node else (),
                )
                opening = session.loads.place(opening)
                if submit([opening], open_environment=True):
                    place = calls.place_of(opening)
            elif place is None:
                continue
            elif step.does == "exec":
                actions = [_command(place, **{"session": f"s{number}", **one}) for number, one in enumerate(step.commands)]
                submit(actions, step.commands)
            elif step.does == "renew":
                self._ask(partial(session.renew_lease, place, 5.0))
            elif step.does == "file":
                submit([calls.write_file(place, "a", b"x")])
                submit([calls.read_file(place, "a")])
            elif step.does == "close":
                submit([calls.close_environment(place)])
                place = None

    def _all(
        self, session: Session, priority: int, actions: Sequence[Action], asked: Sequence[Any] = (), open_environment: bool = False
    ) -> bool:
        """Submit actions together and wait for all; return whether all went well."""
        actions = [replace(one, priority=priority) for one in actions]
        handles = [session.open_environment(one) if open_environment else session.submit(one) for one in actions]
        told = [
            self._note(handle, one, what) for handle, one, what in zip(handles, actions, [*asked, *[None] * len(actions)], strict=False)
        ]
        for one in told:
            if one.asked is not None and "cancel_s" in one.asked:
                clock.thread(lambda one=one: self._cancel(session, one), "cancel").start()  # type: ignore[misc]
        for handle in handles:
            clock.wait([handle.future])
        return all(one.error is None for one in told)

    def _cancel(self, session: Session, told: Told) -> None:
        clock.sleep(told.asked["cancel_s"])
        told.cancelled_at = clock.monotonic()
        self._ask(partial(session.cancel_task, told.action))

    def _note(self, handle: Handle[Any], action: Action, asked: Any) -> Told:
        session = f"{action.environment} {action.arguments['session']}" if action.kind == "cpu.exec" else ""
        told = Told(handle.id, action.kind, action.idempotent, clock.monotonic(), asked, session)
        self.told.append(told)

        def ended(_: bool) -> None:
            told.times += 1
            told.told_at = clock.monotonic()
            told.error = handle.future.exception()  # type: ignore[assignment]
            told.value = None if told.error is not None else handle.future.result()

        handle.when_done(ended)
        return told

    def _ask(self, ask: Callable[[], ControlRequest]) -> bool:
        """Ask the scheduler for something; return whether the broker has got that."""
        assert self.session is not None
        with contextlib.suppress(TangramError):
            self.session.wait_for(ask())
            return True
        return False


@dataclass
class Operator(Trainer):
    """Somebody who drains nodes and puts them back into service, and asks until the journal says so. Rollouts have the names of nodes."""

    is_noted: Callable[[str, bool], bool] = field(kw_only=True)

    def _steps(self, rollout: Rollout) -> None:
        assert self.session is not None
        for step in rollout.steps:
            clock.sleep(step.think_s)
            draining = step.does == "drain"
            while not self.is_noted(rollout.name, draining):
                self._ask(partial(self.session.drain, rollout.name, draining=draining))
                clock.sleep(ASKS_EVERY_S)


def _command(
    place: Place,
    *,
    session: str,
    units: Sequence[int],
    timeout_s: float | None = None,
    queue_timeout_s: float | None = None,
    idempotent: bool = False,
    cancel_s: float = 0.0,
    **work: Any,
) -> Action:
    options = {"units": units, "timeout_s": timeout_s, "queue_timeout_s": queue_timeout_s, "session": session, "idempotent": idempotent}
    return calls.execute(place, json.dumps(work), **options)  # type: ignore[arg-type]


def _work(command: dict[str, Any]) -> dict[str, Any]:
    return {
        "cost": Cost({"cores": [1, 2], **({"quota:outside": [1]} if command.get("quota") else {})}),
        "curve": make_curve(0.9, None),
        "idempotent": True,
        "arguments": {"work_s": command["work_s"], "number": command["number"], "quota": "outside" if command.get("quota") else ""},
    }


def _call(job: str, *, idempotent: bool, timeout_s: float | None = None, cancel_s: float = 0.0, **asked: Any) -> Action:
    return calls.call(job, "web", url=URL + quote(json.dumps(asked)), idempotent=idempotent, timeout_s=timeout_s)


def _score(*, service: str, work_s: float, idempotent: bool, dies: bool, cancel_s: float = 0.0) -> dict[str, Any]:
    return {
        "service": service,
        "cost": Cost({"cells": SERVICES[service]["cells"]}),
        "curve": make_curve(0.9, None),
        "idempotent": idempotent,
        "arguments": {"service": service, "work_s": work_s, "dies": dies},
    }
