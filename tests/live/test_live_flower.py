"""What a real Flower shows of actions: what each does, where and on how much, and nothing that may be a secret."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tangram.action import Action
from tangram.errors import ActionError
from tangram.kwargsrepr import LONGEST, kwargsrepr, with_grant
from tests.live.support import Live
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SECRET = "do-not-show-9d1f"


@pytest.fixture(scope="module")
def tasks(live: Live) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run Flower, and return what asks it for its tasks, by id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "celery", "-A", "app", "flower", f"--port={port}", "--address=127.0.0.1"]
    env = {**os.environ, **live.environment, "FLOWER_BASIC_AUTH": "me:word"}
    flower = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str) -> Any:
        try:
            return httpx.get(f"{url}{path}", auth=("me", "word"), timeout=10).json()
        except (httpx.HTTPError, ValueError):
            return {}

    try:
        # Workers send events once Flower has asked for them, and an action that comes after that is seen.
        with live.client("tests") as client:
            env_ = client.open(trajectory="warm-up")

            def seen() -> bool:
                env_.exec("true")
                return bool(ask("/api/tasks"))

            live.until(seen)
        yield lambda: ask("/api/tasks?limit=1000")
    finally:
        flower.terminate()
        flower.wait(60)


def test_flower_shows_trajectory_command_node_and_units(live: Live, tasks: Callable[[], dict[str, Any]]) -> None:
    # When a command runs on two cores
    with live.client("ai-coding") as client:
        env = client.open(trajectory="t1")
        handle = env.submit("echo one two", units=[2])
        handle.result(60)
    # Then Flower says so in words
    live.until(lambda: tasks().get(handle.id, {}).get("state") == "SUCCESS")
    said = tasks()[handle.id]
    assert (said["name"], said["args"]) == ("cpu.exec", "()")
    assert ast.literal_eval(said["kwargs"]) == {
        "job": "ai-coding", "trajectory": "t1", "command": "echo one two", "environment": env.id, "dop": 2, "node": "cpu-0",
    }  # fmt: skip


def test_flower_shows_no_secrets(live: Live, tasks: Callable[[], dict[str, Any]]) -> None:
    # When actions are given secrets, in every way in which they can be, and print them
    with live.client("ai-coding") as client:
        env = client.open(trajectory="t2")
        env.write_file("key", SECRET.encode())
        assert env.read_file("key") == SECRET.encode()
        assert SECRET in env.exec("cat key; echo $KEY", variables={"KEY": SECRET}).stdout
        reading = env.submit("cat", stdin=True)
        reading.send_input(SECRET.encode())
        reading.close_input()
        assert reading.result(60).stdout == SECRET
        timed_out = env.submit("cat key; sleep 100", timeout_s=2)
        assert timed_out.result(60).stdout == SECRET
        with pytest.raises(ActionError):
            env.read_file("nowhere")
    # Then Flower shows that they ended, and none of them
    live.until(lambda: tasks().get(timed_out.id, {}).get("state") == "SUCCESS")
    assert SECRET not in repr(tasks())
    assert ast.literal_eval(tasks()[reading.id]["kwargs"])["command"] == "cat"


def test_what_is_shown_is_short_and_in_one_line() -> None:
    # Given a command with everything in it that breaks a line or a page
    command = "echo <script>'\"\n" + "x" * 10_000
    arguments = {"command": command, "variables": {"KEY": SECRET}}
    text = kwargsrepr(Action(kind="cpu.exec", job="j", trajectory="t", environment="e", arguments=arguments))
    # Then it is cut, and can be read back
    assert "\n" not in text and SECRET not in text
    assert ast.literal_eval(text)["command"] == command[: LONGEST - 1] + "…"
    assert ast.literal_eval(str(with_grant(text, "cpu-0", 4)))["dop"] == 4
    # And what is no dictionary stays as it is
    assert [with_grant(said, "n", 1) for said in ("...", "", None, "{}")] == ["...", "", None, "{'dop': 1, 'node': 'n'}"]
