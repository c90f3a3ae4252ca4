"""How long an action may compute, whatever becomes of its engine meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from app.action_task import Call
from tangram.errors import ActionCancelled, ActionTimedOut
from tests.workers_gpu.support import ITEM, at, hosting
from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import EngineDied
from workers.gpu.execution import Execution
from workers.gpu.host import ServiceHost

NAME = at("a", 0)


class Mortal(StubEngine):
    """Dies, after `lives_s` seconds of `clock_s`, of every call of the first `deaths`; `starts` are the times that it was started."""

    deaths, starts, lives_s, clock_s = 1, 0, 0.05, 0.0
    cancel_as_it_dies: CallControl | None = None

    def _start(self, devices: Sequence[Device]) -> None:
        self.starts += 1
        super()._start(devices)

    def _take_time(self, control: CallControl) -> None:
        if self.starts <= self.deaths:
            self.clock_s += self.lives_s
            self._life.broke("its server ended by itself with signal 9")
            if self.cancel_as_it_dies is not None:
                self.cancel_as_it_dies.cancelled.set()
            raise EngineDied("a: its server ended by itself with signal 9")
        super()._take_time(control)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Mortal:
    """Return an engine whose lives pass on the clock by which actions are measured."""
    made = Mortal("a", "score", 600.0)
    monkeypatch.setattr("workers.gpu.execution.time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + made.clock_s))
    return made


@pytest.fixture
def host(cells: list[Device], engine: Mortal) -> ServiceHost:
    return hosting(cells, "a", {"a": engine})


def call(**header: object) -> Call:
    return Call(id="1", grant={}, header={"idempotent": True, **header}, started_at=0.0, began=0.0)  # type: ignore[typeddict-item]


def score(engine: Engine, control: CallControl) -> list[float]:
    return engine.score([ITEM], control)


def test_an_action_whose_engine_dies_is_asked_again_and_both_tries_count(host: ServiceHost, engine: Mortal) -> None:
    asked, control = call(), CallControl(work_s=0.05)
    answer = Execution(asked, control, 60.0).answer(host, NAME, (), score)
    assert (len(answer), engine.starts) == (1, 2)
    assert asked.execution_s is not None and asked.execution_s >= 0.1


def test_both_tries_have_the_time_of_one(host: ServiceHost, engine: Mortal) -> None:
    asked, engine.lives_s = call(), 59.9
    with pytest.raises(ActionTimedOut, match="ran longer than timeout_s = 60"):
        Execution(asked, CallControl(work_s=600.0), 60.0).answer(host, NAME, (), score)
    # The second one has what the first one left, and not 60 seconds of its own
    assert asked.execution_s is not None and 60.0 <= asked.execution_s < 100.0


def test_an_action_that_is_cancelled_has_no_engine_started_for_it(host: ServiceHost, engine: Mortal) -> None:
    asked, control = call(), CallControl()
    asked.cancel_reason, engine.cancel_as_it_dies = "no longer wanted", control
    with pytest.raises(ActionCancelled, match="no longer wanted"):
        Execution(asked, control, 60.0).answer(host, NAME, (), score)
    assert engine.starts == 1


@pytest.mark.parametrize(("idempotent", "starts"), [(False, 1), (True, 2)])
def test_an_action_is_repeated_once_and_only_if_it_may_be(host: ServiceHost, engine: Mortal, idempotent: bool, starts: int) -> None:
    engine.deaths = 2
    with pytest.raises(EngineDied):
        Execution(call(idempotent=idempotent), CallControl(), 60.0).answer(host, NAME, (), score)
    assert engine.starts == starts
