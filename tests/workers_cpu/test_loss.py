"""How commands and files of an environment end that ends by itself, and what is no such end."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from workers.cpu.errors import EnvironmentGone, SessionUnavailable
from workers.cpu.process.backend import ProcessBackend, ProcessBackends
from workers.cpu.process.environment import ProcessEnvironment

from .support import RUN, admit, printed, sleepers


def refuse(*_: object) -> ProcessBackend:
    """Refuse a session, as an environment that has ended does."""
    raise SessionUnavailable("there is nothing to start a session in")


def test_what_runs_and_waits_in_an_environment_that_ends_by_itself_is_lost(
    host_env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a command that runs, one that waits for its turn, and one that is cancelled while it waits
    supervisor = int(printed(host_env, "echo $PPID"))
    first, second, third = (admit(host_env, command) for command in (f"sleep 305.125{RUN}", "echo second", "echo third"))
    with ThreadPoolExecutor(3) as threads:
        outcomes = [threads.submit(first.wait)]
        sleepers(f"305.125{RUN}")
        outcomes += [threads.submit(second.wait), threads.submit(third.wait)]
        third.kill("not wanted")
        monkeypatch.setattr(ProcessBackends, "loss", lambda _: "its host has gone")
        monkeypatch.setattr(ProcessBackends, "backend", refuse)
        os.kill(supervisor, signal.SIGKILL)
        ended = [outcome.result(60) for outcome in outcomes]
    # Then what ran and waited is lost for that reason; what was cancelled stays cancelled
    lost = ("lost", "its host has gone")
    assert [(outcome.status, outcome.reason) for outcome in ended] == [lost, lost, ("cancelled", "not wanted")]


def test_files_of_an_environment_that_has_ended_by_itself_are_gone(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessBackends, "loss", lambda _: "its host has gone")
    for use in (lambda: env.read_file("missing"), lambda: env.write_file(".", b"")):
        with pytest.raises(EnvironmentGone, match=r"environment \w+ is lost: its host has gone"):
            use()
    env.hang_up()
    with pytest.raises(EnvironmentGone, match=r"environment \w+ is lost: its host has gone"):
        admit(env, "true")
