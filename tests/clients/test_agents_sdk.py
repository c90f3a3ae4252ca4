"""The E2B sandboxes of OpenAI's Agents SDK, unchanged, against a gateway. Workspaces have absolute paths, so sandboxes are set apart."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents.extensions.sandbox.e2b", reason="the Agents SDK is not installed")

import e2b
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox.entries import Dir, File
from agents.sandbox.errors import ExecTimeoutError, WorkspaceArchiveReadError, WorkspaceReadNotFoundError
from agents.sandbox.manifest import Manifest

from tests.clients.conftest import Served, left_open
from tests.clients.rows import shows
from tests.gateway.conftest import serving

pytestmark = pytest.mark.real

HERE = Path(".")


@pytest.fixture(scope="module")
def served(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("agents-sdk"), variables={"TANGRAM_ISOLATION": "bubblewrap"}) as served:
        yield served


def options(**more: Any) -> E2BSandboxClientOptions:
    return E2BSandboxClientOptions(**{"sandbox_type": "e2b", "on_timeout": "kill", "timeout": 600, "envs": {"OF_THE_TASK": "1"}, **more})


@pytest.fixture
async def session(served: Served, e2b_environment: str) -> AsyncIterator[Any]:
    """Give a session whose workspace has two files; its sandbox is gone in the end."""
    entries = {"a.txt": File(content=b"here"), "d": Dir(children={"b.txt": File(content=b"deep")})}
    client = E2BSandboxClient()
    made = await client.create(manifest=Manifest(root="/home/user/workspace", entries=entries), options=options())
    await made.start()
    yield made
    await made.shutdown()
    await client.delete(made)
    assert left_open(served, e2b_environment) == 0


@shows("openai-agents", "E2BSandboxClient.create, delete", 'works; with on_timeout="kill" and a root where the sandbox may write')
async def test_a_workspace_is_made_where_commands_run(session: Any) -> None:
    done = await session.exec("pwd; cat a.txt d/b.txt; echo $OF_THE_TASK >&2; exit 7", shell=True)
    assert (done.stdout, done.stderr, done.exit_code) == (b"/home/user/workspace\nheredeep", b"1\n", 7)


@shows("openai-agents", 'E2BSandboxClient.create(on_timeout="pause"), its default', "refused: a sandbox ends with its timeout")
async def test_a_sandbox_that_is_to_be_paused_is_refused_with_the_way_out(served: Served, e2b_environment: str) -> None:
    with pytest.raises(e2b.SandboxException, match="have `on_timeout` be `kill`"):
        await E2BSandboxClient().create(options=options(on_timeout="pause"))


@shows("openai-agents", "SandboxSession.exec, read, write, mkdir, ls, rm")
async def test_commands_and_files(session: Any) -> None:
    data = bytes(range(256))
    await session.write(Path("new/ü.bin"), io.BytesIO(data))
    assert (await session.read(Path("new/ü.bin"))).read() == data
    await session.mkdir(Path("made/deep"), parents=True)
    assert {Path(entry.path).name for entry in await session.ls(HERE)} == {"a.txt", "d", "made", "new"}
    await session.rm(Path("made"), recursive=True)
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("made"))
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 60", shell=True, timeout=1)


@shows("openai-agents", "SandboxSession.pty_exec_start")
async def test_a_program_gets_a_terminal(session: Any) -> None:
    update = await session.pty_exec_start("test -t 0 && echo is-$((40 + 2))", tty=True, yield_time_s=0.25)
    shown = update.output
    while b"is-42" not in shown:
        update = await session.pty_write_stdin(session_id=update.process_id, chars="", yield_time_s=0.25)
        shown += update.output


@shows("openai-agents", "SandboxSession.persist_workspace, hydrate_workspace; E2BSandboxClient.resume")
async def test_a_workspace_is_kept_and_comes_back(session: Any) -> None:
    kept = (await session.persist_workspace()).read()
    await session.rm(Path("a.txt"))
    again = await E2BSandboxClient().resume(session.state)
    await again.hydrate_workspace(io.BytesIO(kept))
    assert (await session.read(Path("a.txt"))).read() == b"here"


@shows("openai-agents", 'E2BSandboxClient.create(workspace_persistence="snapshot")', "refused: 501")
async def test_a_snapshot_is_refused(served: Served, e2b_environment: str) -> None:
    client = E2BSandboxClient()
    made = await client.create(manifest=Manifest(root="/home/user/workspace"), options=options(workspace_persistence="snapshot"))
    await made.start()
    with pytest.raises(WorkspaceArchiveReadError) as refused:
        await made.persist_workspace()
    assert "501" in str(refused.value.__cause__)
    await made.shutdown()
