"""The host of a node's services: decisions that are carried out, budgets, failures, and how instances leave their cells."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import DEFAULT, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers_gpu.support import ITEM, Mortal, at, copying, hosting, of, service, stub
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import DeviceError, EngineFailed, GpuError, NotResident, OverBudget, UnknownService
from workers.gpu.host import ServiceHost
from workers.gpu.instances import Instance, InstanceName, InstanceStatus


def on(found: InstanceStatus) -> tuple[int, ...]:
    """Return the cells that an instance holds."""
    return found.name.cells if found.reserved else ()


class Leaking(StubEngine):
    """Keeps its memory when evicted, and when stopped for as long as `deaf`."""

    deaf = True

    def _evict(self) -> None: ...

    def _free(self) -> None:
        if not self.deaf:
            super()._free()


def failing(step: str) -> StubEngine:
    """Return an engine that fails once, at a step."""
    engine = StubEngine("a", "score", 600.0)
    setattr(engine, step, Mock(wraps=getattr(engine, step), side_effect=[OSError(28, "No space left on device"), DEFAULT]))
    return engine


def test_a_service_starts_once_leaves_for_another_and_is_restored(cells: list[Device]) -> None:
    host = hosting(cells, "ab")

    assert host.ensure_resident("a", (0,)) >= 0.0
    host.ensure_resident("a", (0,))
    # What is not resident has nothing to leave
    host.ensure_resident("b", (0,), evict=[at("a", 0), at("b", 0)])
    evicted = of(host, "a")
    host.ensure_resident("a", (0,), evict=[at("b", 0)])

    assert (evicted.state, on(evicted), evicted.memory_mb) == ("host", (), 0.0)
    now = of(host, "a")
    assert (now.state, on(now), now.memory_mb) == ("resident", (0,), 600.0)
    assert (now.starts, now.restores, now.evictions, now.leaks) == (1, 1, 1, 0)
    assert of(host, "b").state == "host"
    assert len(host.run("a", (0,), lambda engine: engine.score([ITEM]))) == 1


def test_a_service_may_come_back_on_other_cells(cells: list[Device]) -> None:
    host = hosting(cells, "a")
    host.ensure_resident("a", (0,))
    host.ensure_resident("a", (1, 0), evict=[at("a", 0)])
    now, before = of(host, "a", 0, 1), of(host, "a", 0)
    assert (on(now), now.memory_mb, now.restores) == ((0, 1), 1200.0, 1)
    assert (before.state, before.reason, before.evictions) == ("absent", "its copy went to a on cells 0, 1", 1)
    assert [host.held_mb(cell) for cell in (0, 1)] == [600.0, 600.0]


def test_decisions_that_make_no_sense_are_refused(cells: list[Device]) -> None:
    host = hosting(cells, {"a": service(cells=[1])})
    host.ensure_resident("a", (0,), evict=[at("x", 0)])
    with pytest.raises(UnknownService, match="no service 'x' here; there are a"):
        host.ensure_resident("x", (0,))
    with pytest.raises(UnknownService):
        host.run("x", (0,), lambda engine: engine.name)
    for wrong, words in (((2,), "no cell 2, this node has 2"), ((-1,), "no cell -1"), ((0, 1), "takes 1 cells, not 2"), ((0, 0), "twice")):
        with pytest.raises(DeviceError, match=words):
            host.ensure_resident("a", wrong)
    assert [found.name for found in host.status()] == [at("a", 0)]


def test_a_service_that_fails_to_load_says_why_frees_its_cell_and_is_tried_again(cells: list[Device]) -> None:
    host = hosting(cells, "ab", {"a": failing("_start")})
    with pytest.raises(EngineFailed, match="No space left on device"):
        host.ensure_resident("a", (0,), evict=[at("b", 0)])
    failed = of(host, "a")
    assert (failed.state, on(failed), "No space left on device" in failed.reason) == ("failed", (), True)
    with pytest.raises(NotResident):
        host.run("a", (0,), lambda engine: engine.score([ITEM]))
    host.ensure_resident("a", (0,))
    assert (of(host, "a").state, of(host, "a").reason) == ("resident", "")


def test_an_evicted_service_that_fails_to_evict_does_not_hold_up_who_wants_its_cell(cells: list[Device]) -> None:
    host = hosting(cells, "ab", {"a": failing("_evict")})
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), evict=[at("a", 0)])
    evicted = of(host, "a")
    assert (of(host, "b").state, evicted.state, on(evicted), evicted.evictions) == ("resident", "failed", (), 0)
    assert "No space left on device" in evicted.reason


def test_memory_that_stays_taken_stays_booked_until_it_is_free(cells: list[Device]) -> None:
    engine = Leaking("a", "score", 600.0)
    host = hosting(cells, "ab", {"a": engine})
    host.ensure_resident("a", (0,))

    with pytest.raises(EngineFailed, match=r"600\.0 MiB are still taken"):
        host.ensure_resident("b", (0,), evict=[at("a", 0)])

    assert "still taken" in of(host, "a", 0).reason
    # What does not fit beside it is refused, and nothing changes on its other cell
    with pytest.raises(OverBudget, match="b needs 600 MiB on cell 0, which has 1000 MiB and holds a 600"):
        host.ensure_resident("b", (0, 1))
    assert (of(host, "b", 0, 1).state, host.held_mb(1)) == ("absent", 0.0)
    with pytest.raises(EngineFailed, match="still taken"):
        host.ensure_resident("a", (0,))
    # A leak that has gone is forgotten at the next look
    engine.deaf = False
    engine.stop()
    host.check()
    assert (on(of(host, "a", 0)), of(host, "a", 0).state, host.held_mb(0)) == ((), "absent", 0.0)
    assert "still taken" not in of(host, "a", 0).reason
    # And one that only needed to be stopped costs the newcomer nothing
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), evict=[at("a", 0)])
    leaked = of(host, "a")
    assert (leaked.state, on(leaked), leaked.memory_mb, leaked.leaks) == ("absent", (), 0.0, 2)


def test_many_threads_wanting_one_service_start_it_once(cells: list[Device]) -> None:
    host = hosting(cells, "a")
    together = threading.Barrier(8)

    def want(_: int) -> None:
        together.wait(60)
        host.ensure_resident("a", (0,))
        host.run("a", (0,), lambda engine: engine.score([ITEM]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(want, range(8)))
    assert (of(host, "a").starts, of(host, "a").restores) == (1, 0)


def test_services_that_evict_each_other_from_two_threads_do_not_lock_up(cells: list[Device]) -> None:
    host, over = hosting(cells, "ab"), list[str]()

    def swap(mine: str, other: str) -> None:
        for _ in range(200):
            try:
                host.ensure_resident(mine, (0,), evict=[at(other, 0)])
            except OverBudget:
                over.append(mine)
            assert host.held_mb(0) <= 1000.0

    with ThreadPoolExecutor(2) as pool:
        for swapping in [pool.submit(swap, "a", "b"), pool.submit(swap, "b", "a")]:
            swapping.result(timeout=120)

    assert [entry.state for entry in host.status()].count("resident") == 1
    assert len(over) < 400


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


cell_sets = st.sampled_from([(0,), (1,), (0, 1)])
named = st.builds(InstanceName, st.sampled_from("abcd"), cell_sets)
decisions = st.lists(st.tuples(named, st.lists(named, max_size=4), st.booleans()), max_size=25)


@given(decisions)
def test_no_decisions_ever_put_more_on_a_cell_or_into_host_memory_than_there_is(
    steps: list[tuple[InstanceName, list[InstanceName], bool]],
) -> None:
    budget = [Device(f"cpu:{index}", "cpu", 1000, "cpu") for index in range(2)]
    sizes = {"a": 300.0, "b": 500.0, "c": 700.0, "d": 1100.0}
    host: ServiceHost = hosting(budget, sizes, copying, host_memory_mb=1000)
    for name, evict, makes_room in steps:
        try:
            host.ensure_resident(*name, [*evict, *(host.in_the_way(*name, evict) if makes_room else ())])
        except GpuError:
            assert sizes[name.service] > 1000 or not makes_room
        else:
            assert on(of(host, *name[:1], *name.cells)) == name.cells
        for cell in range(2):
            there = [found for found in host.status() if cell in on(found)]
            assert all(found.state == "resident" for found in there)
            assert host.held_mb(cell) == sum(sizes[found.name.service] for found in there) <= 1000.0
        assert all(found.memory_mb == sizes[found.name.service] * len(on(found)) for found in host.status())
        assert host.host_mb() == sum(sizes[found.name.service] for found in host.status() if found.state == "host") <= 1000.0
