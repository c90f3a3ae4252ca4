"""Trainers that are killed or stand still, as real processes; `tests/scheduler/test_clients.py` has all that ends with them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tangram import Action, Cost
from tests.freezing import freeze
from tests.live.support import ORPHAN_S, Live

pytestmark = pytest.mark.real

GONE = f"its client gave no sign of life for {ORPHAN_S:g} s"


@dataclass
class Trainer:
    """A trainer in a process of its own; see `trainer.py`."""

    process: subprocess.Popen[str]
    environment: str = ""
    detached: str = ""
    command: str = ""

    @property
    def client(self) -> str:
        return self.command.partition("-")[0]

    def read(self) -> str:
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


def test_a_killed_trainer_leaves_only_what_is_detached_and_one_that_stands_still_learns_why_it_was_given_up(harmed: Live) -> None:
    # Given three clients of one job
    live = harmed
    with live.client("training") as client, client.open(trajectory="t") as env, training(live) as killed, training(live) as frozen:
        # When one is killed, and one stands still
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(60)
        assert frozen.run("echo on") == "on"
        freeze(frozen.process.pid)
        # Then the commands of both are cancelled and their environments closed, for that reason
        for trainer in (killed, frozen):
            live.until(lambda of=trainer: status(live, of.command) == "cancelled")  # type: ignore[misc]
            live.until(lambda of=trainer: state(live, of.environment) == ("closed", GONE))  # type: ignore[misc]
        # And the detached one stands for the other client, which has lost nothing
        arguments = {"environment": killed.detached, "command": "echo here", "session": "mine"}
        there = Action(kind="cpu.exec", environment=killed.detached, session="mine", cost=Cost.of(cores=1), arguments=arguments)
        assert client.submit(there).result(60).stdout == "here\n"
        assert env.exec("echo fine").stdout == "fine\n"
        # And the one that goes on is told
        frozen.process.send_signal(signal.SIGCONT)
        said = frozen.run("echo still there")
        assert said.startswith(f"ActionFailed: environment {frozen.environment} was closed ") and said.endswith(GONE)
