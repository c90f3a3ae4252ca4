"""Commands: E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Served, options_of

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real


def test_a_number_in_digits_of_another_script_is_none(served: Served, e2b_headers: dict[str, str]) -> None:
    # When a header that is a number has a digit that is not of ASCII, where the client asks for signs of life
    body = message(b'{"process": {"cmd": "/bin/bash", "args": ["-c", "echo ran"]}}')
    headers = {**e2b_headers, "Content-Type": "application/connect+json"}
    odd = [(name.encode(), text.encode()) for name, text in headers.items()] + [(b"Keepalive-Ping-Interval", "²".encode("latin-1"))]
    answer = httpx.post(f"{served.url}/process.Process/Start", content=body, headers=odd)
    assert answer.status_code == 200 and base64.b64encode(b"ran\n") in answer.content, answer.text


def test_commands_share_nothing_but_files(e2b_sandbox: e2b.Sandbox) -> None:
    e2b_sandbox.commands.run("export LEFT=1; cd /; touch ~/left")
    assert e2b_sandbox.commands.run("echo [$LEFT]; ls ~/left | wc -l").stdout == "[]\n1\n"


@pytest.mark.parametrize(
    ("how", "says"), [({"cwd": "/testbed"}, "cwd '/testbed' does not exist"), ({"envs": {"A": "x" * 200_000}}, "at most 131071 bytes")]
)
def test_what_cannot_begin_is_an_invalid_argument(e2b_sandbox: e2b.Sandbox, how: dict[str, Any], says: str) -> None:
    with pytest.raises(e2b.InvalidArgumentException, match=says):
        e2b_sandbox.commands.run("exit 1", **how)


def test_a_command_whose_number_was_given_before_runs_and_has_its_own_result(served: Served, e2b_options: dict[str, str]) -> None:
    sandbox = e2b.Sandbox.create(**e2b_options)
    first = sandbox.commands.run("echo first", background=True)
    assert first.wait().stdout == "first\n"
    # Given a sandbox whose numbers begin again, as its hash was lost
    with served.store() as store:
        assert store.delete(f"tangram-gw-e2b-{sandbox.sandbox_id}")
        second = sandbox.commands.run("echo second", background=True)
        assert (second.pid, second.wait().stdout) == (first.pid, "second\n")
        # And what is known of processes and of kills goes with them, the rest with the sandbox
        killed = sandbox.commands.run("sleep 60", background=True)
        assert killed.kill()
        with pytest.raises(e2b.CommandExitException):
            killed.wait()
        served.live.until(lambda: store.hkeys(f"tangram-gw-e2b-{sandbox.sandbox_id}") == [b"last"])
        sandbox.kill()
        left = store.keys(f"tangram-gw-*{sandbox.sandbox_id}*")
        assert all(-1 != store.ttl(key) <= 3600 and (b"killed" in key or b"ended" in key) for key in left), left


def test_a_sandbox_whose_record_the_store_has_lost_goes_on(served: Served, e2b_options: dict[str, str]) -> None:
    sandbox = e2b.Sandbox.create(**e2b_options, metadata={"task": "7"})
    sandbox.files.write("kept", "yes")
    ways = (
        lambda: sandbox.commands.run("cat kept").stdout,
        lambda: sandbox.files.read("kept"),
        lambda: sandbox.get_info().metadata["task"],
    )
    for ask in ways:
        with served.store() as store:
            assert store.delete(*store.keys(f"tangram-gw-*{sandbox.sandbox_id}*"))
        assert ask() in ("yes", "7")
    assert sandbox.kill()


def test_a_command_whose_connection_is_cut_runs_once_and_to_its_end(served: Served, e2b_sandbox: e2b.Sandbox) -> None:
    running = e2b_sandbox.commands.run("until [ -e on ]; do sleep 0.05; done; echo ran | tee -a ledger; exit 3", background=True)
    running.disconnect()
    e2b_sandbox.commands.run("touch on")
    served.live.until(lambda: e2b_sandbox.files.exists("ledger"))
    served.live.until(lambda: e2b_sandbox.commands.list() == [])
    # Then its result is there for who joins it late
    with pytest.raises(e2b.CommandExitException) as joined:
        e2b_sandbox.commands.connect(running.pid).wait()
    assert (joined.value.exit_code, joined.value.stdout) == (3, "ran\n")
    assert e2b_sandbox.files.read("ledger") == "ran\n"


def test_a_command_that_has_ended_is_joined_by_its_tag(served: Served, e2b_headers: dict[str, str]) -> None:
    headers = {**e2b_headers, "Content-Type": "application/connect+json"}
    begin = {"process": {"cmd": "/bin/sh", "args": ["-c", "exit 4"]}, "tag": "late"}
    for call, body in (("Start", begin), ("Connect", {"process": {"tag": "late"}})):
        answer = httpx.post(f"{served.url}/process.Process/{call}", content=message(json.dumps(body).encode()), headers=headers)
        assert b'"exitCode":4' in answer.content, answer.text


def test_a_command_that_its_gateway_never_sent_is_not_run_by_who_joins_it(
    served: Served, e2b_sandbox: e2b.Sandbox, e2b_headers: dict[str, str]
) -> None:
    program = {"cmd": "touch", "args": ["ran-late"], "started_at": 1.0, "word": "never"}
    with served.store() as store:
        store.hset(f"tangram-gw-e2b-{e2b_sandbox.sandbox_id}", "process:7", f"99 {json.dumps(program)}")
    headers = {**e2b_headers, "Content-Type": "application/connect+json"}
    for _ in range(2):
        answer = httpx.post(f"{served.url}/process.Process/Connect", content=message(b'{"process": {"pid": 7}}'), headers=headers)
        assert b'"not_found"' in answer.content, answer.text
    assert not e2b_sandbox.files.exists("ran-late")


def catching(sandbox: e2b.Sandbox) -> e2b.CommandHandle:
    """Start a command that handles SIGTERM."""
    running = sandbox.commands.run("trap 'echo caught; exit 5' TERM; echo ready; while true; do sleep 0.05; done", background=True)
    assert next(iter(running))[0] == "ready\n"
    return running


def test_a_command_handles_a_signal(e2b_sandbox: e2b.Sandbox, e2b_headers: dict[str, str]) -> None:
    running, url = catching(e2b_sandbox), e2b_sandbox.envd_api_url
    message = {"process": {"pid": running.pid}, "signal": "SIGNAL_SIGTERM"}
    assert httpx.post(f"{url}/process.Process/SendSignal", json=message, headers=e2b_headers).json() == {}
    with pytest.raises(e2b.CommandExitException) as ended:
        running.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (5, "ready\ncaught\n")


@pytest.mark.parametrize(("name", "ends"), [("TERM", 5), ("KILL", -1)])
def test_a_command_is_reached_by_its_number_inside_of_the_sandbox(e2b_sandbox: e2b.Sandbox, name: str, ends: int) -> None:
    # Given a command, and the number that its client knows, which is none that the kernel gives
    running = catching(e2b_sandbox)
    assert running.pid > 1 << 22
    assert e2b_sandbox.commands.run(f"kill -{name} {running.pid}").exit_code == 0
    with pytest.raises(e2b.CommandExitException) as ended:
        running.wait()
    assert ended.value.exit_code == ends
    with pytest.raises(e2b.CommandExitException) as refused:
        e2b_sandbox.commands.run(f"kill -{name} {running.pid}")
    assert refused.value.exit_code == 1 and "No such process" in refused.value.stderr


def message(body: bytes) -> bytes:
    return bytes([0]) + len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("call", "body", "code"),
    [
        *(("process.Process/Start", body, "invalid_argument") for body in (b"", b"\0\0\0\0\2{", b"\0\0\0\0\2{}", b"\0\0\0\0\2[]")),
        ("process.Process/Start", b"\1\0\0\0\2{}", "unimplemented"),
        ("process.Process/Start", message(b'{"process": {"cmd": "sh", "args": ["-c", "a\\u0000b"]}}'), "invalid_argument"),
        ("process.Process/Connect", message(b'{"process": {"pid": 999}}'), "not_found"),
        ("filesystem.Filesystem/WatchDir", message(b'{"path": "."}'), "unimplemented"),
    ],
)
def test_a_stream_that_is_refused_says_so_in_its_last_envelope(
    served: Served, e2b_headers: dict[str, str], call: str, body: bytes, code: str
) -> None:
    headers = {**e2b_headers, "Content-Type": "application/connect+json"}
    answer = httpx.post(f"{served.url}/{call}", headers=headers, content=body)
    assert (answer.status_code, answer.headers["Content-Type"], answer.content[0]) == (200, "application/connect+json", 2)
    assert json.loads(answer.content[5:])["error"]["code"] == code


LINE = "0123456ä€𝄞" * 10
LINES = 60_000
"""Some 10 MB, many times what waits for a reader."""

PRINT = f"yes {LINE} | head -n {LINES}"


def test_a_client_that_pauses_gets_all_of_it(served: Served) -> None:
    async def paused() -> tuple[str, str | None]:
        sandbox = await e2b.AsyncSandbox.create(**options_of(served, "output"))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def take(_data: str) -> None:
            begun.set()
            await go_on.wait()

        try:
            # Given a client that does not take more than the first piece
            handle = await sandbox.commands.run(f"({PRINT}); touch ended", background=True, on_stdout=take, timeout=300)
            await begun.wait()
            # Then the command waits for it
            await sandbox.commands.run("sleep 2")
            assert not await sandbox.files.exists("ended")
            go_on.set()
            done = await handle.wait()
            return done.stdout, done.error
        finally:
            await sandbox.kill()

    stdout, error = asyncio.run(paused())
    assert error in (None, "") and stdout == f"{LINE}\n" * LINES
