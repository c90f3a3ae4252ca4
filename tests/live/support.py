"""A whole stack as a test sees it: its processes, logs and journal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine

from app.journal.database import open_engine
from app.local import stack
from app.local.embedded import EmbeddedStack
from app.local.processes import Command, Process, wait_until
from app.local.stack import StackPlan
from tangram import Client, Settings
from tests.cli.template import Forked

SERVICES = """
[services.judge]
engine = "stub"
task = "score"
cells = [1]
memory_mb = 500
restore_s = 0.05
max_concurrency = 2

[services.teacher]
engine = "stub"
task = "logprobs"
cells = [1]
memory_mb = 500
restore_s = 0.05


[quotas.search]
rate_per_s = 200
burst = 50
concurrency = 32
hosts = ["127.0.0.1"]

[quotas.public]
concurrency = 32

[quotas.llm]
tokens_per_min = 600
hosts = ["127.0.0.1"]
"""

INCLUDE = ("tests.live.live_tasks",)


class ForkedProcess(Process):
    """A process of a stack that is a fork of one that has imported its modules."""

    start_child = Forked


class ForkedStack(EmbeddedStack):
    """A stack whose processes are such forks, also those that are started later."""

    process_type = ForkedProcess


START_S = 200.0
"""How long the processes of a stack may take to start; seconds."""

SLOW_BEATS = {"TANGRAM_BEAT_S": "5", "TANGRAM_TAKEOVER_S": "1.5"}
"""What a stack of a test has where its plan says nothing else: no node is lost because a busy machine holds its worker up for ten
seconds. The next scheduler leads soon. One that a busy machine holds up leads on, since nobody else is there to lead."""

FAST_BEATS = {"TANGRAM_BEAT_S": "2", "TANGRAM_NODE_LOST_S": "6"}
"""For stacks that lose nodes by their silence: a node is lost after six seconds."""

ORPHAN_S = 15.0
"""How long clients may be silent where tests wait for that; seconds."""


@dataclass
class Live:
    """A stack that is up, and words about it."""

    stack: EmbeddedStack
    plan: StackPlan

    @property
    def settings(self) -> Settings:
        return stack.settings_of(self.stack, Settings(), self.plan.shards)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that is to use it."""
        return {**self.stack.environment, **self.plan.variables}

    def client(self, job: str = "default", **settings: Any) -> Client:
        """Return a fresh client, with settings of its own."""
        return Client(job=job, settings=self.settings.model_copy(update=settings))

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.stack._processes[name].identity.pid)

    def add(self, **nodes: Any) -> None:
        """Start the nodes that the plan has with the fields `nodes` and did not have before, and wait for them."""
        whole = replace(self.plan, **nodes)
        for name in whole.node_names():
            if name not in self.plan.node_names():
                self.stack.spawn(next(command for command in stack.commands(whole) if command.name == name))
        self.plan = whole
        stack.wait_until_up(self.stack, whole, START_S)

    def repair(self) -> None:
        """Start again what has died, and wait until all nodes are up."""
        for name in self.stack.dead():
            self.stack.restart(name)
        stack.wait_until_up(self.stack, self.plan, START_S)

    def end(self, name: str, with_signal: int = signal.SIGKILL) -> None:
        self.process(name).send_signal(with_signal)
        self.until(lambda: name in self.stack.dead())

    def command(self, name: str) -> Command:
        return next(command for command in stack.commands(self.plan) if command.name == name)

    def log(self, name: str) -> str:
        return (self.stack.state_dir / "logs" / f"{name}.log").read_text()

    @cached_property
    def journal(self) -> Engine:
        return open_engine(self.stack.database_url)

    def rows(self, query: str) -> list[Any]:
        with self.journal.connect() as connection:
            return list(connection.exec_driver_sql(query))

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        if not wait_until(lambda: bool(condition()), timeout_s):
            names = ["scheduler", *self.plan.node_names()]
            raise AssertionError("waited in vain\n" + "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in names))


@contextlib.contextmanager
def running(folder: Path, plan: StackPlan) -> Iterator[Live]:
    """Run a stack in `folder`, for a test that is marked `real`."""
    assert "TANGRAM_TEST_NO_STACKS" not in os.environ, "a test that starts a stack is to be marked `real`"
    plan = replace(plan, variables={**SLOW_BEATS, **plan.variables})
    with ForkedStack(folder, stack.commands(plan)) as started:
        stack.wait_until_up(started, plan, START_S)
        live = Live(started, plan)
        yield live
        live.journal.dispose()
