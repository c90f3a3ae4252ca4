"""Sandboxes and templates: E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.gateway.conftest import Served, options_of

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real

Options = dict[str, str]

LEASE_S = 8
"""Long enough for a call that makes it longer to come in time."""


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
