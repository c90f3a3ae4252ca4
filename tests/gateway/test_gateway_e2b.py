"""E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import asyncio
import base64
import io
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.gateway.conftest import Served

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

MB = 2**20

Options = dict[str, str]


def options_of(served: Served, job: str) -> Options:
    return {"api_key": served.token(job), "api_url": served.url, "sandbox_url": served.url}


@pytest.fixture(scope="module")
def options(served: Served) -> Options:
    return options_of(served, "e2b")


@pytest.fixture(scope="module")
def sandbox(options: Options) -> Iterator[e2b.Sandbox]:
    opened = e2b.Sandbox.create(envs={"GREETING": "hello"}, metadata={"task": "shared"}, **options)
    yield opened
    opened.kill()


# Sandboxes


def test_a_sandbox_lives_until_it_is_killed(options: Options) -> None:
    sandbox = e2b.Sandbox.create(timeout=600, metadata={"task": "one"}, **options)
    info = sandbox.get_info()
    assert (info.sandbox_id, info.metadata, info.state.value, info.template_id) == (sandbox.sandbox_id, {"task": "one"}, "running", "base")
    assert timedelta(seconds=590) < info.end_at - datetime.now(UTC) <= timedelta(seconds=600)
    assert sandbox.is_running()
    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not sandbox.kill()
    with pytest.raises(e2b.SandboxNotFoundException):
        sandbox.get_info()


def test_calls_to_a_sandbox_that_is_gone_say_so(options: Options) -> None:
    sandbox = e2b.Sandbox.create(**options)
    sandbox.kill()
    for call in (
        lambda: sandbox.commands.run("true"),
        lambda: sandbox.commands.list(),
        lambda: sandbox.files.read("x"),
        lambda: sandbox.files.write("x", "y"),
        lambda: sandbox.files.list("."),
    ):
        with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
            call()


def test_a_sandbox_that_is_killed_under_a_command_is_no_failure_of_that_command(options: Options) -> None:
    sandbox = e2b.Sandbox.create(**options)
    running = sandbox.commands.run("sleep 60", background=True)
    assert e2b.Sandbox.kill(sandbox.sandbox_id, **options)
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
        running.wait()


def test_a_sandbox_ends_with_its_timeout_and_a_longer_one_lasts(served: Served, options: Options) -> None:
    short, longer, connected = (e2b.Sandbox.create(timeout=2, **options) for _ in range(3))
    longer.set_timeout(300)
    e2b.Sandbox.connect(connected.sandbox_id, timeout=300, **options)
    served.live.until(lambda: not short.is_running())
    for lasting in (longer, connected):
        assert lasting.commands.run("echo there").stdout == "there\n"
        lasting.kill()


def test_connecting_makes_no_timeout_shorter(options: Options, sandbox: e2b.Sandbox) -> None:
    before = sandbox.get_info().end_at
    again = e2b.Sandbox.connect(sandbox.sandbox_id, timeout=1, **options)
    assert again.commands.run("echo $GREETING").stdout == "hello\n"
    assert sandbox.get_info().end_at == before


def test_a_create_that_is_sent_again_gives_the_same_sandbox(options: Options) -> None:
    with ThreadPoolExecutor(4) as threads:
        same = list(threads.map(lambda _: e2b.Sandbox.create(idempotency_key="a-key", **options), range(4)))
    other = e2b.Sandbox.create(idempotency_key="another-key", **options)
    assert len({one.sandbox_id for one in same}) == 1 and other.sandbox_id != same[0].sandbox_id
    # Each of the answers can be used
    assert {one.commands.run("echo there").stdout for one in same} == {"there\n"}
    same[0].kill()
    other.kill()


def test_sandboxes_are_listed_in_pages_and_by_metadata(served: Served) -> None:
    options = options_of(served, "e2b-lists")
    made = [e2b.Sandbox.create(metadata={"number": str(n), "of": "a & b=c"}, **options) for n in range(3)]
    served.live.until(lambda: len(e2b.Sandbox.list(**options).next_items()) == 3)
    pages, pager = [], e2b.Sandbox.list(limit=2, order="desc", **options)
    while pager.has_next:
        pages.append([info.sandbox_id for info in pager.next_items()])
    ids = [one.sandbox_id for one in made]
    assert pages == [[ids[2], ids[1]], [ids[0]]]
    query = e2b.SandboxQuery(metadata={"number": "1", "of": "a & b=c"})
    assert [info.sandbox_id for info in e2b.Sandbox.list(query=query, **options).next_items()] == [ids[1]]
    for one in made:
        one.kill()


def test_owners_see_their_own_job_only(served: Served, sandbox: e2b.Sandbox) -> None:
    others = options_of(served, "e2b-others")
    assert e2b.Sandbox.list(**others).next_items() == []
    assert not e2b.Sandbox.kill(sandbox.sandbox_id, **others)
    with pytest.raises(e2b.NotFoundException):
        e2b.Sandbox.connect(sandbox.sandbox_id, **others)
    # And the token of one sandbox does not open another
    other = e2b.Sandbox.create(**others)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": other._envd_access_token}
    answer = httpx.get(f"{served.url}/files", params={"path": "x"}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, 401)
    assert httpx.post(f"{served.url}/process.Process/List", json={}, headers=headers).json()["code"] == "unauthenticated"
    other.kill()


def test_a_wrong_key_is_said_to_be_wrong(options: Options) -> None:
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(**{**options, "api_key": "e2b_wrong"})


def test_what_is_not_served_is_refused(options: Options, sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.SandboxException, match="pause is not served"):
        sandbox.pause()
    with pytest.raises(e2b.SandboxException, match="autoPause"):
        e2b.Sandbox.create(lifecycle={"on_timeout": "pause"}, **options)
    with pytest.raises(e2b.SandboxException, match="not served"):
        sandbox.files.watch_dir(".")
    assert sandbox.get_metrics() == []


# Templates


def test_a_template_that_names_an_image_is_ready_at_once(served: Served, options: Options) -> None:
    keys = {name: options[name] for name in ("api_key", "api_url")}
    assert not e2b.Template.alias_exists("team/py:1", **keys)
    built = e2b.Template.build(e2b.Template().from_image("python:3.12-slim"), "team/py:1", memory_mb=256, **keys)
    assert e2b.Template.alias_exists("team/py:1", **keys) and e2b.Template.get_build_status(built, **keys).status.value == "ready"
    # Then sandboxes of it have its image and memory
    sandbox = e2b.Sandbox.create("team/py:1", **options)
    info = sandbox.get_info()
    assert (info.template_id, info.memory_mb) == ("team/py:1", 256)
    query = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
    served.live.until(lambda: served.live.rows(query) == [("python:3.12-slim",)])
    sandbox.kill()


def test_an_image_can_be_named_in_metadata(served: Served, options: Options) -> None:
    sandbox = e2b.Sandbox.create(metadata={"tangram-image": "alpine:3"}, **options)
    query = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
    served.live.until(lambda: served.live.rows(query) == [("alpine:3",)])
    sandbox.kill()


def test_a_template_with_steps_is_refused(options: Options) -> None:
    keys = {name: options[name] for name in ("api_key", "api_url")}
    with pytest.raises(e2b.BuildException, match="build an image that has them"):
        e2b.Template.build(e2b.Template().from_image("python:3.12").run_cmd("true"), "stepped", **keys)
    with pytest.raises(e2b.SandboxException, match="has not been built"):
        e2b.Sandbox.create("stepped", **options)


# Commands


def test_a_command_gives_its_output(sandbox: e2b.Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    done = sandbox.commands.run("echo $GREETING $MORE; echo oops >&2", envs={"MORE": "more"}, on_stdout=out.append, on_stderr=err.append)
    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("hello more\n", "oops\n", 0, None)
    assert ("".join(out), "".join(err)) == (done.stdout, done.stderr)


def test_a_command_that_fails_is_no_failure_of_the_system(sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.CommandExitException) as failed:
        sandbox.commands.run("echo partly; exit 7")
    assert (failed.value.exit_code, failed.value.stdout) == (7, "partly\n")


def test_a_command_runs_in_the_folder_that_is_named(sandbox: e2b.Sandbox) -> None:
    sandbox.files.make_dir("some dir")
    assert sandbox.commands.run("pwd", cwd="some dir").stdout.endswith("/some dir\n")
    assert sandbox.commands.run("pwd", cwd="~", user="root").stdout == sandbox.commands.run("echo $HOME").stdout


def test_commands_share_nothing_but_files(sandbox: e2b.Sandbox) -> None:
    sandbox.commands.run("export LEFT=1; cd /; touch ~/left")
    assert sandbox.commands.run("echo [$LEFT]; ls ~/left | wc -l").stdout == "[]\n1\n"


def test_output_comes_while_a_command_runs(sandbox: e2b.Sandbox) -> None:
    # Given a command that waits for an answer to what it has printed
    seen: list[str] = []

    def answer(text: str) -> None:
        seen.append(text)
        sandbox.files.write(f"answer-{len(seen)}", "")

    command = "for n in 1 2 3; do echo $n; until [ -e answer-$n ]; do sleep 0.02; done; done; echo done >&2"
    done = sandbox.commands.run(command, on_stdout=answer, timeout=30)
    assert seen == ["1\n", "2\n", "3\n"] and (done.stdout, done.stderr) == ("1\n2\n3\n", "done\n")


def test_a_stream_that_is_joined_late_has_everything(sandbox: e2b.Sandbox) -> None:
    running = sandbox.commands.run("echo begun; until [ -e joined ]; do sleep 0.02; done; echo over", background=True)
    assert next(iter(running))[0] == "begun\n"
    running.disconnect()
    joined = sandbox.commands.connect(running.pid)
    sandbox.files.write("joined", "")
    assert joined.wait().stdout == "begun\nover\n"


def test_output_of_many_bytes_comes_whole(sandbox: e2b.Sandbox) -> None:
    done = sandbox.commands.run("head -c 700000 /dev/zero | tr '\\0' x; printf 'ä€𝄞'")
    assert done.stdout == "x" * 700000 + "ä€𝄞"


def test_a_command_ends_at_its_timeout(served: Served, sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("echo begun; sleep 60", timeout=1)
    query = f"SELECT status FROM actions WHERE kind = 'cpu.exec' AND environment = '{sandbox.sandbox_id}' AND status = 'running'"
    served.live.until(lambda: served.live.rows(query) == [])
    assert sandbox.commands.list() == []


def test_commands_of_one_sandbox_run_at_the_same_time(sandbox: e2b.Sandbox) -> None:
    waiting = sandbox.commands.run("until [ -e go ]; do sleep 0.05; done; echo gone", background=True)
    sandbox.commands.run("touch go")
    assert waiting.wait().stdout == "gone\n"


def test_a_background_command_is_listed_joined_and_killed(sandbox: e2b.Sandbox) -> None:
    running = sandbox.commands.run("echo begun; sleep 60", background=True, envs={"A": "b"}, cwd="/")
    (listed,) = sandbox.commands.list()
    assert (listed.pid, listed.cmd, listed.args, listed.envs, listed.cwd) == (
        running.pid,
        "/bin/bash",
        ["-l", "-c", "echo begun; sleep 60"],
        {"A": "b"},
        "/",
    )
    # When its stream is left it goes on, and can be joined
    running.disconnect()
    joined = sandbox.commands.connect(running.pid)
    assert sandbox.commands.kill(running.pid)
    with pytest.raises(e2b.CommandExitException) as killed:
        joined.wait()
    assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(running.pid)
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.connect(running.pid)
    assert sandbox.commands.list() == []


def test_a_command_whose_connection_is_cut_runs_once_and_to_its_end(served: Served, sandbox: e2b.Sandbox) -> None:
    running = sandbox.commands.run("until [ -e on ]; do sleep 0.05; done; echo ran >> ledger", background=True)
    running.disconnect()
    sandbox.commands.run("touch on")
    served.live.until(lambda: sandbox.files.exists("ledger"))
    served.live.until(lambda: sandbox.commands.list() == [])
    assert sandbox.files.read("ledger") == "ran\n"


def test_a_stream_shows_signs_of_life_while_a_command_is_silent(served: Served, sandbox: e2b.Sandbox) -> None:
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "X-Access-Token": sandbox._envd_access_token,
        "Authorization": f"Basic {base64.b64encode(b'root:').decode()}",
        "Content-Type": "application/connect+json",
        "Keepalive-Ping-Interval": "1",
    }
    message = b'{"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 1.5"]}}'
    request = bytes([0]) + len(message).to_bytes(4, "big") + message
    answer = httpx.post(f"{served.url}/process.Process/Start", headers=headers, content=request, timeout=30)
    assert answer.headers["content-type"] == "application/connect+json"
    names = [name for name in ("start", "keepalive", "end") if f'"{name}":'.encode() in answer.content]
    assert names == ["start", "keepalive", "end"]


@pytest.mark.parametrize("body", [b"", b"\0\0\0\0\2{", b"\0\0\0\0\2{}", b"\1\0\0\0\2{}", b"\0\0\0\0\2[]"])
def test_what_is_no_message_is_refused(served: Served, sandbox: e2b.Sandbox, body: bytes) -> None:
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "X-Access-Token": sandbox._envd_access_token,
        "Content-Type": "application/connect+json",
    }
    answer = httpx.post(f"{served.url}/process.Process/Start", headers=headers, content=body)
    assert answer.json()["code"] in ("invalid_argument", "unimplemented") and answer.status_code in (400, 501)


# Files


def test_files_go_in_and_come_out(sandbox: e2b.Sandbox) -> None:
    info = sandbox.files.write("in/text.txt", "grüße")
    assert (info.name, info.path, info.type.value) == ("text.txt", "in/text.txt", "file")
    assert sandbox.files.read("in/text.txt") == "grüße"
    data = bytes(range(256))
    assert [info.name for info in sandbox.files.write_files([{"path": "in/1.bin", "data": data}, {"path": "in/2", "data": "two"}])] == [
        "1.bin",
        "2",
    ]
    assert sandbox.files.read("in/1.bin", format="bytes") == data
    assert b"".join(sandbox.files.read("in/1.bin", format="stream")) == data
    sandbox.files.write("in/packed", data * 100, gzip=True)
    assert sandbox.files.read("in/packed", format="bytes", gzip=True) == data * 100
    assert sandbox.commands.run("cat in/2; wc -c < in/packed").stdout == "two25600\n"


def test_a_large_file_goes_in_and_comes_out(sandbox: e2b.Sandbox) -> None:
    data = bytes(range(256)) * (7 * MB // 256)
    sandbox.files.write("large", io.BytesIO(data))
    assert sandbox.files.read("large", format="bytes") == data
    with pytest.raises(e2b.SandboxException, match="413"):
        sandbox.files.write("larger", io.BytesIO(data + data))


def test_a_file_that_is_not_there_is_not_found(sandbox: e2b.Sandbox) -> None:
    for call in (
        lambda: sandbox.files.read("nowhere"),
        lambda: sandbox.files.list("nowhere"),
        lambda: sandbox.files.get_info("nowhere"),
        lambda: sandbox.files.rename("nowhere", "there"),
    ):
        with pytest.raises(e2b.FileNotFoundException, match="nowhere"):
            call()
    assert not sandbox.files.exists("nowhere")


def test_folders_are_made_listed_moved_and_removed(sandbox: e2b.Sandbox) -> None:
    files = sandbox.files
    assert files.make_dir("top/mid") and not files.make_dir("top/mid")
    files.write("top/mid/a 'quoted' file", "1234")
    sandbox.commands.run("ln -s mid top/link; chmod 640 top/mid/a*")
    listed = {entry.name: entry for entry in files.list("top", depth=2)}
    assert list(listed) == ["link", "mid", "a 'quoted' file"]
    assert (listed["link"].type.value, listed["link"].symlink_target, listed["mid"].type.value) == ("symlink", "mid", "dir")
    found = listed["a 'quoted' file"]
    assert (found.size, found.mode, found.permissions, found.type.value) == (4, 0o640, "-rw-r-----", "file")
    assert abs(found.modified_time - datetime.now(UTC)) < timedelta(minutes=5)
    assert [entry.name for entry in files.list("top")] == ["link", "mid"]
    moved = files.rename("top/mid", "elsewhere/mid2")
    assert (moved.name, moved.type.value) == ("mid2", "dir") and moved.path.endswith("/elsewhere/mid2")
    assert files.get_info("elsewhere/mid2/a 'quoted' file").path == f"{moved.path}/a 'quoted' file"
    assert files.exists("top/link") and not files.exists("top/mid")
    files.remove("top")
    files.remove("elsewhere")
    files.remove("elsewhere")
    assert not files.exists("top")
    files.write("file", "")
    for call in (lambda: files.list("file"), lambda: files.make_dir("file"), lambda: files.read(".")):
        with pytest.raises(e2b.InvalidArgumentException):
            call()


def test_a_signed_url_reads_a_file(served: Served, sandbox: e2b.Sandbox) -> None:
    sandbox.files.write("signed", "by url")
    host = f"49983-{sandbox.sandbox_id}.example.org"

    def get(url: str) -> httpx.Response:
        return httpx.get(url, headers={"Host": host})

    assert get(sandbox.download_url("signed", use_signature_expiration=60)).text == "by url"
    assert get(sandbox.download_url("signed").replace("path=signed", "path=file")).status_code == 401
    assert get(sandbox.download_url("signed", use_signature_expiration=-5)).status_code == 401


def test_the_health_page_needs_no_sandbox(served: Served) -> None:
    with urllib.request.urlopen(f"{served.url}/health") as answer:
        assert answer.status == 200


# The async client


def test_the_async_client_does_the_same(served: Served, options: Options) -> None:
    async def run() -> None:
        sandbox = await e2b.AsyncSandbox.create(timeout=300, **options)
        try:
            done = await asyncio.gather(*(sandbox.commands.run(f"echo {n}") for n in range(8)))
            assert [one.stdout for one in done] == [f"{n}\n" for n in range(8)]
            running = await sandbox.commands.run("sleep 60", background=True)
            assert [one.pid for one in await sandbox.commands.list()] == [running.pid]
            assert await running.kill()
            with pytest.raises(e2b.CommandExitException):
                await running.wait()
            await sandbox.files.write("deep/file", "text")
            assert await sandbox.files.read("deep/file") == "text"
            assert [entry.name for entry in await sandbox.files.list("deep")] == ["file"]
            assert await sandbox.is_running()
            await sandbox.set_timeout(600)
        finally:
            assert await sandbox.kill()
        with pytest.raises(e2b.exceptions.SandboxNotRunningException):
            await sandbox.commands.run("true")

    asyncio.run(run())
