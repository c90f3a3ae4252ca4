"""Servers that end at the worst moment or keep their memory, answers that end half-way, many at once: what engines and hosts make of it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.services_file import ServiceConfig
from tests.vllm.fakes import CUDA, Fake, gone, until, when
from workers.gpu.call_control import CallControl
from workers.gpu.engines.vllm import guard
from workers.gpu.engines.vllm.server import Server
from workers.gpu.errors import CallCancelled, EngineDied, EngineFailed
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus

pytestmark = pytest.mark.real

ITEMS = [{"prompt": "a", "response": "b"}]


def open_files() -> set[str]:
    """Return what this process has open; each socket and pipe has a name of its own."""
    return {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has ended is waited for as long as a busy machine needs to say how."""
    monkeypatch.setattr("workers.gpu.engines.vllm.engine._END_S", 60.0)


def test_a_server_that_ends_as_it_falls_asleep_leaves_a_failed_engine_that_says_why(fake: Fake) -> None:
    engine = fake.started()
    fake.be("die", "/sleep")
    with pytest.raises(EngineFailed, match="ended by itself with exit code 1"):
        engine.evict()
    assert (engine.state, engine.memory_mb()) == ("failed", 0.0) and "exit code 1" in engine.failure
    engine.start(CUDA[:1])
    assert len(engine.score(ITEMS)) == 1


def test_an_answer_that_ends_half_way_is_none_and_one_that_stops_there_can_be_cancelled(fake: Fake) -> None:
    engine = fake.started()
    fake.be("half")
    control = CallControl()
    when(lambda: fake.journal().count("half") == 1, control.cancelled.set)
    with pytest.raises(CallCancelled):
        engine.score(ITEMS, control)
    until(lambda: "closed by the caller" in fake.journal())
    assert engine.state == "resident"
    when(lambda: fake.journal().count("half") == 2, lambda: fake.no_longer("half"))
    with pytest.raises(EngineDied, match="exit code 1"):
        engine.score(ITEMS)
    assert engine.state == "failed"


def test_a_server_that_answers_nonsense_about_its_sleep_is_not_woken_but_started_anew(fake: Fake) -> None:
    engine = fake.started()
    engine.evict()
    fake.be("nonsense")
    assert not engine.can_restore(CUDA[:1])
    fake.no_longer("nonsense")
    assert engine.can_restore(CUDA[:1])


def test_a_server_that_cannot_be_ended_is_failed_and_its_calls_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.started()
    stop = Server.stop

    def stuck(server: Server) -> None:
        raise TimeoutError("process 1 cannot be ended")

    monkeypatch.setattr(Server, "stop", stuck)
    monkeypatch.setattr("workers.gpu.engines.vllm.engine._END_S", 0.0)
    fake.be("asleep")
    with pytest.raises(EngineDied, match=r"cannot be ended; .*nobody here asked it to"):
        engine.score(ITEMS)
    # What it holds is still counted, and no other is started beside it
    assert engine.state == "failed" and engine.memory_mb() == 8000.0
    with pytest.raises(EngineFailed, match="cannot be ended"):
        engine.start(CUDA[:1])
    assert len(fake.servers()) == 1
    monkeypatch.setattr(Server, "stop", stop)
    fake.no_longer("asleep")
    engine.start(CUDA[:1])
    assert len(engine.score(ITEMS)) == 1 and gone(fake.servers()[0])


def test_a_storm_of_calls_and_cancellations_leaves_nothing_running(fake: Fake) -> None:
    engine = fake.started(max_concurrency=32)
    wanted = engine.score(ITEMS)
    threads, files = set(threading.enumerate()), open_files()

    def call(index: int) -> list[float] | None:
        control = CallControl()
        if index % 3:
            threading.Timer(0.001 * (index % 17), control.cancelled.set).start()
        try:
            return engine.score(ITEMS, control)
        except CallCancelled:
            return None

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(call, range(150)))
    assert all(answer == wanted for answer in answers if answer is not None) and all(answers[::3])
    assert engine.running == 0
    # Few connections are kept for the next calls
    until(lambda: set(threading.enumerate()) <= threads and len(open_files() - files) <= 8)


def test_a_server_that_cannot_be_started_leaves_no_folder(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    with pytest.raises(OSError):
        Server(tmp_path / "nowhere" / "log", lambda socket: ["true"], {})
    with pytest.raises(ValueError):
        Server(tmp_path / "log", lambda socket: ["null\0byte"], {})
    assert not list((tmp_path / "t").iterdir())


def test_a_server_is_there_though_temporary_files_have_a_long_path(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("t" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    engine = fake.started()
    assert len(engine.score(ITEMS)) == 1 and not list(long.iterdir())


def test_a_server_quotes_its_own_log_beside_another_of_the_same_name(tmp_path: Path) -> None:
    def server(words: str) -> Server:
        return Server(tmp_path / "log", lambda socket: ["sh", "-c", f"echo 'ValueError: {words}'; exit 3"], {"PATH": "/usr/bin:/bin"})

    first = server("the first")
    assert first.ended(60.0) == "exit code 3"
    second = server("the second")
    assert second.ended(60.0) == "exit code 3"
    assert "the first" in first.tail() and "the second" in second.tail()


def test_a_log_is_bounded_and_keeps_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab") as output:
        for number in range(2000):
            output.write(b"line %06d\n" % number)
            output.flush()
            guard.bound_log(output.fileno(), most=4096)
            assert log.stat().st_size <= 4096 + 12
    lines = log.read_text().splitlines()
    assert lines[-1] == "line 001999" and len(lines) > 100
    assert "cut" in lines[0] and all(line.startswith("line ") for line in lines[1:])


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
