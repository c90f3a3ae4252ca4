"""What becomes of reports that the broker does not take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from celery import Celery

from tangram.wire import EVENTS
from tests.workers_cpu.support import until
from workers.reporter import Reporter

STARTED, USED = {"type": "started", "id": "a"}, {"type": "used", "id": "a", "background_cpu_s": 1.5}


class Producer:
    """Fails as often as a test asks, then takes what it gets."""

    def __init__(self, failures: int) -> None:
        self.failures, self.taken = failures, []  # type: ignore[var-annotated]

    def publish(self, body: dict[str, Any], **_: object) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("the broker is away")
        self.taken += body["events"]


def test_figures_of_usage_are_sent_late_and_beats_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(2)
    reporter = Reporter(Celery(set_as_current=False), EVENTS, dict, 1.0, list, 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(reporter, "_connect", lambda: producer)
    reporter._send([STARTED, {"type": "beat"}, USED])
    # Then all come late but the beat, which says how things were
    assert producer.taken == [STARTED, USED]


def test_beats_and_figures_of_usage_go_out_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, beat = Producer(0), {"type": "beat", "node": {}}
    reporter = Reporter(Celery(set_as_current=False), EVENTS, dict, 0.01, lambda: [USED], 0.01, lambda: [STARTED])  # type: ignore[arg-type]
    monkeypatch.setattr(reporter, "_connect", lambda: producer)
    reporter.start()
    assert until(lambda: USED in producer.taken and beat in producer.taken)
    reporter.stop(60.0)
    # And what has begun is told before the beat that shows it
    assert all(before == STARTED for before, said in pairwise(producer.taken) if said == beat)
