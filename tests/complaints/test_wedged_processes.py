"""One process that stands still holds nothing up but its own command, and that only until the deadline and a grace.

Source: ClawBench #298 (no deadline on the host's side, so one wedged container stalled a whole batch). `tests/containers` has the same for
containers, and `tests/live/test_live_loss.py` a worker that is frozen.
"""

from __future__ import annotations

import os

import pytest

from tests.freezing import freeze, held
from tests.workers_cpu.support import admit, followed, open_one, printed, until
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell import run, session


def supervisor_of(env: ProcessEnvironment, name: str = "main") -> int:
    backend = env._sessions[name]._backend
    assert backend is not None
    return int(backend._supervisor.pid)  # type: ignore[attr-defined]


def test_a_stopped_supervisor_ends_its_command_at_the_deadline(sandbox: ProcessSandbox) -> None:
    # Given two environments, and in one of them a command whose supervisor is stopped
    wedged, other = open_one(sandbox), open_one(sandbox, "e2")
    assert printed(wedged, "export kept=yes") == ""
    with followed(wedged, "echo begun; sleep 300") as running:
        assert running.prints("begun")
        freeze(supervisor_of(wedged))
        assert printed(other, "echo on") == "on\n"
        running.execution.kill("enough")
        assert running.outcome().status == "cancelled"
    assert printed(wedged, "echo $kept") == "yes\n"


def test_a_supervisor_that_is_kept_stopped_is_replaced(sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a supervisor that does not go on whatever it is sent
    monkeypatch.setattr(run, "ANSWER_S", 0.5)
    env = open_one(sandbox)
    assert printed(env, "export kept=yes; cd /tmp") == ""
    first = supervisor_of(env)
    with held(first):
        outcome = admit(env, "echo begun; sleep 300", timeout_s=5).wait()
    # Then its command has ended at its deadline, and the session goes on under another one
    assert (outcome.status, outcome.stdout) == ("timed_out", b"begun\n")
    assert printed(env, "echo $kept; pwd") == "yes\n/tmp\n"
    assert supervisor_of(env) != first


def test_an_environment_whose_supervisor_is_kept_stopped_is_closed_whole(sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    env = open_one(sandbox)
    assert int(printed(env, "sleep 300 & echo $!"))
    supervisor, folder = supervisor_of(env), env.work_folder
    # The close is soon out of patience with the supervisor, and not with what it then ends by force
    limit_s = session.CLOSE_LIMIT_S
    monkeypatch.setattr(session, "CLOSE_LIMIT_S", 0.2)
    backend = env._sessions["main"]._backend
    assert backend is not None
    abandon = backend.abandon
    monkeypatch.setattr(backend, "abandon", lambda: (setattr(session, "CLOSE_LIMIT_S", limit_s), abandon())[1])
    with held(supervisor):
        env.close()
    assert not folder.exists() and sandbox.environments() == ()
    assert until(lambda: not os.path.exists(f"/proc/{supervisor}"))
