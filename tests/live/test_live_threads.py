"""The threads of a worker at a limit on processes."""

from __future__ import annotations

import os
import signal
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals

from workers.shutdown import Shutdown
from workers.threads import TaskPool


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_comes_when_no_thread_can_be_started_waits_for_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a pool that gets no thread but the first
    pool, go_on, ended = TaskPool(limit=8), threading.Event(), SimpleQueue[str]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        pool.on_apply(lambda: go_on.wait(60) and "first", (), {}, callback=ended.put)
        for name in ("second", "third"):
            pool.on_apply(lambda name=name: name, (), {}, callback=ended.put)
    # Then what came meanwhile follows
    go_on.set()
    assert [ended.get(timeout=60) for _ in range(3)] == ["first", "second", "third"]
    pool.on_stop()


def test_a_worker_hands_over_and_leaves_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleQueue[object]()
    parts: Any = SimpleNamespace(hand_over=done.put, leave=lambda: done.put("left"), close=lambda: None)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    shutdown = Shutdown(parts, parts, parts, 60.0, lambda: True)
    try:
        shutdown.take_signals()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for limit_s in (60.0, 0.0):
            os.kill(os.getpid(), signal.SIGTERM)
            assert done.get(timeout=60) == limit_s
        signals.worker_shutting_down.send(None)
        assert done.get(timeout=60) == "left"
    finally:
        signals.worker_shutting_down.disconnect(shutdown._leave)
        signal.signal(signal.SIGTERM, before)
