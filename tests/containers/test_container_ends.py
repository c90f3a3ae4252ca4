"""Why a container ended, as the engine's answers and the kernel's count say it; no engine is needed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from tests.serving import Quiet, serving
from tests.workers_cpu.support import until
from workers.cpu.docker.cgroups.abstract import ContainerGroup
from workers.cpu.docker.container import Container
from workers.cpu.docker.engine import MEMORY_FULL, DockerEngine
from workers.cpu.docker.monitor import ContainerMonitor

RUNNING: dict[str, object] = {"Running": True, "ExitCode": 0, "OOMKilled": False}
KILLED = "exit code 137"


def event(action: object, at_s: float, code: object = "137") -> str:
    return json.dumps({"Action": action, "timeNano": int(at_s * 1e9), "Actor": {"Attributes": {"exitCode": code}}})


@dataclass
class FakeEngine:
    """What it answers. Each question for a container's state takes one of `states`, as long as there are any; then it has been removed."""

    address: str = ""
    states: list[dict[str, object]] = field(default_factory=list)
    events: list[str] | None = field(default_factory=list)
    """Its latest events, a line each; None where it never answers when it is asked for them."""
    stopped: threading.Event = field(default_factory=threading.Event)


class FakeGroup:
    """A control group that has gone where its count of `kills` is None."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

    def oom_kills(self) -> int:
        if self.kills is None:
            raise FileNotFoundError
        return self.kills


@pytest.fixture
def told() -> Iterator[FakeEngine]:
    """Run an engine over HTTP that knows containers by what a test says of them."""
    known = FakeEngine()

    class Handler(Quiet):
        def do_GET(self) -> None:
            path, status, said = self.path.partition("?")[0], 200, "{}"
            if path.endswith("/version"):
                said = json.dumps({"ApiVersion": "1.41"})
            elif path.endswith("/events"):
                if known.events is None:
                    known.stopped.wait()
                    return
                said = "".join(f"{line}\n" for line in known.events)
            elif "/containers/" in path and known.states:
                said = json.dumps({"State": known.states.pop(0)})
            elif "/containers/" in path or "/exec/" in path:
                status, said = 404, json.dumps({"message": "there is no such thing"})
            self.send_response(status)
            self.send_header("Content-Length", str(len(said.encode())))
            self.end_headers()
            self.wfile.write(said.encode())

    with serving(Handler) as port:
        known.address = f"tcp://127.0.0.1:{port}"
        yield known
        known.stopped.set()


@pytest.fixture
def ended(told: FakeEngine, tmp_path: Path) -> Iterator[Callable[[int | None], Container]]:
    """Give a maker of containers that have ended, with a count of kills."""
    engine, made = DockerEngine(told.address), list[Container]()

    def make(kills: int | None) -> Container:
        process = subprocess.Popen(["sleep", "300"])
        container = Container(engine, f"c{len(made)}", tmp_path, -1, 64, 32)
        container.pid, container.ended = process.pid, os.pidfd_open(process.pid)
        container.group = cast(ContainerGroup, FakeGroup(kills))
        made.append(container)
        process.kill()
        process.wait()
        return container

    yield make
    for container in made:
        os.close(container.ended)
    engine.close()


@pytest.mark.parametrize(
    ("events", "how"),
    [
        ([event("oom", 100.0), event("die", 109.9)], MEMORY_FULL),
        ([event("die", 100.0), event("oom", 100.1)], MEMORY_FULL),
        ([event("oom", 100.0), event("die", 110.1)], KILLED),
        ([event("oom", 100.0), event("die", 100.1, "0")], "exit code 0"),
        ([event("die", 100.0)], KILLED),
        ([event("die", 100.0, "a label")], ""),
        ([event("oom", 100.0)], ""),
        ([], ""),
    ],
    ids=["full", "heard of later", "full long before", "ended by itself", "killed", "labelled", "no end", "none"],
)
def test_how_a_container_ended_that_has_been_removed_is_among_the_events(told: FakeEngine, events: list[str], how: str) -> None:
    told.events = events
    assert DockerEngine(told.address).state("c") == how


@pytest.mark.parametrize(
    "form", ["{}", "[]", "null", "1", "no json", '{"Action": "die"}', event("die", 1.0).replace("1000000000", '"now"')]
)
def test_an_event_of_another_form_is_no_hindrance(told: FakeEngine, ended: Callable[[int | None], Container], form: str) -> None:
    told.events = [event("oom", 1.0), form]
    container = ended(None)
    assert (container.loss(), container.loss_cause) == ("its container ended", "environment_lost")


@pytest.mark.parametrize(
    ("events", "how"),
    [([], MEMORY_FULL), ([event("oom", 50.0), event("die", 100.0)], KILLED)],
    ids=["no events", "a command alone, earlier"],
)
def test_what_the_engine_says_of_memory_counts_only_without_events(told: FakeEngine, events: list[str], how: str) -> None:
    # Given a container that is there still, and in which the kernel has ended something at some time
    told.states, told.events = [{"Running": False, "ExitCode": 137, "OOMKilled": True}], events
    # When the engine is asked how it ended; then its events go before
    assert DockerEngine(told.address).state("c") == how


@pytest.mark.parametrize(
    ("kills", "reported", "reason", "cause"),
    [
        (1, 0, f"its container ended: {MEMORY_FULL}", "out_of_memory"),
        (1, 1, f"its container ended: {KILLED}", "environment_lost"),
        (0, 0, f"its container ended: {KILLED}", "environment_lost"),
        (None, 1, f"its container ended: {MEMORY_FULL}", "out_of_memory"),
    ],
    ids=["a new kill", "a command's", "none", "unknown"],
)
def test_the_count_of_the_kernel_goes_before_the_events(
    told: FakeEngine, ended: Callable[[int | None], Container], kills: int | None, reported: int, reason: str, cause: str
) -> None:
    # Given an engine that has heard of full memory just before the end, and of that a moment after the kernel
    told.states, told.events = [RUNNING], [event("oom", 100.0), event("die", 103.0)]
    container = ended(kills)
    container.oom_kills_reported = reported
    # When the container has ended; then a kill that a command has reported is not what ended it
    assert (container.loss(), container.loss_cause) == (reason, cause)


def test_an_engine_that_does_not_tell_its_events_holds_up_no_other_end(told: FakeEngine, ended: Callable[[int | None], Container]) -> None:
    # Given an engine that never says what has happened, and containers that have ended
    told.events, others = None, set(threading.enumerate())
    engine, monitor, noted = DockerEngine(told.address), ContainerMonitor(60.0), list[str]()
    engine.api.timeout = 0.2  # whatever comes later than that counts as no answer, too
    try:
        for _ in range(3):
            container = ended(None)
            container.engine = engine
            monitor.add(container, lambda: False, lambda container=container: noted.append(container.loss()))  # type: ignore[misc]
        assert until(lambda: len(noted) == 3)
        assert noted == ["its container ended"] * 3
    finally:
        told.stopped.set()
        monitor.close()
        engine.close()
    assert "tangram-monitor" not in {thread.name for thread in set(threading.enumerate()) - others}


def test_a_program_that_the_engine_has_forgotten_ended_and_is_not_waited_for(told: FakeEngine) -> None:
    engine = DockerEngine(told.address)
    assert engine.exit_code("forgotten") == 137
    engine.close()
