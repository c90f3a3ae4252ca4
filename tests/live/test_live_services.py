"""Services on a live stack: what status says of them, a services file that changes, a worker that dies, a restore by order."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from app.journal.status import ServiceStatus, status
from app.local.stack import StackPlan
from tangram import calls
from tangram.errors import ActionError
from tests.live.support import FAST_BEATS, Live, running

ITEM = [{"prompt": "p", "response": "r"}]
TWO = """
[services.{judge}]
engine = "stub"
task = "score"
memory_mb = {memory_mb}

[services.{other}]
engine = "stub"
task = "score"
memory_mb = 700
"""
NUMBERS = itertools.count()


@dataclass
class OneCell:
    """A stack with one cell of 1000 MB, and two services that only this test knows, of which one fits at a time."""

    live: Live
    judge: str
    other: str

    def declare(self, *, memory_mb: int = 600, other: str = "") -> None:
        """Write the services file."""
        self.write(TWO.format(judge=self.judge, memory_mb=memory_mb, other=other or self.other))

    def write(self, text: str) -> None:
        """Write into the services file."""
        assert self.live.plan.services_file is not None
        self.live.plan.services_file.write_text(text)

    def hang_up(self) -> None:
        """Tell the worker to read the services file."""
        self.live.process("gpu-0").send_signal(signal.SIGHUP)

    def services(self) -> dict[str, ServiceStatus]:
        """Return what status says of all services, also those of earlier tests."""
        return {service.name: service for service in status(self.live.journal, time.time()).services}

    def states(self, *names: str) -> dict[str, list[str]]:
        """Return the states of the instances of services; of this test's two, where none are named."""
        found = self.services()
        return {name: [each.state for each in found[name].instances] for name in names or (self.judge, self.other) if name in found}


@pytest.fixture(scope="module")
def one_cell(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack with one cell of 1000 MB."""
    folder = tmp_path_factory.mktemp("services")
    (folder / "services.toml").write_text("[quotas.of_nobody]\nrate_per_s = 1\n")
    plan = StackPlan(nodes=0, api_nodes=0, cells=1, cell_memory_mb=1000, services_file=folder / "services.toml", variables=FAST_BEATS)
    with running(folder / "state", plan) as started:
        yield started


@pytest.fixture
def gpus(one_cell: Live) -> OneCell:
    """Return the stack, with its worker up and its cell empty."""
    one_cell.repair()
    number = next(NUMBERS)
    found = OneCell(one_cell, f"judge-{number}", f"other-{number}")
    found.declare()
    found.hang_up()

    def ready() -> bool:
        services = found.services()
        declared = {name for name, service in services.items() if service.declared}
        states = {one.state for service in services.values() for one in service.instances}
        return declared == {found.judge, found.other} and not states - {"absent", "failed", "lost"}

    one_cell.until(ready)
    return found


def test_a_service_is_restored_by_order_and_the_journal_has_how_that_ended(gpus: OneCell) -> None:
    def order(service: str, evict: list[dict[str, Any]]) -> None:
        from app.celery import make_app

        make_app(gpus.live.settings).send_task(
            "tangram.restore", kwargs={"service": service, "cell_ids": [0], "evict": evict}, queue="node.gpu-0"
        )

    order(gpus.judge, [])
    gpus.live.until(lambda: gpus.states(gpus.judge) == {gpus.judge: ["resident"]})
    order(gpus.other, [{"service": gpus.judge, "cell_ids": [0]}])
    gpus.live.until(lambda: gpus.states() == {gpus.judge: ["host"], gpus.other: ["resident"]})
    # A service that nobody declares cannot be; that is said, too
    order("nobody", [])
    gpus.live.until(lambda: gpus.states("nobody") == {"nobody": ["failed"]})
    (found,) = gpus.services()["nobody"].instances
    assert "no service 'nobody' here" in found.reason


def test_a_worker_has_a_thread_for_every_call_that_its_services_take_at_a_time(gpus: OneCell) -> None:
    # Given a service that takes more calls than a worker has of anything else
    gpus.write(f'[services.{gpus.judge}]\nengine = "stub"\ntask = "score"\nmemory_mb = 600\nmax_concurrency = 200\n')
    gpus.live.until(lambda: gpus.services()[gpus.judge].declared["gpu-0"]["max_concurrency"] == 200)
    # When so many come and none ends
    with gpus.live.client() as client:
        action = calls.score("default", gpus.judge, ITEM, {})
        handles = [client.submit(replace(action, arguments={**action.arguments, "work_s": 300.0})) for _ in range(200)]
        # Then all are granted, and none waits in the worker for another to end: each can be cancelled at once
        gpus.live.until(lambda: [found.running for found in gpus.services()[gpus.judge].instances] == [200])
        client.cancel(job="default")
        for handle in handles:
            with pytest.raises(ActionError):
                handle.result(30)


def test_a_services_file_that_changes_counts_without_a_restart(gpus: OneCell) -> None:
    live = gpus.live
    with live.client() as client:
        client.score(gpus.judge, ITEM)
        # When one service changes, one goes and one comes
        gpus.declare(memory_mb=650, other="newcomer")
        live.until(lambda: "newcomer" in gpus.services())
        # Then the changed one is stopped, and started anew when it is asked for
        live.until(lambda: gpus.states(gpus.judge) == {gpus.judge: ["absent"]})
        client.score(gpus.judge, ITEM)
        live.until(lambda: [found.memory_mb for found in gpus.services()[gpus.judge].instances] == [650.0])
        assert len(client.score("newcomer", ITEM)) == 1
        with pytest.raises(ActionError, match=f"service '{gpus.other}' is not declared"):
            client.score(gpus.other, ITEM)
    # And a wrong file changes nothing, not even when the worker is told to read it
    refused = "the services file is refused"
    gpus.write("[services.judge")
    live.until(lambda: live.log("gpu-0").count(refused) == 1)
    gpus.hang_up()
    live.until(lambda: live.log("gpu-0").count(refused) == 2)
    with live.client() as client:
        assert len(client.score("newcomer", ITEM)) == 1


def test_status_follows_the_life_of_services_and_says_so_of_a_lost_node(gpus: OneCell) -> None:
    # Given two services that take turns on one cell
    live, judge, other = gpus.live, gpus.judge, gpus.other
    assert gpus.states() == {judge: [], other: []}
    with live.client() as client:
        first = client.score(judge, ITEM)
        client.score(other, ITEM)
        live.until(lambda: gpus.states() == {judge: ["host"], other: ["resident"]})
        assert client.score(judge, ITEM) == first
    # When the first is back, then status has its counts
    live.until(lambda: gpus.states() == {judge: ["resident"], other: ["host"]})
    (found,) = gpus.services()[judge].instances
    assert (found.node, found.cells, found.memory_mb) == ("gpu-0", (0,), 600.0)
    assert (found.starts, found.restores, found.evictions) == (1, 1, 1)
    assert gpus.services()[judge].declared["gpu-0"]["memory_mb"] == 600.0
    # And when its worker stops, its rows say so; a new one has none of them
    live.process("gpu-0").kill()
    live.until(lambda: gpus.states() in ({judge: ["lost"], other: ["lost"]}, {judge: ["absent"], other: ["absent"]}))
