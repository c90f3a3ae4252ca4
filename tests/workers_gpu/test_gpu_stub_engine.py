"""The stub engine, and with it what all engines share: the life cycle and the checks of input."""

from __future__ import annotations

import base64
import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.lifecycle import SERVICE
from tangram.arrays import pack_ints
from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import BadInput, CallCancelled, CallFailed, EngineBusy, EngineFailed, NotResident, NotSupported, WrongState
from workers.gpu.items import ScoreItem

Until = Callable[[Callable[[], bool]], None]
DEVICE = [Device("cpu:0", "cpu", 1000, "cpu")]
ITEM = {"prompt": "p", "response": "r"}
LONG_S = 60.0


def resident(task: str = "score", limit: int = 1) -> StubEngine:
    engine = StubEngine("stub", task, 100.0, limit)  # type: ignore[arg-type]
    engine.start(DEVICE)
    return engine


class Counting(StubEngine):
    """Notes how many calls are inside, itself counted."""

    def __init__(self, *words: object) -> None:
        super().__init__(*words)  # type: ignore[arg-type]
        self.seen: list[int] = []
        self._inside, self._three = 0, threading.Barrier(3)
        self._lock = threading.Lock()

    def _score(self, items: list[ScoreItem], control: CallControl) -> list[float]:
        with self._lock:
            self._inside += 1
            self.seen.append(self._inside)
        self._three.wait(60)
        scores = super()._score(items, control)
        with self._lock:
            self._inside -= 1
        return scores


class Breaking(StubEngine):
    """Fails to start as often as a test asks, and to compute always."""

    def __init__(self, failures: int) -> None:
        super().__init__("breaking", "score", 100.0)
        self.failures = failures

    def _start(self, devices: Sequence[Device]) -> None:
        super()._start(devices)
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("no kernel image\nis available")

    def _score(self, items: object, control: object) -> list[float]:
        raise ZeroDivisionError("oops")


def test_equal_questions_get_equal_answers_and_different_ones_different() -> None:
    engine, other = resident(), resident()

    first = engine.score([ITEM, {"prompt": "p", "response": "other"}])

    assert first == other.score([ITEM, {"prompt": "p", "response": "other"}])
    assert first[0] != first[1]
    assert all(-1.0 <= score < 1.0 for score in first)


def test_a_sequence_of_n_ids_gets_n_minus_1_log_probs_that_depend_on_what_came_before() -> None:
    engine = resident("logprobs")

    long, short, changed, single = engine.logprobs([[1, 2, 3], [1, 2], [9, 2, 3], [7]])

    assert len(long) == 2
    assert long[:1] == short
    assert long[1] != changed[1]
    assert single == []
    assert all(value <= 0.0 for value in long)


def test_generation_is_greedy_at_temperature_0_and_seeded_above() -> None:
    engine = resident("logprobs")

    assert engine.generate(["a"], 5, 0.0, 1) == engine.generate(["a"], 5, 0.0, 2)
    assert engine.generate(["a"], 5, 1.0, 1) != engine.generate(["a"], 5, 1.0, 2)


def test_a_call_takes_the_time_its_caller_asks_for_and_is_counted() -> None:
    engine = resident()
    began = time.monotonic()

    engine.score([ITEM], CallControl(work_s=0.05))

    assert time.monotonic() - began >= 0.05
    assert engine.calls == 1


def test_a_cancelled_call_ends_at_once(until: Until) -> None:
    engine, control = resident(), CallControl(work_s=LONG_S)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.score, [ITEM], control)
        until(lambda: engine.running == 1)

        control.cancelled.set()

        with pytest.raises(CallCancelled):
            call.result(timeout=60)
    assert engine.running == 0


def test_a_call_that_waits_for_its_turn_can_be_cancelled(until: Until) -> None:
    engine, first, second = resident(limit=1), CallControl(work_s=LONG_S), CallControl()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(engine.score, [ITEM], first)
        until(lambda: engine.running == 1)
        waiting = pool.submit(engine.score, [ITEM], second)

        second.cancelled.set()

        with pytest.raises(CallCancelled):
            waiting.result(timeout=60)
        first.cancelled.set()
        assert isinstance(running.exception(timeout=60), CallCancelled)


@pytest.mark.parametrize("work_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_time_that_is_none_is_refused(work_s: float) -> None:
    with pytest.raises(BadInput, match="work_s"):
        CallControl(work_s=work_s)


def test_never_more_calls_run_than_the_service_allows() -> None:
    engine = Counting("stub", "score", 100.0, 3)
    engine.start(DEVICE)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda _: engine.score([ITEM], CallControl(work_s=0.02)), range(60)))

    assert engine.calls == 60
    assert max(engine.seen) == 3
    assert engine.running == 0


def test_work_is_refused_unless_resident() -> None:
    engine = StubEngine("stub", "score", 100.0)
    with pytest.raises(NotResident, match="stub is absent"):
        engine.score([ITEM])
    engine.start(DEVICE)
    engine.evict()
    with pytest.raises(NotResident, match="stub is host"):
        engine.score([ITEM])
    engine.stop()
    with pytest.raises(NotResident, match="stub is absent"):
        engine.score([ITEM])


def test_eviction_waits_for_running_calls_and_refuses_further_ones(until: Until) -> None:
    engine, control = resident(limit=2), CallControl(work_s=LONG_S)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(engine.score, [ITEM], control)
        until(lambda: engine.running == 1)
        eviction = pool.submit(engine.evict)
        until(lambda: engine.state == "evicting")

        with pytest.raises(NotResident, match="evicting"):
            engine.score([ITEM])
        assert engine.memory_mb() == 100.0
        control.cancelled.set()

        eviction.result(timeout=60)
        assert isinstance(call.exception(timeout=60), CallCancelled)
    assert (engine.state, engine.memory_mb()) == ("host", 0.0)


def test_an_eviction_that_calls_hold_up_gives_up_and_leaves_the_engine_resident(until: Until) -> None:
    engine, control = resident(limit=2), CallControl(work_s=LONG_S)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.score, [ITEM], control)
        until(lambda: engine.running == 1)

        for change in (engine.evict, engine.stop):
            with pytest.raises(EngineBusy, match="still running"):
                change(0.01)
            assert engine.state == "resident"

        assert engine.score([ITEM])
        control.cancelled.set()
        assert isinstance(call.exception(timeout=60), CallCancelled)


def test_a_failed_start_says_why_in_one_line_holds_nothing_and_can_be_tried_again() -> None:
    engine = Breaking(failures=1)

    with pytest.raises(EngineFailed, match="breaking: starting failed: RuntimeError: no kernel image is available"):
        engine.start(DEVICE)

    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)
    with pytest.raises(NotResident, match="no kernel image"):
        engine.score([ITEM])
    engine.start(DEVICE)
    assert (engine.state, engine.failure) == ("resident", "")


def test_a_stop_that_breaks_is_one_line_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an engine off its devices that cannot let go of what it holds
    engine = StubEngine("rm", "score", 100)
    engine.start(DEVICE)
    engine.evict()
    monkeypatch.setattr(engine, "_free", Mock(side_effect=TimeoutError("the driver does not answer")))
    # When it is stopped, twice
    for _ in range(2):
        with pytest.raises(EngineFailed, match="rm: stopping failed: TimeoutError: the driver does not answer"):
            engine.stop()
    # Then it says so, until it can
    assert engine.state == "failed" and "the driver does not answer" in engine.failure
    monkeypatch.undo()
    engine.stop()
    assert engine.state == "absent"


def test_a_call_that_breaks_is_one_line_and_the_engine_stays() -> None:
    engine = Breaking(failures=0)
    engine.start(DEVICE)

    with pytest.raises(CallFailed, match="breaking: ZeroDivisionError: oops"):
        engine.score([ITEM])

    assert (engine.state, engine.running) == ("resident", 0)


def test_an_engine_that_holds_more_than_it_may_fails_to_start() -> None:
    engine = StubEngine("stub", "score", 100.0)

    with pytest.raises(EngineFailed, match=r"it holds 100\.0 MiB on a device and may hold 50"):
        engine.start(DEVICE * 2, most_mb=50.0)

    assert engine.state == "failed"


@given(st.lists(st.sampled_from(["start", "evict", "restore", "stop"]), max_size=12))
def test_changes_follow_the_table_and_memory_is_held_when_resident_only(changes: list[str]) -> None:
    engine = StubEngine("stub", "score", 100.0)
    after = {"start": "resident", "evict": "host", "restore": "resident", "stop": "absent"}
    via = {"start": "starting", "evict": "evicting", "restore": "restoring"}
    for change in changes:
        before = engine.state
        allowed = change == "stop" or via[change] in SERVICE.after(before)
        try:
            getattr(engine, change)(*([DEVICE] if change in ("start", "restore") else []))
        except WrongState:
            assert not allowed
            assert engine.state == before
        else:
            assert allowed
            assert engine.state == after[change]
        assert engine.memory_mb() == (100.0 if engine.state == "resident" else 0.0)


def test_every_state_can_be_left_and_reached() -> None:
    following = {state: SERVICE.after(state) for state in SERVICE.states}
    reached = set(itertools.chain.from_iterable(following.values()))

    assert reached == set(following)
    assert all(following.values())


def test_changes_and_calls_from_many_threads_lose_no_call_and_end_settled() -> None:
    engine = resident(limit=4)
    stop = threading.Event()
    answered, refused = [], []

    def work() -> None:
        while not stop.is_set():
            try:
                answered.append(engine.score([ITEM])[0])
            except NotResident:
                refused.append(1)

    def change() -> None:
        for _ in range(100):
            engine.evict()
            engine.restore(DEVICE)
            # Waits for an answer, so that both kinds of thread get their turn.
            engine.score([ITEM])

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work) for _ in range(3)]
        pool.submit(change).result(timeout=120)
        stop.set()
        for worker in workers:
            worker.result(timeout=60)

    assert len(set(answered)) <= 1
    assert engine.calls == len(answered) + 100
    assert (engine.state, engine.running) == ("resident", 0)


def test_a_service_is_not_asked_for_what_it_does_not_do() -> None:
    with pytest.raises(NotSupported, match=r"'score'.*log-probs"):
        resident("score").logprobs([[1, 2]])
    with pytest.raises(NotSupported, match=r"'score'.*generate"):
        resident("score").generate(["a"])
    with pytest.raises(NotSupported, match=r"'logprobs'.*score"):
        resident("logprobs").score([ITEM])


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ("text", r"items\[1\]: "),
        ({"prompt": "p"}, r"items\[1\]\.response: Field required"),
        ({"prompt": "p", "response": 5}, r"items\[1\]\.response"),
        ({"prompt": "p", "response": "r", "weight": 1}, r"items\[1\]\.weight"),
        ({"prompt": "p", "response": [{"role": "assistant", "content": "r"}]}, r"items\[1\]: a response of messages needs"),
        ({"prompt": [{"role": "user"}], "response": "r"}, r"items\[1\]\.prompt.*content: Field required"),
    ],
)
def test_a_wrong_item_is_named(item: object, place: str) -> None:
    with pytest.raises(BadInput, match=place):
        resident().score([ITEM, item])


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        ([], r"sequences\[1\]: "),
        ([1, -1], r"sequences\[1\]\[1\]"),
        ([1, True], r"sequences\[1\]\[1\]"),
        ([1, 2.0], r"sequences\[1\]\[1\]"),
        ("12", r"sequences\[1\]"),
    ],
)
def test_a_wrong_sequence_is_named(ids: object, place: str) -> None:
    with pytest.raises(BadInput, match=place):
        resident("logprobs").logprobs([[1], ids])


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_sampling_is_named(words: dict[str, int], field: str) -> None:
    with pytest.raises(BadInput, match=f"sampling.{field}"):
        resident("logprobs").generate(["a"], **words)  # type: ignore[arg-type]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "response", "role", "content", "x"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(anything)
def test_any_input_is_answered_or_refused_in_one_line(value: object) -> None:
    scorer, teacher = resident(), resident("logprobs")
    for ask in (scorer.score, teacher.logprobs, teacher.generate):
        try:
            answers = ask(value)  # type: ignore[arg-type]
        except BadInput as error:
            assert len(str(error).splitlines()) <= 1
        else:
            assert isinstance(value, list)
            assert len(answers) == len(value)


def test_packed_ids_are_read_as_lists_are() -> None:
    engine = StubEngine("stub", "logprobs", 100.0)
    engine.start(DEVICE)
    negative = {"dtype": "int32", "data": base64.b64encode(struct.pack("<3i", 1, 2, -3)).decode(), "offsets": [0, 1, 3]}

    assert engine.logprobs(pack_ints([[1, 2, 3], [7]])) == engine.logprobs([[1, 2, 3], [7]])
    assert engine.logprobs(pack_ints([])) == []
    with pytest.raises(BadInput, match=r"sequences\[1\]: List should have at least 1 item"):
        engine.logprobs(pack_ints([[1], []]))
    with pytest.raises(BadInput, match=r"sequences\[1\]\[1\]: Input should be greater than or equal to 0"):
        engine.logprobs(negative)
    with pytest.raises(BadInput, match=r"sequences\.offsets: must rise from 0 to 3"):
        engine.logprobs({**negative, "offsets": [0, 2]})
