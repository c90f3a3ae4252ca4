"""Sandboxes and templates: E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import httpx
import pytest

from tests.gateway.conftest import Served, options_of

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real

Options = dict[str, str]

LEASE_S = 6
"""Long enough for a call that makes it longer to come in time."""


def test_a_sandbox_that_is_killed_under_a_command_is_no_failure_of_that_command(e2b_options: Options) -> None:
    sandbox = e2b.Sandbox.create(**e2b_options)
    running = sandbox.commands.run("sleep 60", background=True)
    assert e2b.Sandbox.kill(sandbox.sandbox_id, **e2b_options)
    for call in (running.wait, lambda: sandbox.commands.run("true"), lambda: sandbox.files.read("x")):
        with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
            call()


def test_a_sandbox_ends_with_its_timeout_and_a_longer_one_lasts(served: Served, e2b_options: Options) -> None:
    longer = e2b.Sandbox.create(timeout=LEASE_S, **e2b_options)
    longer.set_timeout(300)
    connected = e2b.Sandbox.create(timeout=LEASE_S, **e2b_options)
    e2b.Sandbox.connect(connected.sandbox_id, timeout=300, **e2b_options)
    short = e2b.Sandbox.create(timeout=LEASE_S, **e2b_options)
    served.live.until(lambda: not short.is_running())
    # That nothing runs in it is no news of its processes
    for call in (short.commands.list, lambda: short.commands.kill(1), lambda: short.commands.connect(1)):
        with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
            call()
    for lasting in (longer, connected):
        assert lasting.commands.run("echo there").stdout == "there\n"
        lasting.kill()


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


def test_the_token_of_one_sandbox_does_not_open_another(served: Served, e2b_sandbox: e2b.Sandbox) -> None:
    others = options_of(served, "e2b-others")
    assert not e2b.Sandbox.kill(e2b_sandbox.sandbox_id, **others)
    other = e2b.Sandbox.create(**others)
    headers = {"E2b-Sandbox-Id": e2b_sandbox.sandbox_id, "X-Access-Token": other._envd_access_token}
    answer = httpx.get(f"{served.url}/files", params={"path": "x"}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, 401)
    assert httpx.post(f"{served.url}/process.Process/List", json={}, headers=headers).json()["code"] == "unauthenticated"
    other.kill()
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(**{**others, "api_key": "e2b_wrong"})


def test_metadata_are_any_text_and_may_name_an_image_but_no_cores(served: Served) -> None:
    options, metadata = options_of(served, "e2b-metadata"), {"cpus": "64", "tangram-image": "alpine:3"}
    sandbox = e2b.Sandbox.create(metadata=metadata, **options)
    assert sandbox.commands.run("echo $TANGRAM_DOP_MAX").stdout == "1\n"
    (listed,) = e2b.Sandbox.list(**options).next_items()
    assert (listed.metadata, listed.cpu_count) == (metadata, 1)
    query = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{sandbox.sandbox_id}'"
    served.live.until(lambda: served.live.rows(query) == [("alpine:3",)])
    sandbox.kill()


def test_what_can_never_run_is_refused(e2b_options: Options) -> None:
    keys = {name: e2b_options[name] for name in ("api_key", "api_url")}
    e2b.Template.build(e2b.Template().from_image("large"), "large", memory_mb=10**6, **keys)
    with pytest.raises(e2b.SandboxException, match="400"):
        e2b.Sandbox.create("large", **e2b_options)
