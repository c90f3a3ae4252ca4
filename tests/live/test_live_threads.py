"""The threads of a worker at a limit on processes."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from workers.threads import TaskPool


def test_what_comes_when_no_thread_can_be_started_waits_for_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    # Given a pool whose only thread is busy
    pool, go_on, ended = TaskPool(limit=8), threading.Event(), SimpleQueue[str]()
    pool.on_apply(lambda: go_on.wait(60) and "first", (), {}, callback=ended.put)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for name in ("second", "third"):
            pool.on_apply(lambda name=name: name, (), {}, callback=ended.put)
    # Then what came meanwhile follows
    go_on.set()
    assert [ended.get(timeout=60) for _ in range(3)] == ["first", "second", "third"]
    pool.on_stop()
