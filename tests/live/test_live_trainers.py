"""Trainers that are killed, stopped for a while and come back: what they leave ends, what lives goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
from celery import Celery

from app.local.stack import StackPlan
from tangram import Action, Cost
from tangram.connection import open_store
from tangram.life_signs import silences
from tangram.wire import INGRESS_QUEUE
from tests.freezing import freeze
from tests.live.support import Live, running

ORPHAN_S = 15.0


@pytest.fixture(scope="module")
def watched(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack that soon gives up clients that are silent; tests may leave commands of theirs running."""
    plan = StackPlan(cores=4, memory_mb=4096, api_nodes=0, variables={"TANGRAM_ORPHAN_S": str(ORPHAN_S)})
    with running(tmp_path_factory.mktemp("watched"), plan) as started:
        yield started


@dataclass
class Trainer:
    """A trainer in a process of its own; see `trainer.py`."""

    process: subprocess.Popen[str]
    environment: str = ""
    detached: str = ""
    command: str = ""

    @property
    def client(self) -> str:
        """The id of its client."""
        return self.command.partition("-")[0]

    def read(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, command: str) -> str:
        """Have it run a command; return what it printed, or the error."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read()


@contextmanager
def training(live: Live, job: str = "training") -> Iterator[Trainer]:
    """Run a trainer whose command runs."""
    words = [sys.executable, "-m", "tests.live.trainer", job]
    process = subprocess.Popen(words, env=live.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        trainer = Trainer(process)
        trainer.environment, trainer.detached, trainer.command = trainer.read().split()
        live.until(lambda: status(live, trainer.command) == "running")
        yield trainer
    finally:
        process.kill()
        process.wait(60)


def status(live: Live, action: str) -> str:
    """Return the status of an action; nothing before it is known."""
    return next((str(row[0]) for row in live.rows(f"select status from actions where id = '{action}'")), "")


def state(live: Live, environment: str) -> tuple[str, str]:
    """Return the state of an environment, and the reason; nothing before it is known."""
    rows = live.rows(f"select state, reason from environments where id = '{environment}'")
    return (rows[0].state, rows[0].reason) if rows else ("", "")


def in_environment(environment: str, command: str) -> Action:
    """Return a command for an environment that another client has opened."""
    arguments = {"environment": environment, "command": command, "session": "mine"}
    return Action(kind="cpu.exec", environment=environment, session="mine", cost=Cost.of(cores=1), arguments=arguments)


def test_a_killed_trainer_leaves_only_what_is_detached_or_has_no_client(watched: Live) -> None:
    # Given two clients of one job, and an environment that was opened, and a command that was sent, by plain Celery
    live = watched
    with live.client("training") as client, client.open(trajectory="t") as env, training(live) as trainer:
        publish(live, Action(kind="cpu.open", environment="plain", job="training", arguments={"environment": "plain"}), "open-plain")
        live.until(lambda: state(live, "plain")[0] == "open")
        command = {"environment": "plain", "command": "sleep 300"}
        publish(live, Action(kind="cpu.exec", environment="plain", job="training", cost=Cost.of(cores=1), arguments=command), "exec-plain")
        live.until(lambda: status(live, "exec-plain") == "running")
        # When one is killed, and the scheduler afterwards
        trainer.process.send_signal(signal.SIGKILL)
        trainer.process.wait(60)
        live.replace_scheduler()
        # Then its command is cancelled and its environment closed, for that reason
        live.until(lambda: status(live, trainer.command) == "cancelled")
        reason = f"its client gave no sign of life for {ORPHAN_S:g} s"
        live.until(lambda: state(live, trainer.environment) == ("closed", reason))
        # And the detached one stands for other clients, which have lost nothing
        assert client.submit(in_environment(trainer.detached, "echo here")).result(60).stdout == "here\n"
        assert env.exec("echo fine").stdout == "fine\n"
        # And what has no client goes on
        assert (status(live, "exec-plain"), state(live, "plain")[0]) == ("running", "open")


def test_a_trainer_that_stands_still_loses_nothing_before_the_limit_and_learns_why_after_it(watched: Live) -> None:
    live = watched
    store = open_store(str(live.settings.result_url), 5.0)
    with training(live) as trainer:
        stopped = psutil.Process(trainer.process.pid)
        # Given a trainer that stands still for less than the limit
        freeze(stopped.pid)
        live.until(lambda: (silences(store, [trainer.client])[trainer.client] or 0.0) > ORPHAN_S / 2)
        stopped.resume()
        # Then it goes on, and nothing of it has ended two limits later
        assert trainer.run("echo on") == "on"
        live.until(lambda: (silences(store, [trainer.client])[trainer.client] or 0.0) < 1.0)
        assert (status(live, trainer.command), state(live, trainer.environment)[0]) == ("running", "open")
        # When it stands still until it is given up
        freeze(stopped.pid)
        live.until(lambda: state(live, trainer.environment)[0] == "closed")
        stopped.resume()
        # Then it is told
        said = trainer.run("echo still there")
        assert said.startswith(f"ActionFailed: environment {trainer.environment} was closed ")
        assert said.endswith(f"its client gave no sign of life for {ORPHAN_S:g} s")
    store.connection_pool.disconnect()


def publish(live: Live, action: Action, task_id: str) -> None:
    """Send an action as an ordinary Celery message."""
    with Celery(broker=live.stack.broker_url, set_as_current=False) as app:
        headers = {"tangram": action.to_header()}
        app.send_task(action.kind, kwargs=dict(action.arguments), task_id=task_id, queue=INGRESS_QUEUE, headers=headers)
