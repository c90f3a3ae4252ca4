"""What a scheduler counts from its entries, within which bounds, and what a process does without its port."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from app.celery import make_app
from app.local.redis_server import RedisServer
from app.metrics.bounded import IDLE_S, LONGEST, OTHER, Jobs
from app.metrics.celery_events import CeleryEvents
from app.metrics.exposition import make_registry, serve
from app.metrics.scheduler import SchedulerMetrics
from scheduler.live.entries import (
    ActionEnded,
    ActionGranted,
    ActionReceived,
    ActionRequeued,
    ActionResized,
    Entry,
    EnvironmentChanged,
    InstanceChanged,
    InstancesForgotten,
    NodeChanged,
    Unfinished,
    UnfinishedAction,
)
from scheduler.model import Grant
from scheduler.model.commands import Finish, NoteDraining
from tangram.settings import Settings
from tests.conftest import RedisUrls
from tests.freezing import freeze


class Told:
    """The metrics of a scheduler that leads, with a journal that keeps nothing."""

    def __init__(self, *, jobs: int = 50, unfinished: Unfinished | None = None) -> None:
        self.registry = CollectorRegistry()
        self.metrics = SchedulerMetrics(self.registry, jobs)
        self._unfinished = unfinished or Unfinished(actions=(), environments=(), nodes=())
        self.journal = self.metrics.lead(self, 1)
        self.journal.unfinished()

    def write(self, entries: Sequence[Entry]) -> None:
        """Keep nothing."""

    def unfinished(self) -> Unfinished:
        return self._unfinished

    def __call__(self, *entries: Entry) -> None:
        self.journal.write(entries)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def nodes(self, *states: str) -> tuple[float | None, ...]:
        """Return how many nodes are up, or up, draining, silent or lost, as asked."""
        return tuple(self.value(f"tangram_nodes{state and '_'}{state}") for state in states)

    def units(self, *states: str) -> tuple[float | None, ...]:
        """Return how many cores of node `n` are so."""
        return tuple(self.value("tangram_node_units", node="n", resource="cores", state=state) for state in states)

    def labels(self, label: str) -> set[str]:
        return {one.labels[label] for family in self.registry.collect() for one in family.samples if label in one.labels}


def received(name: str, job: str = "j", kind: str = "cpu.exec", at: float = 0.0) -> ActionReceived:
    return ActionReceived(id=name, header={"job": job, "kind": kind}, message="", submitted_at=at, received_at=at)


def granted(name: str, *cores: int, node: str = "n", attempt: int = 1) -> ActionGranted:
    return ActionGranted(id=name, attempt=attempt, node=node, units=len(cores) or 1, core_ids=cores, cell_ids=(), granted_at=1.0)


def resized(name: str, *cores: int, background: bool = False) -> ActionResized:
    return ActionResized(id=name, attempt=1, core_ids=cores, units=len(cores) or 1, background=background, at=2.0)


def ended(name: str, status: str = "succeeded", cause: str = "", at: float = 3.0, **parts: float | str) -> ActionEnded:
    times = {"queue_s": 1.0, "background_s": 0.25, "overhead_s": 0.5, "execution_s": 2.0, "cpu_s": 1.5, "unit_s": 4.0}
    words: dict[str, Any] = {"reason": "", "by_worker": True, "started_at": None, "dop": 1, **times, **parts}
    return ActionEnded(end=Finish(id=name, status=status, cause=cause, **words), at=at)  # type: ignore[arg-type]


def silent(name: str) -> NodeChanged:
    return NodeChanged(name=name, state="silent", description={}, at=1.0)


def environment(name: str, state: str, pod_cores: int = 0, node: str | None = "n") -> EnvironmentChanged:
    return EnvironmentChanged(id=name, state=state, node=node, job="j", trajectory="t", memory_mb=1, pod_cores=pod_cores, at=0.0)


def up(name: str = "n", cores: int = 4) -> NodeChanged:
    return NodeChanged(name=name, state="up", description={"cores": cores, "cells": 0}, at=0.0)


GROUP: Mapping[str, str] = {"job_name": "j", "kind": "cpu.exec"}


def test_an_action_is_counted_from_its_reception_to_its_end() -> None:
    told = Told()
    told(up(), received("a"), received("b"))
    assert (told.value("tangram_actions_waiting", **GROUP), told.value("tangram_actions_running", **GROUP)) == (2, 0)
    # When one is granted, grows, is sent to the background and comes back
    told(granted("a", 0), resized("a", 0, 1))
    assert told.units("granted") == (2,)
    told(resized("a", background=True))
    assert told.units("idle") == (4,)
    told(resized("a", 3))
    ways = [told.value("tangram_resizes_total", direction=way) for way in ("grow", "shrink", "preempt", "resume")]
    assert ways == [1, None, 1, 1]
    assert told.value("tangram_preemptions_total", job_name="j") == 1
    # And its end says how long all took, and gives its core back
    told(ended("a"))
    assert told.value("tangram_act_seconds_sum", **GROUP) == 3.75
    assert told.value("tangram_act_background_seconds_sum", **GROUP) == 0.25
    assert told.value("tangram_act_queue_seconds_sum", **GROUP) == 1.0
    assert told.value("tangram_used_core_seconds_total", job_name="j") == 1.5
    assert told.value("tangram_actions_total", **GROUP, status="succeeded", fault="") == 1
    assert (told.value("tangram_actions_waiting", **GROUP), told.value("tangram_actions_running", **GROUP)) == (1, 0)
    assert told.units("granted") == (0,)


def test_failures_of_the_system_are_counted_by_cause_and_those_of_programs_are_not() -> None:
    told = Told()
    told(*(received(name) for name in "abc"))
    told(ended("a", "lost", "node_lost"), ended("b", "timed_out", "timeout"), ended("c", "cancelled", "cancelled"))
    assert told.value("tangram_infra_failed_total", **GROUP, cause="node_lost") == 1
    assert told.labels("cause") == {"node_lost"}
    faults = {fault: told.value("tangram_actions_total", **GROUP, status=end, fault=fault) for end, fault in (
        ("lost", "infrastructure"), ("timed_out", "program"), ("cancelled", "caller"),
    )}  # fmt: skip
    assert faults == {"infrastructure": 1, "program": 1, "caller": 1}
    # And the close of a lost environment is nobody's fault, also where kinds have no labels left
    told = Told()
    told(*(received(f"{number}", kind=f"kind {number}") for number in range(50)), received("a", kind="cpu.close"))
    told(ended("a", "lost", "environment_lost", kind="cpu.close"))
    assert told.value("tangram_actions_total", job_name="j", kind=OTHER, status="lost", fault="") == 1
    assert told.labels("cause") == set()


def test_what_waits_again_keeps_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.metrics.scheduler.time.time", lambda: 100.0)
    told = Told()
    told(received("old", at=10.0), received("young", at=90.0), granted("old", 0))
    assert told.value("tangram_queue_oldest_age_seconds", **GROUP) == 10
    told(ActionRequeued(id="old", reason="", at=95.0))
    assert told.value("tangram_queue_oldest_age_seconds", **GROUP) == 90
    assert told.value("tangram_requeues_total", kind="cpu.exec") == 1


def test_a_scheduler_that_takes_over_knows_what_waits_and_runs_and_one_that_stands_by_nothing() -> None:
    header = {"job": "j", "kind": "cpu.exec"}
    waiting, running = (
        UnfinishedAction(id=name, header=header, message="", submitted_at=0.0, received_at=0.0, grant=grant)
        for name, grant in (("w", None), ("r", Grant(node="n", units=2, core_ids=(0, 1))))
    )
    told = Told(unfinished=Unfinished(actions=(waiting, running), environments=(), nodes=(up(),)))
    # When this one leads, it tells of it, without counting it as received
    assert (told.value("tangram_actions_waiting", **GROUP), told.value("tangram_actions_running", **GROUP)) == (1, 1)
    assert told.units("granted") == (2,)
    assert told.value("tangram_actions_received_total", **GROUP) is None
    told(ended("r"))
    # When it leads no longer, it keeps what it has counted, and tells of nothing else
    told.metrics.stand_by()
    assert told.value("tangram_actions_waiting", **GROUP) is None and told.value("tangram_nodes") == 0
    assert told.value("tangram_scheduler_leading") == 0
    assert told.value("tangram_act_seconds_count", **GROUP) == 1


def test_nodes_are_told_by_their_state() -> None:
    # Given a node that an earlier scheduler had drained, one that is drained now, and one that is so before it is up
    told = Told(unfinished=Unfinished(actions=(), environments=(), nodes=(up(),), draining=("n",)))
    told(up("m"), NoteDraining(name="m", draining=True), NoteDraining(name="later", draining=True))
    assert told.nodes("", "draining") == (2, 2)
    # When one is put back, one is lost, and the last one comes; then they are told as draining while they are up
    told(NoteDraining(name="m", draining=False))
    assert told.nodes("draining") == (1,)
    told(NodeChanged(name="n", state="lost", description={}, at=1.0))
    assert told.nodes("draining") == (0,)
    told(up("later"))
    assert told.nodes("draining") == (1,)
    # And silent ones are told apart from those that are up, also where an earlier scheduler knew one so
    told = Told(unfinished=Unfinished(actions=(), environments=(), nodes=(silent("n"),)))
    told(up("m"), silent("n"), silent("m"))
    assert told.nodes("", "silent", "lost_total") == (0, 2, 0)
    told(up("m"), NodeChanged(name="n", state="lost", description={}, at=2.0))
    assert told.nodes("", "silent", "lost_total") == (1, 0, 1)


def test_nodes_and_environments_are_told_while_they_stand() -> None:
    told = Told()
    told(up(), up("m"), environment("e", "open"), environment("f", "opening"))
    assert (told.value("tangram_nodes"), told.value("tangram_environments", state="open")) == (2, 1)
    told(environment("e", "lost"), NodeChanged(name="n", state="lost", description={}, at=1.0))
    assert (told.nodes("", "lost_total"), told.value("tangram_environments", state="open")) == ((1, 1), 0)
    assert told.value("tangram_environments_ended_total", state="lost") == 1
    assert "n" not in told.labels("node")


def test_cores_of_a_pod_are_granted_while_its_environment_stands() -> None:
    def of_environment(name: str, kind: str) -> ActionReceived:
        return ActionReceived(id=name, header={"job": "j", "kind": kind, "environment": "f"}, message="", submitted_at=0, received_at=0)

    # Given a pod that an earlier scheduler had opened
    told = Told(unfinished=Unfinished(actions=(), environments=(environment("e", "open", 1),), nodes=(up(),)))
    assert told.units("granted", "idle") == (1, 3)
    # When another one is opened on two cores, by an action that is granted these
    told(of_environment("o", "cpu.open"), environment("f", "waiting", node=None), granted("o", 1, 2), environment("f", "opening", 2))
    assert told.units("granted", "idle") == (3, 1)
    told(ended("o"), environment("f", "open", 2))
    # Then its cores are granted, whether a command runs on them or not, and so are those outside
    assert told.units("granted", "idle") == (3, 1)
    told(of_environment("c", "cpu.exec"), granted("c", 1, 2))
    assert told.units("granted", "idle") == (3, 1)
    told(received("outside"), granted("outside", 3))
    assert told.units("granted", "idle") == (4, 0)
    # until it is closed
    told(ended("c"), environment("f", "closed", 2))
    assert told.units("granted", "idle") == (2, 2)
    told(environment("e", "lost", 1))
    assert told.units("granted", "idle") == (1, 3)


def test_counts_of_a_worker_that_is_started_anew_are_added_to_those_before() -> None:
    def said(**counts: int) -> InstanceChanged:
        state = counts.pop("state", "resident")
        return InstanceChanged(node="n", service="rm", cell_ids=(0,), state=state, at=0.0, memory_mb=10.0, host_mb=5.0, **counts)  # type: ignore[arg-type]

    told = Told()
    # Given an instance that stood before this scheduler: its counts so far are not ours
    told(said(starts=3, wrong_answers=1))
    assert told.value("tangram_service_wrong_answers_total", service="rm") == 0
    told(said(starts=4, wrong_answers=2))
    # When its worker is started anew, it counts from nought
    told(InstancesForgotten(node="n", at=1.0, reason=""), said(starts=1), said(starts=2, wrong_answers=1))
    assert told.value("tangram_service_starts_total", service="rm") == 3
    assert told.value("tangram_service_wrong_answers_total", service="rm") == 2
    # And what a sleeping instance keeps of its cells is residue
    assert told.value("tangram_service_residue_bytes", service="rm") == 0
    told(said(state="host"))  # type: ignore[arg-type]
    assert told.value("tangram_service_residue_bytes", service="rm") == 10 * 2**20


@settings(max_examples=10)
@given(st.lists(st.text(min_size=0, max_size=300), max_size=60))
def test_however_many_jobs_and_kinds_there_are_the_page_is_bounded(names: list[str]) -> None:
    told = Told(jobs=5)
    for number, name in enumerate([*names, *(f"job {number}" for number in range(20))]):
        told(received(str(number), job=name, kind=name), granted(str(number)), ended(str(number), at=float(number)))
    jobs, kinds = told.labels("job_name"), told.labels("kind")
    assert len(jobs) <= 6 and OTHER in jobs and len(kinds) <= 51
    assert all(len(name) <= LONGEST for name in jobs | kinds)


def test_a_job_that_is_over_gives_its_place_to_another_by_the_schedulers_clock() -> None:
    told = Told(jobs=1)
    told(received("a", job="first"), ended("a", at=0.0))
    # While the first is not idle for long, the next one has no place
    told(received("b", job="second", at=IDLE_S - 1), ended("b", at=IDLE_S - 1))
    assert told.labels("job_name") == {"first", OTHER}
    # Then it has, and the first one's figures are gone, though its action was long under way, or its trainer's clock is behind
    told(replace(received("c", job="second", at=IDLE_S + 1), submitted_at=1.0))
    assert told.labels("job_name") == {"second", OTHER}
    # And a job with unfinished actions keeps its place
    gone: list[str] = []
    jobs = Jobs(1, gone.append)
    jobs.enter("long", 0.0)
    assert jobs.enter("next", 10 * IDLE_S) == OTHER
    jobs.leave("long", 10 * IDLE_S)
    jobs.leave(OTHER, 10 * IDLE_S)
    assert (jobs.enter("next", 12 * IDLE_S), gone) == ("next", ["long"])


def test_a_port_that_is_taken_is_one_line_and_no_end(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.ERROR):
        settings = Settings(metrics_port=taken.getsockname()[1])
        serve(settings, make_registry(settings, "scheduler"))
    (record,) = caplog.records
    assert record.getMessage() == f"no metrics at TANGRAM_METRICS_PORT, 127.0.0.1:{settings.metrics_port}: Address already in use"


def test_a_worker_that_was_replaced_is_shown_as_away_and_forgotten_later(redis_urls: RedisUrls, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    events = CeleryEvents(make_app(Settings(broker_url=redis_urls.broker, result_url=redis_urls.result)), registry)
    beat = {"timestamp": 1.0, "local_received": 1.0, "utcoffset": 0, "pid": 1, "clock": 1}
    for name in ("cpu-1@before", "cpu-1@after"):
        events.take({"type": "worker-heartbeat", "hostname": name, **beat})
        events.take({"type": "task-failed", "hostname": name, "uuid": name, "exception": "OSError()", **beat})
    events.silent()
    assert registry.get_sample_value("celery_worker_up", {"hostname": "cpu-1@before"}) == 0
    # When one of them stays away for an hour
    monkeypatch.setattr("app.metrics.celery_events.LENGTHS_S", 60.0)
    later = time.monotonic() + IDLE_S + 1
    monkeypatch.setattr("app.metrics.celery_events.time", SimpleNamespace(monotonic=lambda: later))
    events.take({"type": "worker-heartbeat", "hostname": "cpu-1@after", **beat})
    events.silent()
    scraped = generate_latest(registry)
    assert b'"cpu-1@before"' not in scraped and b'celery_worker_up{hostname="cpu-1@after"}' in scraped
    assert scraped.count(b'celery_queue_length{queue_name="node.cpu-1"}') == 1


def test_a_broker_that_hangs_does_not_hold_up_a_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RedisServer(tmp_path, log=tmp_path / "redis.log")
    try:
        registry = CollectorRegistry()
        app = make_app(Settings(broker_url=server.url, result_url=server.url, state_dir=tmp_path))
        CeleryEvents(app, registry)
        monkeypatch.setattr("app.metrics.celery_events.LENGTHS_S", 60.0)
        assert b"celery_queue_length{" in generate_latest(registry)
        # When the broker stands still
        monkeypatch.setattr("app.metrics.celery_events.LENGTHS_S", 0.1)
        freeze(server.process.identity.pid)
        scraped = generate_latest(registry)
        os.kill(server.process.identity.pid, signal.SIGCONT)
        assert b"celery_task_received_total" in scraped and b"celery_queue_length{" not in scraped
    finally:
        server.stop()
