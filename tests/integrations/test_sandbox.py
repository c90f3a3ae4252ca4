"""What the classes for frameworks share, without any framework."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tangram import AsyncClient, ClientClosed
from tangram.errors import ActionRefused
from tangram.integrations import actions
from tangram.integrations.sandbox import Sandbox, borrow_client, return_client
from tangram.integrations.verl_reward import ScoreFailed, compute_score
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]


@pytest.fixture
async def sandbox(live: Live) -> AsyncIterator[Sandbox]:
    async with AsyncClient("shared") as client:
        yield await Sandbox.open(client, trajectory="t")


async def test_a_folder_goes_in_and_comes_out_as_it_was(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "empty").mkdir(parents=True)
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("run")
    await sandbox.upload(source, "it's here")
    assert (await sandbox.exec("./link; ls", cwd="it's here")).stdout == "ran\nempty\nlink\nrun\n"
    await sandbox.download("it's here", tmp_path / "out")
    assert (tmp_path / "out" / "link").readlink() == Path("run") and (tmp_path / "out" / "empty").is_dir()


async def test_pipes_and_links_out_of_a_folder_are_left_out(sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Given a folder with links such as those of a virtual environment, one of them under two names
    (tmp_path / "secret").write_text("here")
    outside = tmp_path / "secret"
    links = f"ln -s {outside} v/bin/python; ln v/bin/python v/bin/python3; ln -s ../../x v/up; ln -s lib v/lib64"
    await sandbox.exec(f"mkdir -p v/bin v/lib; mkfifo v/pipe; echo x > v/lib/file; {links}; ln v/lib/file v/lib/same")
    await sandbox.download("v", tmp_path / "v")
    # Then all else comes, and the log names what does not
    there = sorted(str(path.relative_to(tmp_path / "v")) for path in (tmp_path / "v").rglob("*"))
    assert there == ["bin", "lib", "lib/file", "lib/same", "lib64"]
    assert (tmp_path / "v" / "lib" / "same").read_text() == "x\n" and (tmp_path / "v" / "lib64").readlink() == Path("lib")
    assert [name in caplog.text for name in ("bin/python'", "bin/python3'", "up'")] == [True] * 3
    # A link that is named itself gives what it leads to
    await sandbox.exec("ln -s v/lib/file named")
    await sandbox.download("named", tmp_path / "named")
    assert (tmp_path / "named").read_text() == "x\n" and not (tmp_path / "named").is_symlink()


def test_what_cannot_be_an_archive_is_a_failed_transfer(tmp_path: Path) -> None:
    with pytest.raises(actions.TransferFailed, match="could not be unpacked"):
        actions.write_local(io.BytesIO(b"no tar file " * 100), tmp_path / "f")
    assert not (tmp_path / "f").exists()


async def test_what_is_not_there_is_a_missing_file_and_a_pipe_a_failed_transfer(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing does not exist in environment"):
        await sandbox.download("nothing", tmp_path / "f")
    await sandbox.exec("mkfifo pipe; echo x > file")
    with pytest.raises(actions.TransferFailed, match="no regular file"):
        await sandbox.download("pipe", tmp_path / "f")
    (tmp_path / "in").mkdir()
    with pytest.raises(actions.TransferFailed, match="could not be written"):
        await sandbox.upload(tmp_path / "in", "file")


async def test_a_folder_that_is_there_keeps_its_permissions_and_what_is_in_it(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir -m 751 d && echo old > d/old && echo old > d/new")
    (tmp_path / "new").write_text("new\n")
    await sandbox.upload(tmp_path, "d")
    assert (await sandbox.exec("stat -c %a d; cat d/old d/new")).stdout == "751\nold\nnew\n"
    # And a file gets the permissions that it has here
    (tmp_path / "new").chmod(0o755)
    await sandbox.upload(tmp_path / "new", "~/here")
    assert (await sandbox.exec("stat -c %a './~/here'")).stdout == "755\n"


async def test_commands_run_side_by_side(sandbox: Sandbox) -> None:
    await asyncio.gather(sandbox.exec("while [ ! -e there ]; do sleep 0.01; done", timeout_s=100), sandbox.exec("touch there"))


async def test_sandboxes_of_a_job_share_a_client_which_the_last_one_closes(live: Live) -> None:
    client, same, other = borrow_client("shared"), borrow_client("shared"), borrow_client("other")
    assert same is client and other is not client
    sandbox = await Sandbox.open(client, trajectory="t")
    await return_client(client)
    # A sandbox is running until it is closed, and may be closed again
    assert await sandbox.state() == "running"
    for _ in range(2):
        await sandbox.close()
        assert await sandbox.state() == "closed"
    await return_client(same)
    await return_client(other)
    with pytest.raises(ClientClosed):
        await sandbox.exec("true")


async def test_a_command_that_cannot_begin_is_an_error_and_one_of_any_length_runs(sandbox: Sandbox) -> None:
    with pytest.raises(ActionRefused, match="cwd '/testbed' does not exist") as refused:
        await sandbox.exec("exit 1", cwd="/testbed")
    assert refused.value.fault == "caller"
    assert (await sandbox.exec(f": {'x' * 300_000}; echo ran")).stdout == "ran\n"


@pytest.mark.parametrize("check", ["no-such-tool -q", "A=1 no-such-tool", "cd . && no-such-tool; exit 127"])
async def test_a_check_whose_program_is_not_in_the_image_is_an_error_and_no_score(check: str) -> None:
    with pytest.raises(ScoreFailed, match="no-such-tool"):
        await compute_score("sums", "any", check)


async def test_a_solution_that_ends_its_check_or_takes_the_place_of_its_last_word_is_scored(sandbox: Sandbox) -> None:
    check = "from pathlib import Path\nword = Path('.check-word').read_text()\nPath('.check-word').unlink()\nimport solution\nprint(word)"
    for code, score in (("import os\nos._exit(0)", 0.0), ("print('printed')", 1.0)):
        files = {"files": {"check.py": check}}
        scored = await compute_score("sums", f"```python\n{code}\n```", "python3 check.py", files, last_word=True)
        assert scored == {"score": score, "exit_code": 0}
    # And so is one whose own program is not there
    solution = "```python\nimport sys\nsys.exit(127)\n```"
    assert await compute_score("sums", solution, "python3 solution.py") == {"score": 0.0, "exit_code": 127}
    await sandbox.exec("mkdir .check-word")
    assert await compute_score("sums", "", "true", {"tangram": asdict(sandbox.place)}, last_word=True) == {"score": 0.0, "exit_code": -1}
