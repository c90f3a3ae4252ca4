"""The budget of host memory where engines keep their copies while they are resident, as they do beside CUDA devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers_gpu.cards import Cards
from tests.workers_gpu.support import Copying, at, hosting, states, stub
from workers.gpu.devices import Device
from workers.gpu.engines.stub import StubEngine


class CopiedAtStart(StubEngine):
    """Makes its copy in host memory when it is started, as engines beside CUDA devices do, if it may; or when it is evicted."""

    copied = False

    def host_mb(self) -> float:
        return self._declared_mb if self.copied else 0.0

    def copies_at_start(self, devices: Sequence[Device]) -> bool:
        return True

    def _start(self, devices: Sequence[Device]) -> None:
        self.copied = self._declared_mb <= self._copy_mb
        super()._start(devices)

    def _evict(self) -> None:
        self.copied = True
        super()._evict()

    def _free(self) -> None:
        self.copied = False
        super()._free()


copied_at_start = partial(stub, kind=CopiedAtStart)


def test_one_that_was_started_without_a_copy_makes_it_when_it_leaves_if_there_is_room(
    cells: list[Device], caplog: pytest.LogCaptureFixture
) -> None:
    host = hosting(cells, "abc", copied_at_start, host_memory_mb=700)
    host.ensure_resident("a", (0,))

    host.ensure_resident("b", (1,))

    (record,) = caplog.records
    assert (host.host_mb(), record.message) == (600.0, "host memory: b on cell 1 keeps no copy, 600 of 700 MiB are taken")
    host.ensure_resident("c", (0,), [at("a", 0)])
    host.evict(at("b", 1))
    assert (states(host)["a on cell 0"], states(host)["b on cell 1"], host.host_mb()) == ("absent", "absent", 600.0)
    host.ensure_resident("b", (1,))
    host.evict(at("c", 0))
    host.ensure_resident("a", (0,))
    host.evict(at("b", 1))
    assert (states(host)["c on cell 0"], states(host)["b on cell 1"], host.host_mb()) == ("absent", "absent", 600.0)


swaps = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2)), max_size=20)


@given(swaps, st.integers(0, 2000))
def test_host_memory_is_never_exceeded_by_copies_that_resident_instances_keep(steps: list[tuple[str, int]], budget_mb: int) -> None:
    sizes = {"a": 300.0, "b": 500.0, "c": 700.0, "d": 900.0}
    devices = [Device(f"gpu{index}", "cuda", 1000, f"cuda:{index}") for index in range(3)]
    host = hosting(devices, sizes, copied_at_start, host_memory_mb=budget_mb, memory=Cards(total=1e9))
    for name, cell in steps:
        host.ensure_resident(name, (cell,), host.in_the_way(name, (cell,)))
        assert host.host_mb() == sum(found.host_mb for found in host.status()) <= budget_mb
        assert states(host)[f"{name} on cell {cell}"] == "resident"


class SlowToStop(Copying):
    """Has a copy in host memory while it is off its devices; its stop begins, and ends when a test asks."""

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.stopping, self.may_stop = threading.Event(), threading.Event()

    def _free(self) -> None:
        if self.state == "host":
            self.stopping.set()
            assert self.may_stop.wait(60)
        super()._free()


def test_while_a_copy_is_being_dropped_only_who_needs_its_memory_waits(cells: list[Device]) -> None:
    sizes = {"a": 600.0, "b": 600.0, "c": 100.0, "d": 100.0}
    engines = {name: SlowToStop(name, "score", size) for name, size in sizes.items()}
    host = hosting(cells, sizes, engines, host_memory_mb=700)
    # Given a copy of a, and an eviction of b, for whose copy that of a is being dropped
    host.ensure_resident("a", (0,))
    host.ensure_resident("b", (0,), [at("a", 0)])
    host.ensure_resident("c", (1,))
    with ThreadPoolExecutor(2) as pool:
        b = pool.submit(host.evict, at("b", 0))
        assert engines["a"].stopping.wait(60)
        # When c is evicted, whose copy fits as soon as that of a has gone, and d is started
        c = pool.submit(host.evict, at("c", 1))
        try:
            # Then d, which needs none of that memory, does not wait
            ready = Thread(target=host.ensure_resident, args=("d", (0,)), daemon=True)
            ready.start()
            ready.join(60)
            assert not ready.is_alive()
            assert not b.done() and not c.done()
        finally:
            engines["a"].may_stop.set()
        b.result(60)
        c.result(60)
    # And b and c get their copies once a has gone
    assert states(host) == {"a on cell 0": "absent", "b on cell 0": "host", "c on cell 1": "host", "d on cell 0": "resident"}
    assert host.host_mb() == 700
