"""Sandboxes and templates: E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import asyncio
import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.gateway.conftest import Served, options_of
from tests.gateway.e2b_methods import METHODS

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

Options = dict[str, str]

LEASE_S = 8
"""Long enough for a call that makes it longer to come in time."""


def test_a_sandbox_lives_until_it_is_killed(e2b_options: Options) -> None:
    sandbox = e2b.Sandbox.create(timeout=600, metadata={"task": "one"}, **e2b_options)
    info = sandbox.get_info()
    assert (info.sandbox_id, info.metadata, info.state.value, info.template_id) == (sandbox.sandbox_id, {"task": "one"}, "running", "base")
    assert timedelta(seconds=500) < info.end_at - datetime.now(UTC) <= timedelta(seconds=600)
    assert sandbox.is_running()
    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not sandbox.kill()
    with pytest.raises(e2b.SandboxNotFoundException):
        sandbox.get_info()


def test_calls_to_a_sandbox_that_is_gone_say_so(e2b_options: Options) -> None:
    sandbox = e2b.Sandbox.create(**e2b_options)
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


def test_a_sandbox_that_is_killed_under_a_command_is_no_failure_of_that_command(e2b_options: Options) -> None:
    sandbox = e2b.Sandbox.create(**e2b_options)
    running = sandbox.commands.run("sleep 60", background=True)
    assert e2b.Sandbox.kill(sandbox.sandbox_id, **e2b_options)
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
        running.wait()


def test_a_sandbox_ends_with_its_timeout_and_a_longer_one_lasts(served: Served, e2b_options: Options) -> None:
    # Given sandboxes with the same timeout, of which those made first have a longer one now
    longer = e2b.Sandbox.create(timeout=LEASE_S, **e2b_options)
    longer.set_timeout(300)
    connected = e2b.Sandbox.create(timeout=LEASE_S, **e2b_options)
    e2b.Sandbox.connect(connected.sandbox_id, timeout=300, **e2b_options)
    short = e2b.Sandbox.create(timeout=LEASE_S, **e2b_options)
    # Then these stand when the last one has ended
    served.live.until(lambda: not short.is_running())
    for lasting in (longer, connected):
        assert lasting.commands.run("echo there").stdout == "there\n"
        lasting.kill()


def test_connecting_makes_no_timeout_shorter(e2b_options: Options, e2b_sandbox: e2b.Sandbox) -> None:
    before = e2b_sandbox.get_info().end_at
    again = e2b.Sandbox.connect(e2b_sandbox.sandbox_id, timeout=1, **e2b_options)
    assert again.commands.run("echo $GREETING").stdout == "hello\n"
    assert e2b_sandbox.get_info().end_at == before


def test_a_create_that_is_sent_again_gives_the_same_sandbox(e2b_options: Options) -> None:
    with ThreadPoolExecutor(4) as threads:
        same = list(threads.map(lambda _: e2b.Sandbox.create(idempotency_key="a-key", **e2b_options), range(4)))
    other = e2b.Sandbox.create(idempotency_key="another-key", **e2b_options)
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


def test_owners_see_their_own_job_only(served: Served, e2b_sandbox: e2b.Sandbox) -> None:
    others = options_of(served, "e2b-others")
    assert e2b.Sandbox.list(**others).next_items() == []
    assert not e2b.Sandbox.kill(e2b_sandbox.sandbox_id, **others)
    with pytest.raises(e2b.NotFoundException):
        e2b.Sandbox.connect(e2b_sandbox.sandbox_id, **others)
    # And the token of one sandbox does not open another
    other = e2b.Sandbox.create(**others)
    headers = {"E2b-Sandbox-Id": e2b_sandbox.sandbox_id, "X-Access-Token": other._envd_access_token}
    answer = httpx.get(f"{served.url}/files", params={"path": "x"}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, 401)
    assert httpx.post(f"{served.url}/process.Process/List", json={}, headers=headers).json()["code"] == "unauthenticated"
    other.kill()


def test_a_wrong_key_is_said_to_be_wrong(e2b_options: Options) -> None:
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(**{**e2b_options, "api_key": "e2b_wrong"})


def test_what_is_not_served_is_refused(e2b_options: Options, e2b_sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.SandboxException, match="pause is not served"):
        e2b_sandbox.pause()
    with pytest.raises(e2b.SandboxException, match="autoPause"):
        e2b.Sandbox.create(lifecycle={"on_timeout": "pause"}, **e2b_options)
    with pytest.raises(e2b.SandboxException, match="not served"):
        e2b_sandbox.files.watch_dir(".")
    assert e2b_sandbox.get_metrics() == []


def test_a_template_that_names_an_image_is_ready_at_once(served: Served, e2b_options: Options) -> None:
    keys = {name: e2b_options[name] for name in ("api_key", "api_url")}
    assert not e2b.Template.alias_exists("team/py:1", **keys)
    built = e2b.Template.build(e2b.Template().from_image("python:3.12-slim"), "team/py:1", memory_mb=256, **keys)
    assert e2b.Template.alias_exists("team/py:1", **keys) and e2b.Template.get_build_status(built, **keys).status.value == "ready"
    # Then sandboxes of it have its image and memory
    sandbox = e2b.Sandbox.create("team/py:1", **e2b_options)
    info = sandbox.get_info()
    assert (info.template_id, info.memory_mb) == ("team/py:1", 256)
    query = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
    served.live.until(lambda: served.live.rows(query) == [("python:3.12-slim",)])
    sandbox.kill()


def test_a_template_says_how_many_cores_its_commands_may_use(served: Served, e2b_options: Options) -> None:
    keys = {name: e2b_options[name] for name in ("api_key", "api_url")}
    e2b.Template.build(e2b.Template().from_image("python:3.12"), "two-cores", cpu_count=2, memory_mb=64, **keys)
    sandbox = e2b.Sandbox.create("two-cores", **e2b_options)
    assert sandbox.get_info().cpu_count == 2
    assert sandbox.commands.run("echo $TANGRAM_DOP_MAX").stdout == "2\n"
    sandbox.kill()


@pytest.mark.parametrize("cpus", ["0.5", "64", "any text"])
def test_metadata_are_any_text_and_say_nothing_of_cores(served: Served, cpus: str) -> None:
    options = options_of(served, "e2b-metadata")
    sandbox = e2b.Sandbox.create(metadata={"cpus": cpus}, **options)
    assert sandbox.commands.run("echo $TANGRAM_DOP_MAX").stdout == "1\n"
    (listed,) = e2b.Sandbox.list(**options).next_items()
    assert (listed.metadata, listed.cpu_count) == ({"cpus": cpus}, 1)
    sandbox.kill()


def test_an_image_can_be_named_in_metadata(served: Served, e2b_options: Options) -> None:
    sandbox = e2b.Sandbox.create(metadata={"tangram-image": "alpine:3"}, **e2b_options)
    query = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
    served.live.until(lambda: served.live.rows(query) == [("alpine:3",)])
    sandbox.kill()


def test_a_template_with_steps_is_refused(e2b_options: Options) -> None:
    keys = {name: e2b_options[name] for name in ("api_key", "api_url")}
    with pytest.raises(e2b.BuildException, match="build an image that has them"):
        e2b.Template.build(e2b.Template().from_image("python:3.12").run_cmd("true"), "stepped", **keys)
    with pytest.raises(e2b.SandboxException, match="has not been built"):
        e2b.Sandbox.create("stepped", **e2b_options)


def test_the_client_runs_git_as_commands(e2b_sandbox: e2b.Sandbox) -> None:
    e2b_sandbox.git.init("repository", initial_branch="main")
    e2b_sandbox.files.write("repository/file", "text")
    assert [one.name for one in e2b_sandbox.git.status("repository").file_status] == ["file"]


def test_the_async_client_does_the_same(served: Served, e2b_options: Options) -> None:
    async def run() -> None:
        sandbox = await e2b.AsyncSandbox.create(timeout=300, **e2b_options)
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


def test_the_table_has_every_method_of_the_client() -> None:
    sandbox = e2b.Sandbox
    owners = (
        sandbox,
        sandbox.commands.fget.__annotations__["return"],
        sandbox.files.fget.__annotations__["return"],
        sandbox.pty.fget.__annotations__["return"],
        sandbox.git.fget.__annotations__["return"],
        e2b.CommandHandle,
        e2b.Template,
    )
    public = {f"{owner.__name__}.{name}" for owner in owners for name in dir(owner) if name[0] != "_" and callable(getattr(owner, name))}
    assert public == {one.method for one in METHODS}
    assert {one.version for one in METHODS} == {importlib.metadata.version("e2b")}
    assert all(one.how == "works" or one.how.startswith(("differs: ", "refused: ")) for one in METHODS)
