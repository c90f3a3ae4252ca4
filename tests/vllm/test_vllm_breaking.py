"""Servers that end at the worst moment, answers that end half-way, many at once, and what is left of it all."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.fakes import CUDA, Fake, gone, until, when
from workers.gpu.call_control import CallControl
from workers.gpu.engines.vllm import guard
from workers.gpu.engines.vllm.server import Server
from workers.gpu.errors import CallCancelled, EngineDied, EngineFailed

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
        answers = list(pool.map(call, range(300)))
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
