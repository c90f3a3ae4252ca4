"""The commands that need a stack: up, status, top, report, replay --live, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.local.processes import wait_until
from tests.cli.support import environment, leftovers, started, tangram

pytestmark = pytest.mark.timeout(600)

CLIENT = """
from tangram import Client
with Client() as client, client.open(trajectory="t") as env:
    print(env.exec("echo from the environment").stdout, end="")
"""
TRACE = """{"schema": "tangram.trace/1"}
{"schema": "tangram.trace/1", "job": "cli", "trajectory": "t1", "arrival_s": 0.0, "steps": [{"think_s": 0.0, "action": \
{"kind": "cpu.exec", "units": [1], "work_s": 0.05, "command": "true"}}]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "trace.jsonl").write_text(TRACE)
    (path / "services.toml").write_text("[quotas.search]\nrate_per_s = 10\n")
    return path


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `tangram up` for the tests of this file."""
    with started(folder, "up", "--cores", "2") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("the stack is up"), line + process.stderr.read()
        yield process


@pytest.fixture
def ran(up: subprocess.Popen[str], folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a command against the stack and expects it to work."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        done = tangram(folder, *words)
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_a_client_in_another_process_finds_the_stack(up: subprocess.Popen[str], folder: Path) -> None:
    client = subprocess.run(
        [sys.executable, "-c", CLIENT], env=environment(folder), capture_output=True, text=True, timeout=200, check=False
    )
    assert (client.stdout, client.stderr) == ("from the environment\n", "")


def test_a_live_replay_uses_the_stack_and_is_reported(ran: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    replayed = json.loads(ran("replay", "trace.jsonl", "--live", "--json").stdout)
    assert (replayed["actions"], replayed["failed"]) == (1, 0)
    reported = json.loads(ran("report", "last", "--json").stdout)
    assert reported["run"]["id"] == replayed["run"]
    assert "cpu.exec" in ran("report").stdout
    assert json.loads(ran("report", "cli", "--json").stdout)["job"] == "cli"


def test_the_status_is_one_json_document(ran: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    state = json.loads(ran("status", "--json").stdout)
    assert {node["name"] for node in state["nodes"]} == {"cpu-0", "gpu-0", "api-0"}
    assert state["scheduler"]["policy"] == "elastic"
    assert "cpu-0" in ran("status").stdout


def test_an_unknown_run_is_said(up: subprocess.Popen[str], folder: Path) -> None:
    done = tangram(folder, "report", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tangram: the journal knows no run and no job 'nobody'\n"


def test_a_second_stack_in_the_folder_is_refused(up: subprocess.Popen[str], folder: Path) -> None:
    done = tangram(folder, "up")
    assert done.returncode == 2
    assert "runs in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_top_shows_the_state_until_it_is_interrupted(up: subprocess.Popen[str], folder: Path) -> None:
    terminal, its_end = os.openpty()
    argv = [sys.executable, "-m", "tangram", "top", "--interval", "0.1"]
    process = subprocess.Popen(argv, cwd=folder, env=environment(folder), stdout=its_end, stderr=subprocess.PIPE, text=True)
    try:
        os.close(its_end)
        seen = ""
        while "cpu-0" not in seen:
            seen += os.read(terminal, 65536).decode()
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            if select.select([terminal], [], [], 0.1)[0]:
                with suppress(OSError):  # a terminal whose other end is closed
                    os.read(terminal, 65536)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (0, "")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_an_interrupted_stack_leaves_nothing(up: subprocess.Popen[str], folder: Path) -> None:
    # Given a command that still runs
    code = 'from tangram import Client\nenv = Client().open(trajectory="t")\nenv.submit("sleep 300")\nprint("running", flush=True)\n'
    code += "import time\ntime.sleep(300)\n"
    client = subprocess.Popen([sys.executable, "-c", code], env=environment(folder), stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        # When
        began = time.monotonic()
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=200)
    finally:
        client.kill()
        client.wait()
    # Then
    assert time.monotonic() - began < 40
    assert (up.returncode, out, err) == (0, "", "")
    assert wait_until(lambda: not leftovers(folder), 30), leftovers(folder)
    assert not (folder / "state" / "stack.json").exists()


def test_an_interrupted_replay_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(TRACE.replace('"command": "true"', '"command": "sleep 300"'))
    with started(tmp_path, "replay", "long.jsonl", "--live") as process:
        journal = tmp_path / "state" / "tangram.sqlite"
        assert wait_until(lambda: journal.exists() and bool(running(journal)), 120), process.stderr
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "tangram: interrupted"
    assert "Traceback" not in err
    assert wait_until(lambda: not leftovers(tmp_path), 30), leftovers(tmp_path)


def running(journal: Path) -> list[object]:
    import sqlite3

    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as connection:
        try:
            return connection.execute("select 1 from actions where kind = 'cpu.exec' and status = 'running'").fetchall()
        except sqlite3.Error:
            return []
