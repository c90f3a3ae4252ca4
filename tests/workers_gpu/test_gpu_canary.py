"""Fixed questions: what counts as the same answer, and what becomes of an engine that gives another one after a restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services_file import ServiceConfig
from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines import canary
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.canary import Answer, Answers
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import CallFailed, EngineFailed, WrongAnswer
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus
from workers.gpu.items import ScoreItem

ITEM = {"prompt": "p", "response": "r"}
AT = InstanceName("a", (0,))


@given(st.integers(1, 300_000), st.none() | st.integers(canary.NEW_TOKENS + 1, 100))
def test_every_model_can_read_the_questions_and_continue_them(vocabulary: int, longest: int | None) -> None:
    for ids in canary.questions(vocabulary, longest):
        assert ids and all(0 <= token < vocabulary for token in ids)
        assert longest is None or len(ids) + canary.NEW_TOKENS <= longest


def refused(before: Answer, now: Answer, most: float) -> str:
    """Return why an answer is refused; empty if it is not."""
    try:
        canary.must_agree((before,), (now,), most)
    except WrongAnswer as error:
        return str(error)
    return ""


def test_without_a_tolerance_the_last_bit_counts() -> None:
    before = Answer((-1.5, -2.0), (4,))

    assert not refused(before, before, 0.0)
    assert "answered with -2, at the start with -1.5" in refused(before, Answer((-2.0, -2.0), (4,)), 0.0)
    assert "they may not differ" in refused(before, Answer((-1.5, math.nextafter(-2.0, 0.0)), (4,)), 0.0)
    assert "continued with [5], at the start with [4]" in refused(before, Answer((-1.5, -2.0), (5,)), 0.0)


@pytest.mark.parametrize("wrong", [1.02, 0.98, math.nan, math.inf])
def test_with_a_tolerance_numbers_may_be_off_by_that_and_no_more(wrong: float) -> None:
    before = Answer((-3.0, 1.0))

    assert not refused(before, Answer((-3.005, 1.005)), 0.01)
    assert "they may differ by 0.01" in refused(before, Answer((-3.0, wrong)), 0.01)


def test_a_continuation_may_turn_off_where_two_tokens_are_almost_equally_likely() -> None:
    # Given the log-prob of a question's only other id, and those of the two ids that continue it
    before = Answer((-9.0, -0.70, -0.1), (4, 5))
    # Then another first id is as good if it was as likely, and what follows it has another context
    assert not refused(before, Answer((-9.0, -0.705, -6.0), (8, 2)), 0.01)
    # But not if it was more or less likely, and not if the context was the same
    assert "answered with -0.9" in refused(before, Answer((-9.0, -0.9, -0.1), (8, 5)), 0.01)
    assert "answered with -0.3" in refused(before, Answer((-9.0, -0.70, -0.3), (4, 5)), 0.01)


def test_the_tolerance_follows_the_dtype_and_the_size_of_the_answers() -> None:
    small, large = (Answer((0.1,)),), (Answer((0.1, -16.0)),)

    assert [canary.tolerance(dtype, small) for dtype in ("float32", "float16", "bfloat16")] == [1e-4, 1 / 256, 1 / 32]
    assert canary.tolerance("bfloat16", large) == 0.5
    assert canary.tolerance("something", small) == canary.tolerance("bfloat16", small)


class Spoiling(StubEngine):
    """Comes back with other weights as often as `spoils` says, for as long as it is not started again; `error` is what questions raise."""

    def __init__(self, spoils: int = 1) -> None:
        super().__init__("a", "score", 600.0)
        self.spoils, self.off = spoils, 0.0
        self.error: Exception | None = None
        self.served: list[float] = []

    def _start(self, devices: Sequence[Device]) -> None:
        super()._start(devices)
        self.off = 0.0

    def _restore(self, devices: Sequence[Device]) -> None:
        super()._restore(devices)
        if self.spoils:
            self.spoils, self.off = self.spoils - 1, 1e-12

    def _canary(self) -> list[Answers]:
        if self.error is not None:
            raise self.error
        return [tuple(Answer(tuple(value + self.off for value in answer.values)) for answer in super()._canary()[0])]

    def _score(self, items: list[ScoreItem], control: CallControl) -> list[float]:
        return [value + self.off for value in super()._score(items, control)]


Made = tuple[ServiceHost, list[InstanceStatus]]


@pytest.fixture
def host_of(cells: list[Device], tmp_path: Path) -> Callable[[Engine], Made]:
    """Return a function that makes the host of an engine's service `a`, with all that the host publishes."""

    def make(engine: Engine) -> Made:
        published: list[InstanceStatus] = []
        config = ServiceConfig(engine="stub", task=engine.task, memory_mb=600, cells=[1, 2])
        host = ServiceHost(cells, {"a": config}, tmp_path, factory=lambda name, config, folder, memory: engine, on_change=published.append)
        return host, published

    return make


def test_an_engine_that_comes_back_with_other_weights_is_started_from_its_folder_before_anybody_is_served(
    host_of: Callable[[Engine], Made],
) -> None:
    # Given an instance that was evicted
    host, published = host_of(Spoiling())
    with host.serving("a", (0,)) as engine:
        before = engine.score([ITEM])
    host.evict(AT)
    # When its restore brings back other weights
    with host.serving("a", (0,)) as engine:
        # Then the caller who waits for it gets the answer of the right ones
        assert engine.score([ITEM]) == before
    # And it is counted, as a start and not as a restore
    (status,) = host.status()
    assert (status.state, status.starts, status.restores, status.wrong_answers) == ("resident", 2, 0, 1)
    assert status.to_wire().get("wrong_answers") == 1
    assert [one.state for one in published[-4:]] == ["host", "restoring", "starting", "resident"]
    # And the next restore, which brings the right ones, is a restore
    host.evict(AT)
    host.ensure_resident("a", (0,))
    (status,) = host.status()
    assert (status.starts, status.restores, status.wrong_answers) == (2, 1, 1)


def test_the_copy_of_another_instance_is_checked_too(host_of: Callable[[Engine], Made]) -> None:
    host, _ = host_of(Spoiling())
    host.ensure_resident("a", (0,))
    host.evict(AT)

    host.ensure_resident("a", (0, 1))

    assert {one.name.cells: (one.state, one.starts, one.wrong_answers) for one in host.status()} == {
        (0,): ("absent", 1, 0),
        (0, 1): ("resident", 1, 1),
    }


def test_if_the_folder_cannot_be_loaded_either_the_action_fails_and_the_cells_are_free(host_of: Callable[[Engine], Made]) -> None:
    class Gone(Spoiling):
        """Can be started once."""

        starts = 1

        def _start(self, devices: Sequence[Device]) -> None:
            if not self.starts:
                raise OSError(2, "No such file or directory")
            self.starts -= 1
            super()._start(devices)

    host, _ = host_of(Gone())
    host.ensure_resident("a", (0,))
    host.evict(AT)

    with pytest.raises(EngineFailed, match="a: starting failed: .*No such file or directory"):
        host.ensure_resident("a", (0,))

    (status,) = host.status()
    assert (status.state, status.wrong_answers, status.memory_mb, host.held_mb(0)) == ("failed", 1, 0.0, 0.0)


def test_questions_that_cannot_be_computed_are_no_wrong_answer_and_fail_the_start_that_follows_too(
    host_of: Callable[[Engine], Made],
) -> None:
    engine = Spoiling(spoils=0)
    host, _ = host_of(engine)
    host.ensure_resident("a", (0,))
    host.evict(AT)
    engine.error = MemoryError("out of memory")

    with pytest.raises(EngineFailed, match="a: starting failed: MemoryError: out of memory"):
        host.ensure_resident("a", (0,))

    (status,) = host.status()
    assert (status.state, status.starts, status.wrong_answers) == ("failed", 1, 0)


def test_a_model_that_gives_no_more_numbers_has_given_a_wrong_answer(cells: list[Device]) -> None:
    engine = Spoiling(spoils=0)
    engine.start(cells[:1])
    engine.evict()
    engine.error = CallFailed("items[0]: the model's score is nan")

    with pytest.raises(WrongAnswer, match=r"a: restoring failed: fixed questions are no longer answered: items\[0\]"):
        engine.restore(cells[:1])

    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_answers_no_numbers_from_the_beginning_is_not_started(cells: list[Device], value: float) -> None:
    class Useless(StubEngine):
        def _canary(self) -> list[Answers]:
            return [(Answer((value,)),)]

    engine = Useless("a", "score", 600.0)

    with pytest.raises(EngineFailed, match=f"a: starting failed: .*with {value}: its weights are of no use"):
        engine.start(cells[:1])

    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)
