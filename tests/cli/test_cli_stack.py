"""The commands that need a stack: up, status, top, report, replay --live, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from app.local.processes import wait_until
from app.replay.traces import read_trace
from tests.cli.forked import environment, forked
from tests.cli.support import leftovers, started, tangram
from tests.cli.template import PROGRAM, Forked
from tests.ports import free_port, free_ports

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

CLIENT = """
from tangram import Client
with Client() as client, client.open(trajectory="t") as env:
    print(env.exec("echo from the environment").stdout, end="")
"""
TASKS = """
from app.celery import app
from app.routing import action
@action(app, cores=[1])
def double(number): return 2 * number
"""
TRACE = """{"schema": "tangram.trace/1"}
{"schema": "tangram.trace/1", "job": "cli", "trajectory": "t1", "arrival_s": 0.0, "steps": [{"think_s": 0.0, "action": \
{"kind": "cpu.exec", "units": [1], "work_s": 0.05, "command": "touch a"}}, {"think_s": 0.1, "actions": [{"kind": "cpu.exec", \
"units": [1], "work_s": 0.05, "command": "until [ -e b ]; do sleep 0.02; done; sleep 0.05"}, {"kind": "cpu.write_file", "path": "b", \
"work_s": 0.01}]}]}
"""
"""A trace whose last two actions overlap, however late the second one is submitted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "trace.jsonl").write_text(TRACE)
    (path / "services.toml").write_text("[quotas.search]\nrate_per_s = 10\n")
    (path / "mine.py").write_text(TASKS)
    return path


@pytest.fixture(scope="module")
def up(real_component: None, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `tangram up`, with metrics and a gateway, for the tests of this file."""
    port, metrics = free_port(), str(free_ports(6))
    ports = {"TANGRAM_METRICS_PORT": metrics, "TANGRAM_GATEWAY_PORT": str(port)}
    with started(folder, "up", "--cores", "2", "--include", "mine", **ports) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("the stack is up"), line + process.stderr.read()
        of_gateway, of_metrics = process.stderr.readline(), process.stderr.readline()
        assert f"http://127.0.0.1:{port}" in of_gateway and "tangram token new" in of_gateway, of_gateway
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
        assert of_metrics.startswith("metrics: scheduler 127.0.0.1:"), of_metrics
        yield process


@pytest.fixture
def ran(up: subprocess.Popen[str], folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a command against the stack and expects it to work."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        no_celery = words[0] in ("envs", "export", "report", "status", "top") or "--simulate" in words
        done = forked(*words, cwd=folder) if no_celery else tangram(folder, *words)
        assert done.returncode == 0, done.stderr
        return done

    return run


@contextmanager
def holding(folder: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run a client that holds what it has until its input ends; gives it and the words that it has printed."""
    command = [sys.executable, "-c", code]
    client = subprocess.Popen(command, env=environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with client:
        assert client.stdin is not None and client.stdout is not None
        yield client, client.stdout.readline().split()


def test_a_client_in_another_process_finds_the_stack(up: subprocess.Popen[str], folder: Path) -> None:
    words = [sys.executable, "-c", CLIENT]
    client = subprocess.run(words, env=environment(folder), capture_output=True, text=True, timeout=200, check=False)
    assert (client.stdout, client.stderr) == ("from the environment\n", "")


def test_a_celery_task_of_the_folder_runs(up: subprocess.Popen[str], folder: Path) -> None:
    words = [sys.executable, "-c", "import mine; print(mine.double.delay(21).get(timeout=60))"]
    client = subprocess.run(words, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert (client.stdout, client.stderr) == ("42\n", "")


def test_a_live_replay_uses_the_stack_and_is_reported_as_a_page_and_as_a_trace_that_replays(
    ran: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    replayed = json.loads(ran("replay", "trace.jsonl", "--live", "--json").stdout)
    assert (replayed["actions"], replayed["failed"]) == (3, 0)
    reported = json.loads(ran("report", "last", "--json").stdout)
    assert reported["run"]["id"] == replayed["run"]
    assert "cpu.exec" in ran("report").stdout
    assert json.loads(ran("report", "cli", "--json").stdout)["job"] == "cli"
    run = replayed["run"]
    assert ran("report", run, "--against", "cli", "-o", "report.html").stderr.startswith("wrote report.html")
    assert "Content-Security-Policy" in (folder / "report.html").read_text()
    # And the trace has the steps of the original, each with its parallel actions
    ran("export", run, "-o", "exported.jsonl")
    assert steps(folder / "exported.jsonl") == steps(folder / "trace.jsonl") == [["cpu.exec"], ["cpu.exec", "cpu.write_file"]]
    for how in ("--live", "--simulate"):
        replayed = json.loads(ran("replay", "exported.jsonl", how, "--json").stdout)
        assert (replayed["actions"], replayed["failed"]) == (3, 0)


def steps(path: Path) -> list[list[str]]:
    """Return the kinds of the actions of each step of a trace's one trajectory."""
    (trajectory,) = read_trace(path).trajectories
    return [sorted(action.kind for action in step.actions) for step in trajectory.steps]


def test_the_nodes_of_the_stack_are_healthy(ran: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    host = socket.gethostname()
    assert ran("health", "cpu").stdout == f"worker cpu-0@{host} answers\n"
    assert ran("health", "api").stdout == f"worker api-0@{host} answers\n"


def test_environments_are_listed_with_their_owner_and_their_node_is_drained_and_put_back(
    up: subprocess.Popen[str], ran: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    code = (
        'import sys\nfrom tangram import Client\nwith Client(job="mine") as c, c.open(trajectory="t", lease_s=600) as e:\n'
        '    h = e.submit("sleep 250"); print(e.id, h.id, flush=True); sys.stdin.read(); h.cancel()'
    )
    with holding(folder, code) as (held, (environment_id, action_id)):
        assert held.stdin is not None
        assert wait_until(lambda: bool(running(folder / "state" / "tangram.sqlite")), 60)
        (one,) = json.loads(ran("envs", "--job", "mine", "--json").stdout)["environments"]
        assert (one["id"], one["trajectory"], one["orphan"]) == (environment_id, "t", "")
        assert (one["state"], one["running"]) == ("open", [action_id])
        assert one["owner"].endswith(f":{held.pid}") and 0 < one["lease_left_s"] <= 600
        assert json.loads(ran("envs", "--job", "mine", "--orphans", "--json").stdout) == {"environments": []}
        # When its node is drained, what is left is listed after the time given, and the command has failed
        drained = tangram(folder, "drain", "cpu-0", "--wait", "0.2", "--json")
        assert drained.returncode == 1, drained.stderr
        left = json.loads(drained.stdout)
        assert (left["node"], left["state"], left["draining"]) == ("cpu-0", "up", True)
        assert [(one["id"], one["kind"], one["environment"]) for one in left["running"]] == [(action_id, "cpu.exec", environment_id)]
        assert [(one["id"], one["job"], one["state"]) for one in left["environments"]] == [(environment_id, "mine", "open")]
        again = ran("drain", "cpu-0").stdout
        assert again.startswith("node cpu-0 is draining: 1 action, 1 environment left\n")
        assert all(words in again for words in ("running actions", f"{action_id} mine cpu.exec {environment_id}", "environments  "))
        assert f"{environment_id} mine {one['owner']} open" in again
        nodes = {node["name"]: node["draining"] for node in json.loads(ran("status", "--json").stdout)["nodes"]}
        assert nodes == {"cpu-0": True, "gpu-0": False, "api-0": False}
        assert "draining" in ran("status").stdout and "draining" in ran("top").stdout
        # When the client leaves while another drain waits, that one is done
        with started(folder, "drain", "cpu-0", "--wait", "200") as waits:
            assert waits.stderr is not None and waits.stdout is not None
            assert waits.stderr.readline() == "node cpu-0 is draining: 1 action, 1 environment left; waiting for up to 200 s\n"
            held.stdin.close()
            assert waits.wait(100) == 0
            assert waits.stdout.read() == "node cpu-0 is drained\n"
    # Then the node takes actions again when it is put back
    assert ran("drain", "cpu-0", "--undo").stdout == "node cpu-0 takes actions again\n"
    assert json.loads(ran("drain", "cpu-0", "--undo", "--json").stdout)["draining"] is False
    test_a_client_in_another_process_finds_the_stack(up, folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("drain", "cpu-7"), "tangram: the journal knows no node 'cpu-7'; it knows api-0, cpu-0, gpu-0\n"),
        (("drain", "cpu-0", "--undo", "--wait", "1"), "tangram: --wait is for draining, not for --undo\n"),
    ],
)
def test_a_drain_that_makes_no_sense_is_refused_in_one_line(
    up: subprocess.Popen[str], folder: Path, words: tuple[str, ...], said: str
) -> None:
    done = forked(*words, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_top_shows_the_state_until_it_is_interrupted(up: subprocess.Popen[str], folder: Path) -> None:
    terminal, its_end = os.openpty()
    argv = [*PROGRAM, "top", "--interval", "0.1"]
    process = Forked(argv, cwd=folder, env=environment(folder), stdout=its_end, stderr=subprocess.PIPE, text=True)
    try:
        os.close(its_end)
        seen = b""
        while b"cpu-0" not in seen:
            seen += os.read(terminal, 65536)
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
    code = 'from tangram import Client\nenv = Client().open(trajectory="t")\nenv.submit("sleep 300")\nprint("running", flush=True)\n'
    code += "import time\ntime.sleep(300)\n"
    client = subprocess.Popen([sys.executable, "-c", code], env=environment(folder), stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        began = time.monotonic()
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=200)
    finally:
        client.kill()
        client.wait()
    assert time.monotonic() - began < 150
    assert (up.returncode, out, err) == (0, "", "")
    assert wait_until(lambda: not leftovers(folder), 60), leftovers(folder)
    assert not (folder / "state" / "stack.json").exists() and not (folder / "state" / "metrics.json").exists()


def test_a_live_replay_that_is_interrupted_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(TRACE.replace('"command": "true"', '"command": "sleep 300"'))
    with started(tmp_path, "replay", "long.jsonl", "--live", "--cores", "1") as process:
        journal, stack = tmp_path / "state" / "tangram.sqlite", tmp_path / "state" / "stack.json"
        assert wait_until(lambda: journal.exists() and bool(running(journal)), 120), process.stderr
        # When it is asked to end, as by Ctrl-C
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (130, "")
    assert "tangram: interrupted" in err.splitlines()[-1] and "Traceback" not in err
    assert wait_until(lambda: not leftovers(tmp_path), 60), leftovers(tmp_path)
    assert not stack.exists()


def running(journal: Path) -> list[object]:
    """Return a row if a command runs."""
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute("select 1 from actions where kind = 'cpu.exec' and status = 'running'").fetchall()
        except sqlite3.Error:
            return []
