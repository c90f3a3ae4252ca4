"""The host of a node's services: carrying out decisions, budgets, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services_file import ServiceConfig
from workers.gpu.call_control import CallControl
from workers.gpu.device_memory import DeviceMemory
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.factory import create_engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import DeviceError, EngineBusy, EngineFailed, GpuError, NotResident, OverBudget, UnknownService
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus

Until = Callable[[Callable[[], bool]], None]
ITEM = {"prompt": "p", "response": "r"}
NOWHERE = Path("nowhere")


def service(memory_mb: float = 600, cells: list[int] | None = None) -> ServiceConfig:
    return ServiceConfig(engine="stub", task="score", memory_mb=memory_mb, cells=cells or [1], max_concurrency=2)


def at(service: str, *cells: int) -> InstanceName:
    return InstanceName(service, cells)


def status(host: ServiceHost, service: str, *cells: int) -> InstanceStatus:
    """Return how an instance stands; without cells the only one of its service."""
    (found,) = (one for one in host.status() if one.name.service == service and cells in ((), one.name.cells))
    return found


def on(found: InstanceStatus) -> tuple[int, ...]:
    """Return the cells that an instance holds."""
    return found.name.cells if found.reserved else ()


class Leaking(StubEngine):
    """Keeps its memory when evicted, and when stopped for as long as `deaf`."""

    deaf = False

    def _evict(self) -> None: ...

    def _free(self) -> None:
        if not self.deaf:
            super()._free()


class Failing(StubEngine):
    """Fails at one step as often as a test asks."""

    def __init__(self, step: str, times: int = 1) -> None:
        super().__init__("a", "score", 600.0)
        self.step, self.times = step, times

    def _start(self, devices: Sequence[Device]) -> None:
        super()._start(devices)
        self._maybe("start")

    def _evict(self) -> None:
        self._maybe("evict")
        super()._evict()

    def _restore(self, devices: Sequence[Device]) -> None:
        super()._restore(devices)
        self._maybe("restore")

    def _maybe(self, step: str) -> None:
        if step == self.step and self.times:
            self.times -= 1
            raise OSError(28, "No space left on device")


class Copying(StubEngine):
    """Has a copy in host memory, as large as what it holds on one device, while it is off its devices."""

    def host_mb(self) -> float:
        return self._declared_mb if self.state == "host" else 0.0


def copying(name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> Engine:
    return Copying(name, config.task, config.memory_mb, config.max_concurrency)


def host_with(engine: Engine, cells: list[Device]) -> ServiceHost:
    """Host services a and b that cannot share a cell; a has the given engine."""

    def factory(name: str, config: ServiceConfig, state_dir: Path, memory: DeviceMemory) -> Engine:
        return engine if name == "a" else create_engine(name, config, state_dir, memory)

    return ServiceHost(cells, {"a": service(), "b": service()}, NOWHERE, factory=factory)


def test_a_service_starts_once_leaves_for_another_and_is_restored(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(), "b": service()}, NOWHERE)

    spent = host.ensure_resident("a", (0,))
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), evict=[at("a", 0)])
    evicted = status(host, "a")
    host.ensure_resident("a", (0,), evict=[at("b", 0)])

    assert spent >= 0.0
    assert (evicted.state, on(evicted), evicted.memory_mb) == ("host", (), 0.0)
    now = status(host, "a")
    assert (now.state, on(now), now.memory_mb) == ("resident", (0,), 600.0)
    assert (now.starts, now.restores, now.evictions, now.leaks) == (1, 1, 1, 0)
    assert status(host, "b").state == "host"
    assert len(host.run("a", (0,), lambda engine: engine.score([ITEM]))) == 1


def test_a_service_may_come_back_on_other_cells(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(cells=[1, 2])}, NOWHERE)
    host.ensure_resident("a", (0,))

    host.ensure_resident("a", (1, 0), evict=[at("a", 0)])

    now, before = status(host, "a", 0, 1), status(host, "a", 0)
    assert (on(now), now.memory_mb, now.restores) == ((0, 1), 1200.0, 1)
    assert (before.state, before.reason, before.evictions) == ("absent", "its copy went to a on cells 0, 1", 1)
    assert [host.held_mb(cell) for cell in (0, 1)] == [600.0, 600.0]


def test_what_does_not_fit_beside_the_others_is_refused_and_nothing_changes(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(), "b": service(cells=[1, 2]), "c": service(400)}, NOWHERE)
    host.ensure_resident("a", (1,))

    with pytest.raises(OverBudget, match="b needs 600 MiB on cell 1, which has 1000 MiB and holds a 600"):
        host.ensure_resident("b", (0, 1))

    assert (status(host, "b", 0, 1).state, on(status(host, "b", 0, 1))) == ("absent", ())
    assert host.held_mb(0) == 0.0
    host.ensure_resident("c", (1,))
    assert host.held_mb(1) == 1000.0


def test_decisions_that_make_no_sense_are_refused(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(cells=[1])}, NOWHERE)
    host.ensure_resident("a", (0,))

    with pytest.raises(UnknownService, match="no service 'x' here; there are a"):
        host.ensure_resident("x", (0,))
    host.ensure_resident("a", (0,), evict=[at("x", 0)])
    with pytest.raises(UnknownService):
        host.run("x", (0,), lambda engine: engine.name)
    with pytest.raises(DeviceError, match="no cell 2, this node has 2"):
        host.ensure_resident("a", (2,))
    with pytest.raises(DeviceError, match="no cell -1"):
        host.ensure_resident("a", (-1,))
    with pytest.raises(DeviceError, match="takes 1 cells, not 2"):
        host.ensure_resident("a", (0, 1))
    with pytest.raises(DeviceError, match="names a cell twice"):
        host.ensure_resident("a", (0, 0))
    assert [found.name for found in host.status()] == [at("a", 0)]


def test_evicting_what_is_not_resident_does_nothing(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(), "b": service()}, NOWHERE)

    host.ensure_resident("a", (0,), evict=[at("b", 0)])

    assert [found.name for found in host.status()] == [at("a", 0)]


def test_a_service_that_fails_to_load_says_why_frees_its_cell_and_is_tried_again(cells: list[Device]) -> None:
    host = host_with(Failing("start"), cells)

    with pytest.raises(EngineFailed, match="No space left on device"):
        host.ensure_resident("a", (0,), evict=[at("b", 0)])

    failed = status(host, "a")
    assert (failed.state, on(failed)) == ("failed", ())
    assert "No space left on device" in failed.reason
    with pytest.raises(NotResident):
        host.run("a", (0,), lambda engine: engine.score([ITEM]))
    host.ensure_resident("a", (0,))
    assert (status(host, "a").state, status(host, "a").reason) == ("resident", "")


def test_a_service_that_fails_to_come_back_is_started_from_its_folder_before_anybody_is_refused(cells: list[Device]) -> None:
    host = host_with(Failing("restore"), cells)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), evict=[at("a", 0)])

    host.ensure_resident("a", (0,), evict=[at("b", 0)])

    assert (status(host, "a").state, status(host, "a").starts, status(host, "a").restores) == ("resident", 2, 0)


def test_an_evicted_service_that_fails_to_evict_does_not_hold_up_who_wants_its_cell(cells: list[Device]) -> None:
    host = host_with(Failing("evict"), cells)
    host.ensure_resident("a", (0,))

    host.ensure_resident("b", (0,), evict=[at("a", 0)])

    assert status(host, "b").state == "resident"
    evicted = status(host, "a")
    assert (evicted.state, on(evicted), evicted.evictions) == ("failed", (), 0)
    assert "No space left on device" in evicted.reason


def test_an_engine_that_keeps_its_memory_when_evicted_is_stopped_and_counted(cells: list[Device]) -> None:
    host = host_with(Leaking("a", "score", 600.0), cells)
    host.ensure_resident("a", (0,))

    host.ensure_resident("b", (0,), evict=[at("a", 0)])

    leaked = status(host, "a")
    assert (leaked.state, on(leaked), leaked.memory_mb, leaked.leaks) == ("absent", (), 0.0, 1)
    host.ensure_resident("a", (1,))
    assert status(host, "a", 1).starts == 1


def test_memory_that_stays_taken_stays_booked_until_it_is_free(cells: list[Device]) -> None:
    engine = Leaking("a", "score", 600.0)
    engine.deaf = True
    host = host_with(engine, cells)
    host.ensure_resident("a", (0,))

    with pytest.raises(EngineFailed, match=r"600\.0 MiB are still taken"):
        host.ensure_resident("b", (0,), evict=[at("a", 0)])

    assert "still taken" in status(host, "a", 0).reason
    with pytest.raises(OverBudget, match="holds a 600"):
        host.ensure_resident("b", (0,))
    with pytest.raises(EngineFailed, match="still taken"):
        host.ensure_resident("a", (0,))
    engine.deaf = False
    engine.stop()
    host.ensure_resident("b", (0,))
    assert (on(status(host, "a", 0)), status(host, "a", 0).state) == ((), "absent")
    assert "still taken" not in status(host, "a", 0).reason


def test_a_service_to_be_evicted_whose_calls_do_not_end_is_left_in_place(cells: list[Device], until: Until) -> None:
    host = ServiceHost(cells, {"a": service(), "b": service()}, NOWHERE, drain_s=0.01)
    host.ensure_resident("a", (0,))
    control = CallControl(work_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(host.run, "a", (0,), lambda engine: engine.score([ITEM], control))
        until(lambda: status(host, "a").running == 1)

        with pytest.raises(EngineBusy):
            host.ensure_resident("b", (0,), evict=[at("a", 0)])

        assert (status(host, "a").state, on(status(host, "a"))) == ("resident", (0,))
        assert [found.name for found in host.status()] == [at("a", 0)]
        control.cancelled.set()
        call.exception(timeout=60)


def test_many_threads_wanting_one_service_start_it_once(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service()}, NOWHERE)
    together = threading.Barrier(8)

    def want(_: int) -> None:
        together.wait(60)
        host.ensure_resident("a", (0,))
        host.run("a", (0,), lambda engine: engine.score([ITEM]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(want, range(8)))

    assert (status(host, "a").starts, status(host, "a").restores) == (1, 0)


def test_services_that_evict_each_other_from_two_threads_do_not_lock_up(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(), "b": service()}, NOWHERE)
    over = []

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


def test_closing_stops_every_service(cells: list[Device]) -> None:
    host = ServiceHost(cells, {"a": service(), "b": service(), "c": service()}, NOWHERE)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (1,))
    host.ensure_resident("c", (1,), evict=[at("b", 1)])

    host.close()

    assert {(found.state, found.memory_mb, on(found)) for found in host.status()} == {("absent", 0.0, ())}
    assert host.held_mb(0) == host.held_mb(1) == 0.0


cell_sets = st.sampled_from([(0,), (1,), (0, 1)])
named = st.builds(InstanceName, st.sampled_from("abcd"), cell_sets)
decisions = st.lists(st.tuples(named, st.lists(named, max_size=4), st.booleans()), max_size=25)


@given(decisions)
def test_no_decisions_ever_put_more_on_a_cell_or_into_host_memory_than_there_is(
    steps: list[tuple[InstanceName, list[InstanceName], bool]],
) -> None:
    budget = [Device(f"cpu:{index}", "cpu", 1000, "cpu") for index in range(2)]
    sizes = {"a": 300.0, "b": 500.0, "c": 700.0, "d": 1100.0}
    host = ServiceHost(budget, {name: service(size, [1, 2]) for name, size in sizes.items()}, NOWHERE, factory=copying, host_memory_mb=1000)
    for name, evict, makes_room in steps:
        try:
            host.ensure_resident(*name, [*evict, *(host.in_the_way(*name, evict) if makes_room else ())])
        except GpuError:
            assert sizes[name.service] > 1000 or not makes_room
        else:
            assert on(status(host, *name[:1], *name.cells)) == name.cells
        for cell in range(2):
            there = [found for found in host.status() if cell in on(found)]
            assert all(found.state == "resident" for found in there)
            assert host.held_mb(cell) == sum(sizes[found.name.service] for found in there) <= 1000.0
        assert all(found.memory_mb == sizes[found.name.service] * len(on(found)) for found in host.status())
        assert host.host_mb() == sum(sizes[found.name.service] for found in host.status() if found.state == "host") <= 1000.0
