"""Servers that keep their memory, or end by themselves: what the host of services makes of them, and what is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from app.services_file import ServiceConfig
from tests.vllm.fakes import CUDA, Fake, gone, until
from workers.gpu.errors import EngineDied
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus

pytestmark = pytest.mark.real

ITEMS = [{"prompt": "a", "response": "b"}]


def made(fake: Fake, folder: Path, services: dict[str, ServiceConfig], **more: Any) -> ServiceHost:
    return ServiceHost(CUDA, services, folder, factory=fake.make, drain_s=60.0, memory=fake.memory, **more)


@pytest.fixture
def host(fake: Fake, tmp_path: Path) -> ServiceHost:
    return made(fake, tmp_path, {"rm": fake.config()})


def evict(host: ServiceHost, cell: int = 0) -> None:
    """Have the host take the service off a cell."""
    host.evict(InstanceName("rm", (cell,)))


def on(host: ServiceHost, cell: int = 0) -> InstanceStatus:
    """Return how the service stands on a cell."""
    return next(status for status in host.status() if status.name.cells == (cell,))


def score(host: ServiceHost) -> list[float]:
    """Ask the service as it is."""
    return host.run("rm", (0,), lambda engine: engine.score(ITEMS))


def test_a_server_that_keeps_its_memory_is_killed_and_counted(fake: Fake, host: ServiceHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gpu.engines.vllm.engine._FREE_S", 0.2)
    host.ensure_resident("rm", (0,))
    fake.be("lie")
    evict(host)
    status = on(host)
    assert (status.state, status.leaks, status.evictions, status.memory_mb, status.reserved) == ("absent", 1, 1, 0.0, False)
    assert gone(fake.servers()[0]) and gone(fake.read("child"))


@pytest.mark.parametrize("evicted", [False, True])
def test_a_server_that_dies_while_nobody_asks_it_is_noticed_and_started_again(fake: Fake, host: ServiceHost, evicted: bool) -> None:
    host.ensure_resident("rm", (0,))
    if evicted:
        evict(host)
    os.kill(fake.servers()[0], signal.SIGKILL)
    until(lambda: on(host).state == "failed")
    assert "ended by itself with signal SIGKILL" in on(host).reason
    assert on(host).memory_mb == 0.0 and gone(fake.read("child"))
    host.ensure_resident("rm", (0,))
    assert (on(host).state, on(host).starts) == ("resident", 2)


@pytest.mark.parametrize(
    ("how", "silent_s", "said"),
    [
        ("headless", 20.0, r"was killed: it does not answer and says that it is not well \(503\)"),
        ("mute", 0.2, r"was killed: it does not answer and has not said for 0.2 s how it is"),
    ],
)
def test_a_server_that_listens_on_though_what_computes_has_died_is_killed(
    fake: Fake, host: ServiceHost, monkeypatch: pytest.MonkeyPatch, how: str, silent_s: float, said: str
) -> None:
    host.ensure_resident("rm", (0,))
    fake.be(how)
    # Starts keep their patience: on a busy machine a server that is well may be silent for a moment.
    with monkeypatch.context() as impatient:
        for name, limit_s in (("engine._END_S", 0.1), ("api._WATCH_S", 0.1), ("api.SILENT_S", silent_s)):
            impatient.setattr(f"workers.gpu.engines.vllm.{name}", limit_s)
        with pytest.raises(EngineDied, match=said):
            score(host)
    assert gone(fake.servers()[0])
    fake.no_longer(how)
    host.ensure_resident("rm", (0,))
    assert len(score(host)) == 1


@pytest.fixture
def small_host(fake: Fake, tmp_path: Path) -> ServiceHost:
    """Return a host that has memory for the processes of a sleeping server, and not for its weights."""
    return made(fake, tmp_path, {"rm": fake.config(host_memory_mb=5000.0)}, host_memory_mb=1000.0)


def test_a_server_whose_copy_has_no_room_in_host_memory_drops_its_weights_and_reads_them_again(fake: Fake, small_host: ServiceHost) -> None:
    small_host.ensure_resident("rm", (0,))
    before = score(small_host)
    evict(small_host)
    small_host.ensure_resident("rm", (0,))
    changes = ["sleep /sleep?level=2&mode=wait", "wake /wake_up?tags=weights", "rpc reload_weights", "wake /wake_up?tags=kv_cache"]
    assert fake.noted("sleep", "wake", "rpc") == changes
    assert (on(small_host).restores, on(small_host).starts, score(small_host)) == (1, 1, before)


def test_a_server_with_an_adapter_is_stopped_where_its_copy_has_no_room(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    given = [{"adapter": tmp_path / "adapter"}, {"vllm": {"args": ["--enable_lora"]}}]
    services = {f"rm{number}": fake.config(host_memory_mb=5000.0, **more) for number, more in enumerate(given)}
    host = made(fake, tmp_path, services, host_memory_mb=1000.0)
    for name in services:
        host.ensure_resident(name, (0,))
        host.evict(InstanceName(name, (0,)))
        assert {status.name.service: status.state for status in host.status()}[name] == "absent"
    assert not fake.noted("sleep")


@pytest.mark.parametrize("fault", ["die /wake_up", "die /collective_rpc", "die /classify", "unreadable"])
def test_a_server_that_ends_or_cannot_read_its_weights_while_it_is_woken_is_started_again_for_the_same_action(
    fake: Fake, small_host: ServiceHost, fault: str
) -> None:
    small_host.ensure_resident("rm", (0,))
    before = score(small_host)
    evict(small_host)
    fake.be(*fault.split())
    small_host.ensure_resident("rm", (0,))
    status = on(small_host)
    assert (status.starts, status.restores, status.wrong_answers, score(small_host)) == (2, 0, 0, before) and gone(fake.servers()[0])
