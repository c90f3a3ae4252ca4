"""What a live scheduler writes into its event log: a log that replays, with all that its workers said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.local.processes import Command
from app.local.stack import StackPlan
from tangram import ActionCancelled
from tests.live.support import Live, running
from workers.node import LEAST_GROWTH, LEAST_GROWTH_S


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return where the event log is to be."""
    return tmp_path / "events.jsonl"


def lines(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log that is being written."""
    return [json.loads(text) for text in log.read_text().splitlines(keepends=True) if text.endswith("\n")]


def of_the_last(log: Path) -> list[dict[str, Any]]:
    """Return what the last of the schedulers has written."""
    found = lines(log)
    return found[max(number for number, line in enumerate(found) if "setup" in line) :]


def handled(lines: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Return the events of a sort."""
    return [line["event"] for line in lines if line.get("event", {}).get("type") == sort]


def commanded(lines: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Return the commands of a sort."""
    return [command for line in lines for command in line.get("commands", ()) if command["type"] == sort]


def stop_scheduler(live: Live) -> None:
    """Have the scheduler end, and its log with it."""
    live.end("scheduler", signal.SIGTERM)


def replayed(log: Path) -> subprocess.CompletedProcess[str]:
    """Replay a log, with other hashes than those of the scheduler's process."""
    variables = {**os.environ, "PYTHONHASHSEED": "1"}
    return subprocess.run([sys.executable, "-m", "app.event_log", str(log)], env=variables, capture_output=True, text=True, check=False)


def test_the_log_of_a_live_scheduler_replays_to_the_same_commands(own_stack: Callable[..., Live], log: Path) -> None:
    # Given a stack whose scheduler keeps a log
    live = own_stack(cells=2, cell_memory_mb=1200, variables={"TANGRAM_EVENT_LOG": str(log), "TANGRAM_SHARES": "coding=2"})
    with live.client("coding") as client:
        env = client.open(trajectory="t1")
        # When commands run, elastic ones among them, one is cancelled, and another service is asked
        handles = [env.submit(f"sleep 0.{n}", units=[1, 2], parallel_fraction=0.9, work_s=2.0, session=f"s{n}") for n in range(6)]
        cancelled = env.submit("sleep 300", session="long")
        client.score("judge", [{"prompt": "a", "response": "b"}])
        live.until(lambda: live.rows(f"select status from actions where id = '{cancelled.id}'") == [("running",)])
        cancelled.cancel()
        with pytest.raises(ActionCancelled):
            cancelled.result(60)
        assert [handle.result(60).exit_code for handle in handles] == [0] * 6
        env.close()
    live.until(lambda: live.rows("select count(*) from actions where ended_at is null") == [(0,)])
    # And another scheduler takes over, which learns from what has ended
    live.replace_scheduler()
    live.until(lambda: log.read_text().count("tangram.events/4") == 2)
    with live.client("coding") as client:
        assert client.open(trajectory="t2").exec("echo fine").stdout == "fine\n"
    stop_scheduler(live)
    # Then the log leads to the same commands again
    openings = [line["setup"] for line in lines(log) if "setup" in line]
    assert [len(setup.get("history", ())) for setup in openings] == [0, 9]
    assert openings[1]["limits"]["weights"] == {"coding": 2.0}
    done = replayed(log)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" decisions, all equal\n")


HELD_BY_AFFINITY = """
from workers.cpu.process import trial
trial.MEANS = ("affinity",)
from app.cli import main
main()
"""
"""A worker that holds its background on one core. By the other means it gets nothing on a machine that is busy with something else."""


@pytest.fixture(scope="module")
def two_cores_by_module(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack of `two_cores`."""
    folder = tmp_path_factory.mktemp("log")
    variables = {"TANGRAM_EVENT_LOG": str(folder / "events.jsonl"), "TANGRAM_USAGE_S": "0.2", "TANGRAM_WITHOUT": "learning"}
    plan = StackPlan(nodes=0, cores=2, memory_mb=4096, api_nodes=0, variables=variables)
    with running(folder / "state", plan) as started:
        started.plan = replace(plan, nodes=1)
        worker = started.command("cpu-0")
        started.stack.spawn(Command("cpu-0", (sys.executable, "-c", HELD_BY_AFFINITY, *worker.argv[3:]), worker.env))
        yield started


@pytest.fixture
def two_cores(two_cores_by_module: Live) -> tuple[Live, Path]:
    """Return a stack of two cores, whose worker says again and again what commands get in the background, and its scheduler's log."""
    two_cores_by_module.repair()
    return two_cores_by_module, Path(two_cores_by_module.environment["TANGRAM_EVENT_LOG"])


def test_workers_say_what_commands_get_in_the_background(two_cores: tuple[Live, Path]) -> None:
    live, log = two_cores
    with live.client() as client:
        env = client.open(trajectory="t")
        # When two commands that sleep have the cores, and one that is busy uses what they leave idle
        sleeping = [env.submit("sleep 300", session=f"s{n}") for n in range(2)]
        for handle in sleeping:
            live.until(lambda handle=handle: any(started["id"] == handle.id for started in handled(of_the_last(log), "Started")))  # type: ignore[misc]
        busy = env.submit("while :; do :; done", session="busy")
        # Then it alone is reported, with more each time
        live.until(lambda: len(handled(of_the_last(log), "Used")) >= 3)
        used = handled(of_the_last(log), "Used")
        got = [one["background_cpu_s"] for one in used]
        assert {one["id"] for one in used} == {busy.id}
        assert got[0] >= LEAST_GROWTH_S
        assert all(later - earlier >= max(LEAST_GROWTH_S, LEAST_GROWTH * earlier) for earlier, later in pairwise(got))
        for handle in (busy, *sleeping):
            handle.cancel()
            with pytest.raises(ActionCancelled):
                handle.result(60)
    # And the end says no less
    live.until(lambda: live.rows(f"select 1 from actions where id = '{busy.id}' and ended_at is not null"))
    [(cpu_s,)] = live.rows(f"select cpu_s from actions where id = '{busy.id}'")
    assert cpu_s >= got[-1]


def test_a_restarted_scheduler_goes_on_with_the_cores_of_the_last_resize(two_cores: tuple[Live, Path]) -> None:
    # Given an elastic command on both cores, which had to give one back
    live, log = two_cores
    with live.client() as client:
        env = client.open(trajectory="t")
        elastic = env.submit("sleep 300", units=[1, 2], parallel_fraction=0.9, work_s=100.0)
        live.until(lambda: live.rows(f"select units from grants where action = '{elastic.id}'") == [(2,)])
        other = env.submit("sleep 300", session="other", work_s=100.0)
        live.until(lambda: live.rows(f"select units from grants where action = '{elastic.id}'") == [(1,)])
        live.until(lambda: any(started["id"] == other.id for started in handled(lines(log), "Started")))
        # When the scheduler is started anew
        openings = log.read_text().count("tangram.events/4")
        live.replace_scheduler()
        # Then it knows which core each of them has
        live.until(lambda: log.read_text().count("tangram.events/4") > openings and len(handled(of_the_last(log), "Resumed")) == 2)
        cores = {event["id"]: event["grant"]["core_ids"] for event in handled(of_the_last(log), "Resumed")}
        assert sorted(cores.values()) == [[0], [1]]
        live.until(lambda: handled(of_the_last(log), "Tick"))
        assert commanded(of_the_last(log), "Resize") == []
        # And when the other has ended, the first gets its core, and no other
        other.cancel()
        with pytest.raises(ActionCancelled):
            other.result(60)
        live.until(lambda: live.rows(f"select units from grants where action = '{elastic.id}'") == [(2,)])
        # The log is written after the journal.
        live.until(lambda: sorted(commanded(lines(log), "Resize")[-1]["core_ids"]) == [0, 1])
        elastic.cancel()
        with pytest.raises(ActionCancelled):
            elastic.result(60)
    stop_scheduler(live)
    assert replayed(log).stdout.endswith(" decisions, all equal\n")
