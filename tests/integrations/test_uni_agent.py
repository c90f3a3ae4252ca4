"""uni-agent's sandboxes, unchanged, over ours. Not on PyPI: run with its source tree on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uni_agent.sandbox.registry", reason="uni-agent is not installed")

from uni_agent.sandbox import Sandbox, SandboxConfig, build_sandbox

import tangram.integrations.uni_agent
from tangram import ActionCancelled, ActionFailed, AsyncClient
from tests.integrations.conftest import standing
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]


def built(**options: object) -> Sandbox:
    assert tangram.integrations.uni_agent
    return build_sandbox(SandboxConfig(provider="tangram", sandbox_kwargs={"job": "uni", **options}))


async def test_commands_files_and_folders(live: Live, tmp_path: Path) -> None:
    before = standing(live)
    async with built() as sandbox:
        done = await sandbox.exec(["bash", "-c", "echo $A; echo bad >&2; exit 4"], env={"A": "1 2"})
        assert (done.exit_code, done.stdout, done.stderr) == (4, "1 2\n", "bad\n")
        assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME"])).stdout == "a b|$HOME|"
        await sandbox.write_file("folder/one", b"\x00\xff")
        assert await sandbox.read_file("folder/one") == b"\x00\xff"
        await sandbox.download("folder", tmp_path / "got")
        await sandbox.upload(tmp_path / "got", "again")
        assert (await sandbox.exec(["ls"], workdir="again")).stdout == "one\n"
    live.until(lambda: set(standing(live)) <= set(before))


async def test_a_shell_keeps_its_folder_and_goes_on_after_a_timeout() -> None:
    async with built() as sandbox:
        shell = await sandbox.open_shell(env={"A": "1"})
        await shell.run("mkdir -p down && cd down")
        late = await shell.run("echo early; sleep 60", timeout=6)
        assert (late.exit_code, late.stdout) == (-1, "early\n")
        done = await shell.run("echo $A; basename $PWD")
        assert done.stdout == "1\ndown\n"
        await shell.close()


async def test_a_sandbox_that_is_gone_raises_and_is_not_alive(live: Live) -> None:
    sandbox = built(trajectory="gone")
    await sandbox.start()
    async with AsyncClient("uni") as other:
        await other.cancel(trajectory="gone")
    with pytest.raises((ActionCancelled, ActionFailed)):
        await sandbox.exec(["true"])
    assert not await sandbox.is_alive()
    await sandbox.stop()
