"""How instances leave their cells: evicted, stopped, dead while somebody waits for them, or still there although they say otherwise."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.workers_gpu.support import Mortal, at, hosting, of, service, stub
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import EngineFailed, OverBudget
from workers.gpu.instances import Instance


def test_one_that_dies_while_its_calls_are_waited_for_costs_the_newcomer_nothing(
    cells: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, str]] = []
    engine = Mortal("a", "score", 600.0)
    host = hosting(cells, "ab", {"a": engine}, on_change=lambda status: heard.append((status.name.service, status.state)))
    host.ensure_resident("a", (0,))
    entered, waits, leave = threading.Event(), threading.Event(), threading.Event()
    wait_idle = Instance.wait_idle

    def hold() -> None:
        with host.serving("a", (0,)):
            entered.set()
            leave.wait(60)

    def wait(self: Instance, timeout_s: float) -> bool:
        waits.set()
        return wait_idle(self, timeout_s)

    monkeypatch.setattr(Instance, "wait_idle", wait)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(hold)
        assert entered.wait(60)
        newcomer = pool.submit(host.ensure_resident, "b", (0,), [at("a", 0)])
        assert waits.wait(60)
        engine.die()
        leave.set()
        newcomer.result(timeout=60)
        call.result(timeout=60)

    assert (of(host, "a").state, of(host, "a").reserved, of(host, "b").state) == ("failed", False, "resident")
    assert heard[-3:] == [("a", "failed"), ("b", "starting"), ("b", "resident")]


class Holding(StubEngine):
    """Keeps its memory, whatever it is asked, until somebody lets go of it."""

    held = True

    def held_mb(self) -> Sequence[float]:
        return [self._declared_mb] if self.held else []


def test_what_is_stopped_for_another_declaration_stays_booked_until_it_is_measured_to_be_free(cells: list[Device]) -> None:
    first = Holding("a", "score", 600.0)
    engines: dict[str, Engine] = {"a": first}
    host = hosting(cells, "ab", engines)
    host.ensure_resident("a", (0,))
    engines["a"] = StubEngine("a", "score", 500.0)
    host.reload({"a": service(500), "b": service()})
    # Given memory that something refers to: neither the next look nor a caller forgets it
    host.check()
    assert (of(host, "a").reserved, host.held_mb(0), "600.0 MiB are still taken" in of(host, "a").reason) == (True, 600.0, True)
    with pytest.raises(EngineFailed, match="still taken"):
        host.ensure_resident("a", (0,))
    with pytest.raises(OverBudget):
        host.ensure_resident("b", (0,))
    # When it is let go
    first.held = False
    host.ensure_resident("a", (0,))
    # Then the cell is free for what is declared now
    assert (of(host, "a").state, host.held_mb(0), of(host, "a").reason) == ("resident", 500.0, "")


class Sleeper(StubEngine):
    """Keeps 100 MiB of each device while it is in host memory, as the process of a sleeping server does."""

    def held_mb(self) -> Sequence[float]:
        return [100.0] if self.state == "host" or (self.state == "evicting" and not self._held_mb) else super().held_mb()


def test_what_sleepers_keep_is_booked_and_the_least_recently_used_go_for_a_start(
    cells: list[Device], caplog: pytest.LogCaptureFixture
) -> None:
    services = {"a": service(pinned=True), "b": 600, "c": 600, "d": 750, "e": 1000}
    host = hosting(cells, services, partial(stub, kind=Sleeper))

    def stands() -> tuple[dict[str, str], float]:
        """Return the states of the instances that there are, by service, and what is held of their cell."""
        return {found.name.service: found.state for found in host.status()}, host.held_mb(0)

    for name in "abc":
        host.ensure_resident(name, (0,))
        host.evict(at(name, 0))
    assert host.held_mb(0) == 300.0
    # One has to go for 750 of 1000 MiB, and it is not the pinned one, though that was used first
    host.ensure_resident("d", (0,))
    assert stands() == ({"a": "host", "b": "absent", "c": "host", "d": "resident"}, 950.0)
    # One that comes back takes its place, not more
    host.evict(at("d", 0))
    host.ensure_resident("c", (0,))
    assert stands() == ({"a": "host", "b": "absent", "c": "resident", "d": "host"}, 800.0)
    # What does not fit even so costs nobody anything
    with pytest.raises(OverBudget, match="holds a 100, c 600, d 100"):
        host.ensure_resident("e", (0,))
    assert of(host, "d").state == "host"
    # And what fits with all of them gone has them go
    host.ensure_resident("e", (0,), [at("c", 0)])
    assert stands() == (dict.fromkeys("abcd", "absent") | {"e": "resident"}, 1000.0)
    assert "dropped the copy of b on cell 0, 0 MiB: d on cell 0 does not fit beside what it keeps of its cells" in caplog.text
