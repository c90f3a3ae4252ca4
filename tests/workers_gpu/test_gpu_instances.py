"""Several instances of a service, several services on a cell, copies in host memory, changes that are reported, another services file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from app.services_file import ServiceConfig, load_services_file
from scheduler.model.lifecycle import SERVICE
from tests.engines.waiting import until
from tests.workers_gpu.support import ITEM, Copying, Mortal, at, copying, hosting, of, service, states
from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import DeviceError, EngineBusy, UnknownService
from workers.gpu.host import ServiceHost
from workers.gpu.host_memory import Copy, HostMemory, to_drop
from workers.gpu.instances import Instance, InstanceStatus
from workers.gpu.prefetch import Prefetch
from workers.gpu.reload import Reload


def test_what_does_not_fit_by_memory_goes_least_recently_used_first_and_never_pinned_or_busy(cells: list[Device]) -> None:
    pinned, others = service(300, pinned=True), {name: service(200) for name in ("old", "older", "busy")}
    host = hosting(cells, {"pinned": pinned, **others, "new": service(250), "huge": service(800)}, drain_s=0.01)
    for name in ("pinned", "older", "busy", "old"):
        host.ensure_resident(name, (0,))
    control = CallControl(work_s=60.0)

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(host.run, "busy", (0,), lambda engine: engine.score([ITEM], control))
        until(lambda: any(found.running for found in host.status()))
        # 900 of 1000 MiB are held: one of 200 has to go, and another for 600
        assert host.in_the_way("new", (0,)) == [at("older", 0)]
        assert host.in_the_way("new", (0,), [at("old", 0)]) == []
        assert host.in_the_way("huge", (0,)) == []
        assert host.in_the_way("new", (1,)) == []
        host.run("older", (0,), lambda engine: engine.score([ITEM]))
        assert host.in_the_way("new", (0,)) == [at("old", 0)]
        # An engine that computes leaves its cell to nobody, whoever asked it
        with pytest.raises(EngineBusy):
            host.ensure_resident("new", (0,), [at("busy", 0)])
        assert states(host)["busy on cell 0"] == "resident"
        control.cancelled.set()
        call.exception(timeout=60)


def test_a_node_holds_no_more_instances_than_declared(cells: list[Device]) -> None:
    host = hosting(cells, {"a": service(instances=1)})
    host.ensure_resident("a", (0,))
    assert host.in_the_way("a", (0,)) == []
    assert host.in_the_way("a", (1,)) == [at("a", 0)]


def test_an_instance_that_is_being_served_from_is_not_evicted(cells: list[Device]) -> None:
    host = hosting(cells, {"a": 800, "b": 800}, drain_s=0.01)
    with host.serving("a", (0,)):
        assert host.in_the_way("b", (0,)) == []
        with pytest.raises(TimeoutError):
            host.ensure_resident("b", (0,), [at("a", 0)])
        assert states(host) == {"a on cell 0": "resident"} and host.held_mb(0) == 800.0
    host.ensure_resident("b", (0,), [at("a", 0)])
    assert states(host) == {"a on cell 0": "host", "b on cell 0": "resident"}


def copy(name: str, mb: float, used_at: float, **more: bool) -> Copy:
    return Copy(name=at(name, 0), mb=mb, used_at=used_at, **more)


def test_the_least_recently_used_copy_goes_first_pinned_ones_last_and_before_all_one_that_can_never_fit() -> None:
    copies = [copy("new", 40, 3), copy("old", 40, 2), copy("pinned", 40, 1, pinned=True), copy("resident", 40, 0, stays=True)]
    assert to_drop(copies, 160) == []
    assert to_drop(copies, 130) == [at("old", 0)]
    assert to_drop(copies, 100) == [at("old", 0), at("new", 0)]
    assert to_drop(copies, 50) == [at("old", 0), at("new", 0), at("pinned", 0)]
    assert to_drop([copy("huge", 200, 9), copy("old", 40, 1)], 100) == [at("huge", 0)]
    assert to_drop([copy("large", 90, 9), copy("old", 40, 1), copy("resident", 20, 0, stays=True)], 100) == [at("large", 0)]


def test_host_memory_is_a_budget_and_what_is_dropped_is_loaded_again(cells: list[Device], caplog: pytest.LogCaptureFixture) -> None:
    host = hosting(cells, "abc", copying, host_memory_mb=700)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    host.ensure_resident("c", (0,), [at("b", 0)])
    assert (states(host)["a on cell 0"], states(host)["b on cell 0"], host.host_mb()) == ("absent", "host", 600.0)
    assert [record.message for record in caplog.records] == [
        "host memory: dropped the copy of a on cell 0, 600 MiB: the budget of host memory is 700 MiB"
    ]
    host.ensure_resident("a", (1,))
    assert (of(host, "a", 1).starts, of(host, "a", 1).restores) == (1, 0)


def test_the_copy_that_is_being_restored_is_not_dropped_for_that_of_an_evicted_one(cells: list[Device]) -> None:
    host = hosting(cells, "ab", copying, host_memory_mb=700)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    host.ensure_resident("a", (0,), [at("b", 0)])
    assert (states(host), of(host, "a").restores) == ({"a on cell 0": "resident", "b on cell 0": "absent"}, 1)


def test_a_copy_too_large_for_host_memory_is_never_made(cells: list[Device], caplog: pytest.LogCaptureFixture) -> None:
    host = hosting(cells, {"a": service(600, host_memory_mb=300.0), "b": service(600)}, copying, host_memory_mb=200)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    gone = of(host, "a")
    assert (gone.state, gone.evictions, gone.reason) == ("absent", 1, "its copy does not fit into the 200 MiB of host memory")
    assert len(caplog.records) == 1


def test_every_change_is_reported_in_order_and_is_in_the_table(cells: list[Device]) -> None:
    heard: list[InstanceStatus] = []
    host = hosting(cells, "ab", copying, host_memory_mb=1200, on_change=heard.append)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    host.ensure_resident("a", (0,), [at("b", 0)])
    host.ensure_resident("a", (0,))
    host.close()

    of_a, of_b = ([found.state for found in heard if found.name.service == service] for service in "ab")
    assert of_a == ["starting", "resident", "evicting", "host", "restoring", "resident", "absent"]
    assert of_b == ["starting", "resident", "evicting", "host", "absent"]
    for names in (of_a[:-1], of_b):
        assert all(to in SERVICE.after(start) for start, to in pairwise(names))  # type: ignore[index]
    assert [(found.memory_mb, found.host_mb) for found in heard if found.state == "host"] == [(0.0, 600.0)] * 2


def test_an_engine_that_fails_by_itself_is_reported_at_the_next_check_and_gives_its_cells_up(cells: list[Device]) -> None:
    heard: list[InstanceStatus] = []
    engine = Mortal("a", "score", 600.0)
    host = hosting(cells, "a", lambda *_: engine, on_change=heard.append)
    host.ensure_resident("a", (0,))
    host.check()
    engine.die()
    host.check()
    host.check()
    assert [found.state for found in heard] == ["starting", "resident", "failed"]
    assert host.held_mb(0) == 0.0


class Bound(Copying):
    """Cannot be restored on other devices than it left."""

    def _start(self, devices: Sequence[Device]) -> None:
        super()._start(devices)
        self.home = list(devices)

    def can_restore(self, devices: Sequence[Device]) -> bool:
        return list(devices) == self.home


def test_a_copy_that_cannot_come_onto_other_cells_waits_for_its_own_and_one_that_is_lost_is_loaded_again(cells: list[Device]) -> None:
    made: list[Bound] = []

    def factory(name: str, config: ServiceConfig, *_: object) -> Engine:
        made.append(Bound(name, "score", config.memory_mb))
        return made[-1]

    def told() -> list[tuple[str, str, int, int]]:
        return [(str(found.name), found.state, found.starts, found.restores) for found in host.status()]

    host = hosting(cells, "a", factory)
    host.ensure_resident("a", (0,))
    host.evict(at("a", 0))
    host.ensure_resident("a", (1,))
    host.ensure_resident("a", (0,))
    assert told() == [("a on cell 0", "resident", 1, 1), ("a on cell 1", "resident", 1, 0)]

    host.evict(at("a", 0))
    made[0].home = []
    host.ensure_resident("a", (0,))
    assert told()[0] == ("a on cell 0", "resident", 2, 1)


def test_a_restore_that_nobody_waits_for_is_reported_either_way(cells: list[Device]) -> None:
    heard: list[InstanceStatus] = []
    host = hosting(cells, {"a": service(600), "b": service(600, pinned=True)}, on_change=heard.append)
    restores = Prefetch(host)

    def restored(name: str) -> InstanceStatus:
        assert restores.begin(at(name, 0)) and restores.wait(60)
        assert heard[-1].name == at(name, 0)
        return heard[-1]

    assert restored("a").state == "resident"
    assert (restored("b").state, states(host)) == ("resident", {"a on cell 0": "host", "b on cell 0": "resident"})
    for name, reason in (("a", "a needs 600 MiB on cell 0, which has 1000 MiB and holds b 600"), ("x", "no service 'x' here")):
        failed = restored(name)
        assert failed.state == "failed" and reason in failed.reason


def test_an_instance_is_restored_once_at_a_time(cells: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    restores, go, start = Prefetch(hosting(cells, "a")), threading.Event(), StubEngine._start
    monkeypatch.setattr(StubEngine, "_start", lambda *words: go.wait(60) and start(*words))
    begun = [restores.begin(at("a", 0)), restores.begin(at("a", 0))]
    go.set()
    assert begun == [True, False]
    assert restores.wait(60)
    assert restores.begin(at("a", 0))
    assert restores.wait(60)


FILE = """
[services.{name}]
engine = "stub"
task = "score"
memory_mb = {memory_mb}
cells = {cells}
"""


def written(path: Path, *services: tuple[str, float, str]) -> None:
    path.write_text("".join(FILE.format(name=name, memory_mb=memory_mb, cells=cells) for name, memory_mb, cells in services))


Reloading = tuple[Path, ServiceHost, Reload]


@pytest.fixture
def reloading(cells: list[Device], tmp_path: Path) -> Reloading:
    """Return a services file that declares a and b, a host of them, and what reads the file again."""
    path = tmp_path / "services.toml"
    written(path, ("a", 600, "[1]"), ("b", 300, "[1]"))
    host = ServiceHost(cells, load_services_file(path).services, tmp_path)
    return path, host, Reload(path, host, 60.0)


def test_a_changed_file_counts_and_what_it_changes_is_started_anew_once_idle(
    reloading: Reloading, caplog: pytest.LogCaptureFixture
) -> None:
    path, host, reload = reloading
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,))

    with host.serving("b", (0,)):
        written(path, ("a", 500, "[1]"), ("c", 100, "[1]"))
        reload.check()
        reload.check()
        assert states(host) == {"a on cell 0": "absent", "b on cell 0": "resident"}
    reload.check()

    assert states(host)["b on cell 0"] == "absent"
    assert "the services file was read again; new: c; changed: a; gone: b" in caplog.text
    with pytest.raises(UnknownService):
        host.ensure_resident("b", (0,))
    host.ensure_resident("a", (0,))
    host.ensure_resident("c", (0,))
    assert host.held_mb(0) == 600.0


def test_a_copy_that_is_just_being_changed_counts_until_it_is_gone(cells: list[Device]) -> None:
    # Given two copies within a budget for two, and a third instance that is to have one
    def instance(name: str) -> Instance:
        engine = Copying(name, "score", 400.0)
        engine.start([cells[0]])
        return Instance(name=at(name, 0), config=service(400), engine=engine)

    there = [instance(name) for name in ("first", "second", "third")]
    for one in there[:2]:
        one.engine.evict()  # type: ignore[union-attr]
    budget = HostMemory(800, lambda: there, lambda one: one.engine.stop())  # type: ignore[union-attr]
    # When the copy that would go first is being changed by somebody else, then the next one goes
    with there[0].lock:
        assert budget.reserve(there[2])
    assert [one.state for one in there] == ["host", "absent", "resident"]
    # And where there is no other, the third keeps none
    with there[0].lock:
        there[2].copy_mb, there[2].config = 0.0, service(500)
        assert not budget.reserve(there[2])
    assert budget.held_mb() == 400.0


def test_an_instance_of_before_is_held_to_the_cells_that_are_declared_now(cells: list[Device]) -> None:
    host = hosting(cells, "a")
    host.ensure_resident("a", (0,))
    host.reload({"a": service(cells=[2])})
    with pytest.raises(DeviceError, match="a takes 2 cells, not 1"):
        host.ensure_resident("a", (0,))


@pytest.mark.parametrize("text", ["[services.a", "", FILE.format(name="a", memory_mb=-1, cells="[1]")])
def test_a_wrong_file_is_refused_once_and_the_old_one_stays(reloading: Reloading, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path, host, reload = reloading
    path.write_text(text)
    for _ in range(3):
        reload.check()
    assert list(host.services) == ["a", "b"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the services file is refused, the worker goes on with what it had: {path}: ")


def test_a_file_that_is_as_before_is_read_again_when_asked(reloading: Reloading, caplog: pytest.LogCaptureFixture) -> None:
    _, _, reload = reloading
    reload.check()
    assert caplog.text == ""
    reload.start()
    reload.ask()
    until(lambda: "nothing has changed" in caplog.text)
    reload.stop()


def test_callers_of_an_instance_declared_otherwise_wait_together_and_once(cells: list[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    waits, wait_idle = list[float](), Instance.wait_idle

    def noted(self: Instance, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return wait_idle(self, timeout_s)

    monkeypatch.setattr(Instance, "wait_idle", noted)
    host = hosting(cells, "a", drain_s=0.1)
    host.ensure_resident("a", (0,))

    with host.serving("a", (0,)):
        host.reload({"a": service(500)})
        with ThreadPoolExecutor(4) as pool:
            assert len(list(pool.map(lambda _: host.ensure_resident("a", (0,)), range(40)))) == 40
    # The first of each of the four threads at most, and not all forty
    assert sum(timeout_s > 0 for timeout_s in waits) <= 4
    assert host.held_mb(0) == 600.0

    host.ensure_resident("a", (0,))
    assert host.held_mb(0) == 500.0


def test_a_file_that_is_being_written_is_not_read_before_it_rests(reloading: Reloading, caplog: pytest.LogCaptureFixture) -> None:
    path, host, reload = reloading
    # Given a file that is written in place and is half there, which is a valid file by itself
    written(path, ("a", 600, "[1]"))
    reload.check()
    written(path, ("a", 600, "[1]"), ("b", 400, "[1]"))
    reload.check()
    assert (list(host.services), caplog.text) == (["a", "b"], "")
    # When it has not changed from one look to the next, it counts
    reload.check()
    assert host.services["b"].memory_mb == 400.0
    assert "the services file was read again; changed: b" in caplog.text
