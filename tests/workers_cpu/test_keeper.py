"""A fork server that the worker does not fork: workers come to it as successors do, and it ends what it keeps when none comes any more."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.cpu.base import take_base
from workers.cpu.docker.keeper_container import MODULE
from workers.cpu.handover.fork_client import ENVIRONMENT, PYTHON, ForkClient
from workers.cpu.handover.protocol import Kept, take_over

from .support import until

KEEP_S, WAIT_S = 120.0, 60.0


class Worker:
    """A worker in the folder `base` that has its fork server started elsewhere."""

    def __init__(self, base: Path, keep_s: float = KEEP_S) -> None:
        self.base, self.keep_s = base, keep_s
        self.keepers: list[subprocess.Popen[bytes]] = []
        self.lock, self.cleanup, self.kept = take_base(base, (), keep_s)
        self.keep_again: Callable[[], object] = lambda: None
        self.client = ForkClient(self.cleanup, base, keep_s, self.kept, lambda: self.keep_again(), start_keeper=self.start_keeper)

    def start_keeper(self) -> Kept:
        self.keepers.append(subprocess.Popen([*PYTHON, MODULE, str(self.keep_s), str(self.base)], env=ENVIRONMENT))
        found: list[Kept | None] = []
        assert until(lambda: found.append(take_over(self.base, self.keep_s, print)) or found[-1])
        kept = found[-1]
        assert kept is not None
        return kept

    def keep(self, name: str) -> tuple[int, Path]:
        """Have an end of a container be kept; return the other end, and the file that lets it go on."""
        (reading, writing), (dropped, other) = os.pipe(), os.pipe()
        (frozen := self.base / f"freezer of {name}").touch()
        self.client.keep("e", name, {"alive": writing}, in_container=True, thawing=(str(frozen), "THAWED"))
        # What is dropped after it says that the keeper has it, and goes on where it was paused, so that it can end.
        (goes_on := self.base / "freezer of dropped").write_text("")
        self.client.keep("e", "dropped", {"alive": other}, in_container=True, thawing=(str(goes_on), "THAWED"))
        self.client.keep("e", "dropped", {}, in_container=True)
        for descriptor in (writing, other):
            os.close(descriptor)
        assert is_over(dropped) and goes_on.read_text() == "THAWED" and frozen.read_text() == ""
        os.close(dropped)
        return reading, frozen

    def ends(self) -> list[str]:
        assert self.kept is not None
        return [end.control for end in self.kept.ends]

    def die(self) -> None:
        """Leave all to the next one, as after kill -9."""
        assert self.client._channel is not None
        self.client._channel.close()
        for descriptor in (self.lock, self.cleanup):
            os.close(descriptor)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    made.client.start()
    yield made
    for keeper in made.keepers:
        keeper.kill()
        keeper.wait(WAIT_S)


def is_over(reading: int, limit_s: float = WAIT_S) -> bool:
    """Say whether nobody has the writing end of a pipe any more."""
    poller = select.poll()
    poller.register(reading, 0)
    return bool(poller.poll(limit_s * 1000))


def is_locked(base: Path) -> bool:
    """Say whether somebody holds the lock of cleanup."""
    with open(base / "cleanup") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_next_worker_has_what_the_first_one_left_and_the_end_of_all_ends_the_keeper(worker: Worker) -> None:
    # Given a worker that comes to a keeper as its first, and has nothing yet
    reading, frozen = worker.keep("left")
    assert is_locked(worker.base) and not is_over(reading, 0)
    # When it dies; then the next one has what is kept, and the lock
    worker.die()
    following = Worker(worker.base)
    assert following.ends() == ["left"] and not following.keepers and is_locked(worker.base)
    # When that closes all; then the keeper ends, and what it kept with it
    (end,) = following.kept.ends if following.kept is not None else ()
    assert (end.environment, end.name) == ("e", "alive")
    end.close()
    assert not is_over(reading, 0)
    following.client.close()
    assert worker.keepers[0].wait(WAIT_S) == 0
    assert is_over(reading) and frozen.read_text() == "THAWED"


@pytest.mark.parametrize("worker_lives", [True, False])
def test_a_keeper_that_is_told_to_end_ends_what_it_keeps(worker: Worker, worker_lives: bool) -> None:
    reading, frozen = worker.keep("kept")
    if not worker_lives:
        worker.die()
    worker.keepers[0].send_signal(signal.SIGTERM)
    assert worker.keepers[0].wait(WAIT_S) == 0
    # Then what was paused has gone on, so that it could end, and what would have come for it finds nothing
    assert is_over(reading) and frozen.read_text() == "THAWED"
    if not worker_lives:
        assert Worker(worker.base).kept is None


def test_a_keeper_that_no_worker_comes_to_ends_what_it_keeps(tmp_path: Path) -> None:
    worker = Worker(tmp_path, keep_s=0.5)
    worker.client.start()
    reading, frozen = worker.keep("kept")
    worker.die()
    assert worker.keepers[0].wait(WAIT_S) == 0
    assert is_over(reading) and frozen.read_text() == "THAWED" and not is_locked(tmp_path)


def test_a_keeper_that_was_killed_has_a_successor_which_keeps_what_comes_from_then_on(worker: Worker) -> None:
    first, _ = worker.keep("first")
    worker.keepers[0].kill()
    worker.keepers[0].wait(WAIT_S)
    second, _ = worker.keep("second")
    assert len(worker.keepers) == 2 and is_over(first) and not is_over(second, 0) and is_locked(worker.base)
    worker.die()
    assert Worker(worker.base).ends() == ["second"]


def test_what_is_kept_already_is_not_taken_for_a_stream_that_something_left_writes_to(worker: Worker) -> None:
    os.mkfifo(path := worker.base / "out")
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    for _ in range(2):
        worker.client.keep("e", "session", {"out": reading}, in_container=True)
    worker.keep("last")
    worker.die()
    following = Worker(worker.base)
    assert following.ends() == ["session", "last"]
    os.close(reading)


def test_once_another_keeper_is_there_the_worker_is_asked_to_have_all_kept_again(worker: Worker) -> None:
    readings = list[int]()
    worker.keep_again = lambda: readings.append(worker.keep("again")[0])
    worker.keepers[0].kill()
    worker.keepers[0].wait(WAIT_S)
    worker.client.start()
    assert len(readings) == 1 and not is_over(readings[0], 0)
    worker.die()
    assert Worker(worker.base).ends() == ["again"]
