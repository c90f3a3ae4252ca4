"""Random cycles of start, ask, evict, wake and kill over several services: one program for made-up servers and for vLLM itself.

One thread changes things and kills processes, others ask. All go through `ServiceHost` and `Execution`, as actions do.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from app.action_task import Call
from tests.vllm.fakes import gone, until
from workers.gpu.call_control import CallControl
from workers.gpu.errors import EngineBusy, EngineDied, EngineFailed, NotResident, OverBudget
from workers.gpu.execution import Execution
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus

Role = Literal["guard", "server", "worker"]

UNSERVED = (EngineBusy, EngineDied, EngineFailed, NotResident, OverBudget)
"""How a call may end whose server was killed, or whose cells were taken by calls of others."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the right answer, a list of numbers."""

    method: Literal["score", "logprobs"]
    asked: Any
    answer: Sequence[float]


@dataclass(slots=True)
class Processes:
    """The servers that this process starts from now on, found through their guards."""

    others: frozenset[int] = field(default_factory=lambda: frozenset(one.pid for one in psutil.Process().children(recursive=True)))
    """What this process has started before, such as servers that other tests share."""
    seen: dict[int, list[int]] = field(default_factory=dict)
    """Each server that was ever found, and all processes that belonged to it, its guard included."""

    def look(self) -> dict[int, dict[Role, psutil.Process]]:
        """Return the living servers by process id: guard, server and one of the processes that compute for it."""
        found: dict[int, dict[Role, psutil.Process]] = {}
        below_me = _children([one for one in psutil.Process().children(recursive=True) if one.pid not in self.others])
        guards = {one.pid: one for one in below_me.get(os.getpid(), [])}
        for server in [one for pid in guards for one in below_me.get(pid, [])]:
            with suppress(psutil.Error, KeyError):
                # What a server leaves behind becomes a child of its guard, too.
                if "--uds" not in server.cmdline():
                    continue
                guard, below = guards[server.ppid()], _below(server.pid, below_me)
                workers = [one for one in below if "EngineCore" in one.name() or one.name() == "sleep"]
                found[server.pid] = {"guard": guard, "server": server} | ({"worker": workers[0]} if workers else {})
                self.seen.setdefault(server.pid, []).extend(one.pid for one in (guard, server, *below))
        return found

    def left(self) -> list[int]:
        """Return the processes of all servers that still run."""
        return sorted({pid for pids in self.seen.values() for pid in pids if not gone(pid)})


def _children(processes: Sequence[psutil.Process]) -> dict[int, list[psutil.Process]]:
    """Return the processes by their parents' ids."""
    found: dict[int, list[psutil.Process]] = {}
    for one in processes:
        with suppress(psutil.Error):
            found.setdefault(one.ppid(), []).append(one)
    return found


def _below(pid: int, children: Mapping[int, list[psutil.Process]]) -> list[psutil.Process]:
    return [process for child in children.get(pid, []) for process in (child, *_below(child.pid, children))]


@dataclass
class Cycles:
    """A run over a host: which services are brought onto which cells, and what they are asked."""

    host: ServiceHost
    places: Mapping[str, Sequence[tuple[int, ...]]]
    questions: Mapping[str, Sequence[Question]]
    seed: int
    tolerance: float
    """By how much a right answer may differ, as a part of the largest of its numbers or of 1."""
    trouble: Callable[[random.Random], None] = lambda draws: None
    """Does something else that goes wrong on a real machine."""
    processes: Processes = field(default_factory=Processes)
    killed: set[int] = field(default_factory=set)
    """The servers of which this run has killed a process."""
    served: Counter[str] = field(default_factory=Counter)
    unserved: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Whatever becomes resident is found.
        self.host.listen(self._note)

    def run(self, cycles: int, callers: int) -> None:
        """Do `cycles` random changes while `callers` threads ask."""
        draws, over = random.Random(self.seed), threading.Event()

        def call(number: int) -> None:
            mine = random.Random(f"{self.seed} {number}")
            while not over.is_set():
                self.ask(*self._draw(mine))

        with ThreadPoolExecutor(callers) as pool:
            calls = [pool.submit(call, number) for number in range(callers)]
            try:
                for _ in range(cycles):
                    self._cycle(draws)
            finally:
                over.set()
            for one in calls:
                one.result()

    def settle(self) -> None:
        """Ask each service on each of its places once more, and all must be answered; then evict everything."""
        for service, places in self.places.items():
            for cells in places:
                for question in self.questions[service]:
                    self.ask(service, cells, question, must=True)
        for status in self.host.status():
            if status.state == "resident":
                self.host.evict(status.name)
        self.processes.look()

    def ask(self, service: str, cells: tuple[int, ...], question: Question, *, must: bool = False) -> None:
        """Put a question as an idempotent action does, and compare the answer."""
        call = Call("cycles", {}, {"idempotent": True}, time.time(), time.perf_counter())  # type: ignore[typeddict-item]
        execution = Execution(call, CallControl(), 60.0)
        try:
            found = execution.answer(
                self.host,
                InstanceName(service, cells),
                [],
                lambda engine, control: getattr(engine, question.method)(question.asked, control),
            )
        except UNSERVED as error:
            if must:
                raise
            self.unserved[f"{type(error).__name__}: {error}"[:100]] += 1
            return
        values = [found[0]] if question.method == "score" else found[0]
        most = self.tolerance * max(1.0, *map(abs, question.answer))
        if len(values) != len(question.answer) or any(not abs(a - b) <= most for a, b in zip(values, question.answer, strict=True)):
            self.wrong.append(f"{service} on {cells}: {values} instead of {question.answer}")
        self.served[service] += 1

    def summary(self) -> str:
        """Say in one line what was done."""
        served, unserved = sum(self.served.values()), sum(self.unserved.values())
        did = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        counts = [sum(getattr(status, what) for status in self.host.status()) for what in ("starts", "restores", "evictions", "leaks")]
        moved = "{} starts, {} restores, {} evictions, {} leaks".format(*counts)
        return f"{did}; {served} served, {unserved} not served, {len(self.wrong)} wrong; {moved}; {len(self.killed)} servers killed"

    def _note(self, status: InstanceStatus) -> None:
        if status.state == "resident":
            self.processes.look()

    def _draw(self, draws: random.Random) -> tuple[str, tuple[int, ...], Question]:
        service = draws.choice(sorted(self.places))
        return service, draws.choice(list(self.places[service])), draws.choice(list(self.questions[service]))

    def _cycle(self, draws: random.Random) -> None:
        what = draws.choices(["ask", "evict", "bring", "kill", "trouble"], [6, 4, 2, 1, 1])[0]
        service, cells, question = self._draw(draws)
        self.done[what] += 1
        if what == "ask":
            self.ask(service, cells, question)
        elif what == "evict":
            with suppress(*UNSERVED):
                self.host.evict(InstanceName(service, cells))
        elif what == "bring":
            with suppress(*UNSERVED):
                self.host.ensure_resident(service, cells, self.host.in_the_way(service, cells))
        elif what == "kill":
            self._kill(draws)
        else:
            self.trouble(draws)

    def _kill(self, draws: random.Random) -> None:
        servers = self.processes.look()
        if servers:
            pid = draws.choice(sorted(servers))
            self.killed.add(pid)
            with suppress(psutil.Error):
                draws.choice(list(servers[pid].values())).kill()

    def all_gone(self) -> None:
        """Wait for every process of every server to be gone."""
        with suppress(AssertionError):
            until(lambda: not self.processes.left())
        assert self.processes.left() == []
