"""What several of these tests need: run a command, find processes, wait for a condition."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from workers.cpu.abstract import Environment, EnvironmentSpec, ExecOutcome, ExecRequest, Execution, Holding
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox


def admit(
    environment: Environment,
    command: str,
    *,
    cores: tuple[int, ...] = (),
    session: str = "main",
    timeout_s: float | None = 20.0,
    output_timeout_s: float | None = None,
    output_limit_bytes: int = 1_048_576,
    variables: dict[str, str] | None = None,
) -> Execution:
    """Admit a command, by default bounded so that a broken protocol fails a test instead of hanging it."""
    request = ExecRequest(
        action_id="a1",
        command=command,
        holding=Holding(cores),
        session=session,
        timeout_s=timeout_s,
        output_timeout_s=output_timeout_s,
        output_limit_bytes=output_limit_bytes,
        variables=variables or {},
    )
    return environment.start(request)


def run(environment: Environment, command: str, *, session: str = "main", variables: dict[str, str] | None = None) -> ExecOutcome:
    """Carry a command out."""
    return admit(environment, command, session=session, variables=variables).wait()


def printed(environment: Environment, command: str, session: str = "main") -> str:
    """Return what a command prints, which must succeed."""
    outcome = run(environment, command, session=session)
    assert outcome.status == "succeeded", outcome
    assert outcome.exit_code == 0, outcome
    return outcome.stdout.decode()


def open_one(sandbox: ProcessSandbox, name: str = "e1") -> ProcessEnvironment:
    """Open an environment."""
    return sandbox.open(EnvironmentSpec(id=name))


def processes_with(marker: str) -> list[int]:
    """Return the ids of living processes whose command line or working folder holds `marker`."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            folder = os.readlink(f"/proc/{name}/cwd") if state != "Z" else ""
        except OSError:
            continue
        if state != "Z" and (marker in line or marker in folder):
            found.append(int(name))
    return found


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Look again and again until `condition` holds; return whether it did in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
