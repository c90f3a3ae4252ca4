"""What a live scheduler writes into its event log: a log that replays, with all that its workers said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram import ActionCancelled
from tests.live.support import Live

BURN = "python3 -c 'import time\nwhile time.process_time() < {seconds}: pass'"


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
    live.process("scheduler").terminate()
    live.until(lambda: "scheduler" in live.stack.dead())


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
            cancelled.result(20)
        assert [handle.result(20).exit_code for handle in handles] == [0] * 6
        env.close()
    live.until(lambda: live.rows("select count(*) from actions where ended_at is null") == [(0,)])
    # And another scheduler takes over, which learns from what has ended
    live.process("scheduler").kill()
    live.until(lambda: "scheduler" in live.stack.dead())
    live.stack.spawn(live.command("scheduler"))
    live.until(lambda: log.read_text().count("tangram.events/2") == 2)
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


def test_workers_say_what_running_commands_use(own_stack: Callable[..., Live], log: Path) -> None:
    # Given a stack whose workers say every second what runs and uses what
    live = own_stack(variables={"TANGRAM_EVENT_LOG": str(log), "TANGRAM_USAGE_S": "1.0"})
    with live.client() as client:
        env = client.open(trajectory="t")
        # When one command burns a second of CPU in a child, one sleeps, and one is short
        sleeping = env.submit("sleep 300", session="other")
        env.exec("true", session="third")
        burning = env.submit(BURN.format(seconds=1) + "; sleep 300")
        # Then the first two are reported, with what they used since their start
        live.until(lambda: any(used["id"] == burning.id and used["cpu_s"] >= 0.9 for used in handled(lines(log), "Used")))
        live.until(lambda: any(used["id"] == sleeping.id for used in handled(lines(log), "Used")))
        used = handled(lines(log), "Used")
        of_burning = [(one["at"], one["cpu_s"]) for one in used if one["id"] == burning.id]
        assert of_burning == sorted(of_burning)
        assert of_burning[-1][1] < 1.5
        assert all(one["cpu_s"] < 0.3 for one in used if one["id"] == sleeping.id)
        assert {one["id"] for one in used} == {burning.id, sleeping.id}
        # And the end says the same
        for handle in (burning, sleeping):
            handle.cancel()
            with pytest.raises(ActionCancelled):
                handle.result(20)
    [(cpu_s,)] = live.rows(f"select cpu_s from actions where id = '{burning.id}'")
    assert of_burning[-1][1] <= cpu_s < 1.5


def test_a_restarted_scheduler_goes_on_with_the_cores_of_the_last_resize(own_stack: Callable[..., Live], log: Path) -> None:
    # Given an elastic command on both cores, which had to give one back
    live = own_stack(variables={"TANGRAM_EVENT_LOG": str(log), "TANGRAM_WITHOUT": "fractions, learning"})
    with live.client() as client:
        env = client.open(trajectory="t")
        elastic = env.submit("sleep 300", units=[1, 2], parallel_fraction=0.9, work_s=100.0)
        live.until(lambda: live.rows(f"select units from grants where action = '{elastic.id}'") == [(2,)])
        other = env.submit("sleep 300", session="other", work_s=100.0)
        live.until(lambda: live.rows(f"select units from grants where action = '{elastic.id}'") == [(1,)])
        live.until(lambda: any(started["id"] == other.id for started in handled(lines(log), "Started")))
        # When the scheduler is started anew
        live.process("scheduler").kill()
        live.until(lambda: "scheduler" in live.stack.dead())
        live.stack.spawn(live.command("scheduler"))
        # Then it knows which core each of them has
        live.until(lambda: len(handled(lines(log), "Resumed")) == 2)
        cores = {event["id"]: event["grant"]["core_ids"] for event in handled(lines(log), "Resumed")}
        assert sorted(cores.values()) == [[0], [1]]
        live.until(lambda: handled(of_the_last(log), "Tick"))
        assert commanded(of_the_last(log), "Resize") == []
        # And when the other has ended, the first gets its core, and no other
        other.cancel()
        with pytest.raises(ActionCancelled):
            other.result(20)
        live.until(lambda: live.rows(f"select units from grants where action = '{elastic.id}'") == [(2,)])
        # The log is written after the journal.
        live.until(lambda: sorted(commanded(lines(log), "Resize")[-1]["core_ids"]) == [0, 1])
        elastic.cancel()
        with pytest.raises(ActionCancelled):
            elastic.result(20)
    stop_scheduler(live)
    assert replayed(log).stdout.endswith(" decisions, all equal\n")
