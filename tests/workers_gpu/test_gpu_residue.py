"""What servers keep of shared devices while they sleep: measured by the change, learned, booked, and taken for a leak when it grows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services_file import ServiceConfig
from tests.workers_gpu.cards import Cards, Server, gpu
from tests.workers_gpu.support import at, hosting, of, service
from workers.gpu.devices import Device
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import DeviceError, OverBudget
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceStatus
from workers.gpu.reload import described


def hosting_servers(cards: Cards, *servers: StubEngine, gpus: int = 1, settle_s: float = 0.0, **more: object) -> ServiceHost:
    """Return a host whose services have these engines, and are declared as these say."""
    devices = [gpu(number, int(cards.total)) for number in range(gpus)]
    engines = {server.name: server for server in servers}
    sizes = {server.name: server._declared_mb for server in servers}
    return hosting(devices, sizes, engines, memory=cards, settle_s=settle_s, **more)


def cycle(host: ServiceHost, name: str, *cells: int) -> InstanceStatus:
    """Bring a service onto cells and take it off again."""
    host.ensure_resident(name, cells or (0,))
    host.evict(at(name, *(cells or (0,))))
    return of(host, name)


@pytest.mark.parametrize("ids_match", [True, False])
def test_a_server_on_two_devices_is_measured_on_each_and_booked_with_the_larger(ids_match: bool) -> None:
    cards = Cards(10_000, ids_match=ids_match)

    class Uneven(Server):
        """Keeps more of the first device than of the second."""

        def keeps_mb(self, device: Device) -> float:
            return 1500.0 if device.uuid == "GPU-0" else 900.0

    host = hosting_servers(cards, Uneven("a", 5000, cards), gpus=2)
    host.ensure_resident("a", (0, 1))
    host.evict(at("a", 0, 1))
    assert (host.held_mb(0), host.held_mb(1), of(host, "a").memory_mb) == (1500.0, 1500.0, 2400.0)


def test_the_first_sleeps_set_the_residue_and_a_later_one_that_keeps_more_is_a_leak() -> None:
    cards = Cards(10_000, ids_match=True)
    a = Server("a", 6000, cards)
    host = hosting_servers(cards, a)

    booked = []
    for residue_mb in (1000, 1400, 1200, 1900, 1100, 1913):
        a.residue_mb = residue_mb
        assert cycle(host, "a").leaks == (1 if residue_mb > 1912 else 0)
        booked.append(host.held_mb(0))
    # Given residues that stay within 512 MiB of the largest of the first three, that is booked, or more where more is kept
    assert booked == [1000, 1400, 1400, 1900, 1400, 0]
    leaked = of(host, "a")
    assert (leaked.state, leaked.reason) == ("absent", "it leaks: evicted, it keeps 1913 MiB of a cell, and 1400 in its first evictions")
    # And it is started afresh at its next use
    host.ensure_resident("a", (0,))
    assert (of(host, "a").starts, of(host, "a").state) == (2, "resident")


def test_where_only_the_device_can_be_measured_a_leak_is_what_shows_twice() -> None:
    cards = Cards(20_000)
    a = Server("a", 6000, cards, residue_mb=1000)
    host = hosting_servers(cards, a)
    for _ in range(3):
        cycle(host, "a")
    a.residue_mb = 2000
    assert (cycle(host, "a").leaks, host.held_mb(0)) == (0, 2000.0)
    a.residue_mb = 1000
    assert cycle(host, "a").leaks == 0
    a.residue_mb = 2000
    assert [cycle(host, "a").leaks, cycle(host, "a").leaks] == [0, 1]


def test_a_server_that_woke_while_another_ended_on_its_device_is_not_taken_for_one_that_frees_nothing() -> None:
    # Given a device that can only be measured as a whole
    cards = Cards(20_000)
    b = Server("b", 5900, cards)

    class Wakes(Server):
        """Wakes just as the other server ends."""

        def _restore(self, devices: Sequence[Device]) -> None:
            self._have(lambda device: b.die() or self.awake_mb)

    a = Wakes("a", 6000, cards, assumed_mb=500.0)
    host = hosting_servers(cards, a, b)
    cycle(host, "a")
    host.ensure_resident("b", (0,))
    # And a server that is measured to hold 100 MiB, since the other one has freed the rest
    host.ensure_resident("a", (0,))
    assert a.held_mb() == (100.0,)
    # When it sleeps and more becomes free than that
    host.evict(at("a", 0))
    host.check()
    # Then it is assumed to keep some memory, which is no leak
    assert (of(host, "a").state, of(host, "a").leaks, host.held_mb(0)) == ("host", 0, 500.0)


def test_an_eviction_that_frees_nothing_stops_the_server() -> None:
    cards = Cards(10_000)
    a = Server("a", 6000, cards, residue_mb=5500)
    host = hosting_servers(cards, a, Server("b", 6000, cards))
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    assert (of(host, "a").state, of(host, "a").leaks, of(host, "b").state) == ("absent", 1, "resident")
    assert of(host, "a").reason == "its eviction did not free the memory of its cells: it keeps 5500 of 6000 MiB"
    assert (host.held_mb(0), cards.used["GPU-0"]) == (6000.0, 6000.0)


def test_a_start_waits_for_memory_that_a_device_does_not_report_as_free_yet() -> None:
    cards = Cards(10_000, used={"GPU-0": 6000.0})
    host = hosting_servers(cards, Server("a", 5000, cards), settle_s=30.0)
    timer = threading.Timer(0.2, cards.take, (gpu(), -6000.0))
    timer.start()
    host.ensure_resident("a", (0,))
    assert (of(host, "a").state, cards.used["GPU-0"]) == ("resident", 5000.0)


def test_a_device_that_cannot_be_read_fails_the_change_and_nothing_stays_booked_that_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(10_000)
    host = hosting_servers(cards, Server("a", 5000, cards))
    host.ensure_resident("a", (0,))
    with monkeypatch.context() as lost:
        lost.setattr(cards, "used_mb", Mock(side_effect=DeviceError("GPU is lost")))
        host.evict(at("a", 0))
        assert (of(host, "a").state, "GPU is lost" in of(host, "a").reason, host.held_mb(0)) == ("failed", True, 0.0)
        with pytest.raises(DeviceError, match="GPU is lost"):
            host.ensure_resident("a", (0,))
        assert host.held_mb(0) == 0.0
    host.ensure_resident("a", (0,))
    assert (of(host, "a").state, of(host, "a").starts, host.held_mb(0)) == ("resident", 2, 5000.0)


def test_memory_that_others_took_costs_a_sleeper_and_then_is_refused_with_figures() -> None:
    cards = Cards(10_000)
    a, b = Server("a", 5000, cards, residue_mb=1500), Server("b", 5000, cards)
    host = hosting_servers(cards, a, b)
    cycle(host, "a")
    # Given a program that nobody here knows, beside which b fits once the sleeper has gone
    cards.take(gpu(), 4000)
    host.ensure_resident("b", (0,))
    assert (of(host, "a").state, of(host, "b").state) == ("absent", "resident")
    # When it takes more, then what wants to come is refused, and nothing is booked for it
    host.evict(at("b", 0))
    cards.take(gpu(), 2000)
    with pytest.raises(OverBudget, match=r"b needs 4700 MiB on cell 0, and of the 10000 MiB of cuda:0 \(made up\) 3700 are free"):
        host.ensure_resident("b", (0,))
    assert (of(host, "b").state, host.held_mb(0)) == ("host", 300.0)
    cards.take(gpu(), -2000)
    host.ensure_resident("b", (0,))
    assert of(host, "b").restores == 1


def test_changes_on_a_device_come_one_after_another_and_those_of_other_devices_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(10_000)
    begun, go = threading.Event(), threading.Event()
    a, b, c = (Server(name, 4000, cards) for name in "abc")
    start = a._start
    monkeypatch.setattr(a, "_start", lambda devices: (begun.set(), go.wait(60), start(devices)))
    host = hosting_servers(cards, a, b, c, gpus=2)
    host.ensure_resident("b", (0,))
    with ThreadPoolExecutor(2) as pool:
        comes = pool.submit(host.ensure_resident, "a", (0,))
        assert begun.wait(30)
        # When an instance of the same device is to leave while a is started, it waits
        leave = pool.submit(host.evict, at("b", 0))
        host.ensure_resident("c", (1,))
        assert (of(host, "b").state, leave.done(), comes.done()) == ("resident", False, False)
        go.set()
        comes.result(30)
        leave.result(30)

    assert (of(host, "a").memory_mb, of(host, "b").memory_mb, of(host, "c").memory_mb) == (4000.0, 300.0, 4000.0)


def test_a_server_that_takes_more_than_declared_is_booked_with_that(caplog: pytest.LogCaptureFixture) -> None:
    cards = Cards(10_000)
    a, b = Server("a", 5000, cards, held_mb=5600), Server("b", 4700, cards)
    host = hosting_servers(cards, a, b)

    host.ensure_resident("a", (0,))

    assert host.held_mb(0) == 5600.0
    assert "a on cell 0 holds 5600 MiB of a cell and declares 5000: declare services.a.memory_mb = 5600" in caplog.text
    # And from then on the scheduler plans with it, and the worker makes room for it
    assert {name: said["memory_mb"] for name, said in described(host).items()} == {"a": 5632.0, "b": 4700.0}
    assert host.in_the_way("b", (0,)) == [at("a", 0)]
    host.ensure_resident("b", (0,), [at("a", 0)])
    assert host.in_the_way("a", (0,)) == [at("b", 0)]
    with pytest.raises(OverBudget, match="a needs 5600 MiB on cell 0, which has 10000 MiB and holds b 4700"):
        host.ensure_resident("a", (0,))


def test_what_a_vllm_server_takes_on_top_is_to_be_declared_as_that_of_its_process(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    cards = Cards(10_000)
    config = service(5000.0, engine="vllm", model=tmp_path, vllm={"process_mb": 1000.0})
    host = hosting([gpu()], {"a": config}, {"a": Server("a", 5000, cards, held_mb=5600)}, memory=cards)
    host.ensure_resident("a", (0,))
    assert "declare services.a.vllm.process_mb = 1600" in caplog.text


def test_a_server_that_would_overrun_its_cell_is_refused() -> None:
    cards = Cards(10_000)
    host = hosting_servers(cards, Server("a", 5000, cards, held_mb=5600), Server("b", 4700, cards))
    host.ensure_resident("b", (0,))
    with pytest.raises(Exception, match=r"it holds 5600\.0 MiB on a device and may hold 5300"):
        host.ensure_resident("a", (0,))
    assert (of(host, "a").state, host.held_mb(0), cards.used["GPU-0"]) == ("failed", 4700.0, 4700.0)


def test_a_server_whose_copy_has_no_room_in_host_memory_leaves_without_one() -> None:
    cards = Cards(10_000)
    a, b = Server("a", 5000, cards), Server("b", 5000, cards)
    host = hosting_servers(cards, a, b, host_memory_mb=100.0)
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    assert (of(host, "a").state, a.copied, host.host_mb()) == ("host", [False], 50.0)
    host.ensure_resident("a", (0,), [at("b", 0)])
    assert (of(host, "a").restores, of(host, "b").state, b.copied) == (1, "host", [False])


@pytest.mark.parametrize("noticed", [True, False])
def test_a_sleeper_that_dies_keeps_nothing_and_is_in_nobodys_way(noticed: bool) -> None:
    cards = Cards(10_000)
    a, b = Server("a", 5000, cards, residue_mb=3000), Server("b", 9000, cards)
    host = hosting_servers(cards, a, b)
    cycle(host, "a")
    assert (of(host, "a").leaks, host.held_mb(0)) == (0, 3000.0)
    a.die()
    if noticed:
        host.check()
        assert (of(host, "a").state, host.held_mb(0), cards.used["GPU-0"]) == ("failed", 0.0, 0.0)
    host.ensure_resident("b", (0,))
    assert (of(host, "a").state, of(host, "b").state, host.held_mb(0)) == ("failed", "resident", 9000.0)


steps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.integers(0, 500), st.integers(-400, 400)), max_size=40)


@given(steps, st.booleans())
def test_whatever_comes_and_goes_no_healthy_server_is_taken_for_a_leak_and_every_cell_is_booked_with_what_it_holds(
    steps: list[tuple[str, int, int, int]], ids_match: bool
) -> None:
    """Four services on memory for two, whose residues differ by cycle, beside programs that take memory and give it back."""
    cards = Cards(10_000, used={f"GPU-{number}": 500.0 for number in range(2)}, ids_match=ids_match)
    made: list[Server] = []

    def factory(name: str, config: ServiceConfig, *_: object) -> Server:
        made.append(Server(name, config.memory_mb, cards, residue_mb=700))
        return made[-1]

    cells = [gpu(number, 9000) for number in range(2)]
    host = hosting(cells, dict.fromkeys("abcd", 6000.0), factory, memory=cards, settle_s=0.0)
    for name, cell, residue_mb, others_mb in steps:
        for server in made:
            server.residue_mb = 700 + residue_mb
        cards.take(gpu(cell), others_mb - cards.held.get((f"GPU-{cell}", 1), 0.0))
        host.ensure_resident(name, (cell,), host.in_the_way(name, (cell,)))
        assert next(found for found in host.status() if found.name == at(name, cell)).state == "resident"

    assert all(found.leaks == 0 for found in host.status())
    for cell in range(2):
        ours = sum(mb for (uuid, pid), mb in cards.held.items() if uuid == f"GPU-{cell}" and pid != 1)
        assert ours <= host.held_mb(cell) <= 9000.0
    host.close()
    assert sum(mb for (_, pid), mb in cards.held.items() if pid != 1) == 0.0
