"""Calls in engines: how many at a time, what a cancellation ends, and what becomes of them when the engine is to leave."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.kinds import CPUS, Kind, engines
from tests.engines.waiting import until
from workers.gpu.call_control import CallControl
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import CallCancelled, EngineBusy, NotResident, forget_locals
from workers.gpu.items import ScoreItem

ITEMS = [{"prompt": "p", "response": "r" * length} for length in (1, 20, 40)]


@engines(made=True)
def test_a_cancelled_call_ends_whether_it_is_computed_or_waits_for_its_turn(kind: Kind) -> None:
    engine, controls = kind.started(max_concurrency=1), [CallControl(), CallControl()]
    with kind.holding() as release, ThreadPoolExecutor(2) as pool:
        computed = pool.submit(engine.score, ITEMS, controls[0])
        until(lambda: engine.running == 1)
        waits = pool.submit(engine.score, ITEMS, controls[1])

        controls[1].cancelled.set()
        with pytest.raises(CallCancelled):
            waits.result(60)
        controls[0].cancelled.set()
        if not kind.can.cancels_at_once:
            release()
        with pytest.raises(CallCancelled):
            computed.result(60)
        until(lambda: engine.running == 0)
    assert len(engine.score(ITEMS)) == 3


@engines(made=True)
def test_an_eviction_waits_for_running_calls_and_refuses_further_ones(kind: Kind) -> None:
    engine = kind.started(max_concurrency=2)
    held_mb = engine.memory_mb()
    with kind.holding() as release, ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(engine.score, ITEMS) for _ in range(2)]
        until(lambda: engine.running == 2)
        # One that may not wait so long leaves everything as it is
        for change in (engine.evict, engine.stop):
            with pytest.raises(EngineBusy, match="still running"):
                change(0.01)
            assert engine.state == "resident"
        eviction = pool.submit(engine.evict)
        until(lambda: engine.state == "evicting")
        with pytest.raises(NotResident, match="evicting"):
            engine.score(ITEMS)
        assert engine.memory_mb() == held_mb and not eviction.done()
        release()
        eviction.result(60)
        assert [len(call.result(60)) for call in calls] == [3, 3]
    assert (engine.state, engine.memory_mb()) == ("host", kind.can.keeps_mb)


def test_never_more_calls_run_than_the_service_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an engine for three calls at a time, of which three leave together
    engine, room, three = StubEngine("stub", "score", 100.0, 3), threading.Semaphore(3), threading.Barrier(3)

    def score(items: list[ScoreItem], control: CallControl) -> list[float]:
        assert room.acquire(blocking=False)
        three.wait(60)
        room.release()
        return [0.5]

    monkeypatch.setattr(engine, "_score", score)
    engine.start(CPUS[:1])
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda _: engine.score(ITEMS), range(60))) == [[0.5]] * 60
    assert engine.running == 0


def test_changes_and_calls_from_many_threads_lose_no_call_and_end_settled() -> None:
    engine = StubEngine("stub", "score", 100.0, 4)
    engine.start(CPUS[:1])
    stop = threading.Event()
    answered: list[float] = []

    def work() -> None:
        while not stop.is_set():
            try:
                answered.extend(engine.score(ITEMS[:1]))
            except NotResident:
                continue

    def change() -> None:
        for _ in range(100):
            engine.evict()
            engine.restore(CPUS[:1])
            # Waits for an answer, so that both kinds of thread get their turn.
            engine.score(ITEMS)

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work) for _ in range(3)]
        pool.submit(change).result(timeout=120)
        stop.set()
        for worker in workers:
            worker.result(timeout=60)

    assert len(set(answered)) <= 1
    assert engine.calls == len(answered) + 100
    assert (engine.state, engine.running) == ("resident", 0)


def test_an_error_that_is_kept_holds_nothing_of_what_came_before_it_even_if_its_causes_are_a_circle() -> None:
    class Weights:
        """What can be looked for."""

    def lose() -> None:
        weights = Weights()
        held.append(weakref.ref(weights))
        raise ValueError

    held, cause = list[weakref.ref[Weights]](), OSError()
    with pytest.raises(RuntimeError) as kept:
        try:
            lose()
        except ValueError:
            raise RuntimeError from cause
    cause.__cause__ = kept.value
    forget_locals(kept.value)
    assert [weights() for weights in held] == [None]
