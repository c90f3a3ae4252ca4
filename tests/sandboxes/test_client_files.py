"""`env.files` of the client on each kind of sandbox; what lies between them is tested where that is done."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import re
import tarfile
import tracemalloc
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tangram import ActionFailed, ActionRefused, InvalidAction, files
from tangram.action import Action
from tangram.calls import Place
from tangram.files import AsyncFiles, Files
from tangram.results import Act, ExecResult
from tests.workers_cpu.support import printed
from workers.cpu.abstract import Environment, ExecRequest
from workers.cpu.errors import SandboxError

from .conftest import own_root


class Carried:
    """An action, carried out on an environment as soon as somebody wants its result."""

    def __init__(self, env: Environment, action: Action, limit: int) -> None:
        self._env, self._action, self._limit = env, action, limit

    def result(self) -> Any:
        said = dict(self._action.arguments)
        try:
            if self._action.kind == "cpu.read_file":
                return self._env.read_file(said["path"], said["offset"], said["length"])
            if self._action.kind == "cpu.write_file":
                return self._env.write_file(said["path"], said["data"], said.get("mode"), said.get("offset", 0))
        except SandboxError as error:
            raise ActionRefused(str(error), type(error).__name__) from None
        request = ExecRequest(action_id="a", command=said["command"], session=said["session"], output_limit_bytes=self._limit)
        done = self._env.start(request).wait()
        return ExecResult(
            status=done.status, exit_code=done.exit_code, stdout=done.stdout.decode(), stderr=done.stderr.decode(),
            truncated=done.truncated, dop=1, act=Act(queue_s=0.0, overhead_s=0.0, execution_s=0.0),
        )  # fmt: skip

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()


class Sent:
    """A session that has its actions carried out on an environment, and counts them."""

    def __init__(self, env: Environment, limit: int = 1 << 20) -> None:
        self.env, self.limit, self.kinds, self.through = env, limit, list[str](), set[str]()

    def submit(self, action: Action) -> Carried:
        self.kinds.append(action.kind)
        self.through |= set(re.findall(r"/tmp/tangram-files-\w+", str(action.arguments)))
        return Carried(self.env, action, self.limit)

    @property
    def files(self) -> Files:
        return Files(cast(Any, self), Place("j", "t", "e"))


def test_several_files_are_written_and_read_in_one_action_each(env: Environment) -> None:
    sent = Sent(env)
    given = {"plain": b"\0\xff" * 5000, "C:\\new\\table": b"c", "~/deep/in/it's \n here": "é", "empty": b"", "./plain2": b"x"}

    sent.files.write(given)
    found = sent.files.read(list(given))

    assert found == {name: data.encode() if isinstance(data, str) else data for name, data in given.items()}
    assert sent.kinds == ["cpu.exec", "cpu.exec"]
    home = printed(env, 'cd; printf %s "$PWD"')
    assert sent.files.read("~/plain") == sent.files.read("plain") == sent.files.read(f"{home}/plain") == given["plain"]


def test_paths_may_be_those_of_pathlib(env: Environment, tmp_path: Path) -> None:
    files, folder = Sent(env).files, Path("deep")

    files.write({folder / "a": b"1", folder / "b": b"2"})
    files.write(folder / "c", b"3")
    files.upload(tmp_path, folder / "d")

    assert files.read([folder / "a", "deep/b"]) == {folder / "a": b"1", "deep/b": b"2"}
    assert files.read(folder / "c") == b"3"
    assert files.rename(folder / "c", Path("e")).name == "e" and files.exists(Path("e"))
    assert [one.name for one in files.list(folder)] == ["a", "b", "d"]


def test_a_file_is_as_large_as_it_likes(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    sent = Sent(env)
    for size in (0, 999, 1000, 2500):
        sent.files.write("f", os.urandom(size) if size else b"", 0o640)
        assert len(sent.files.read("f")) == size
    assert sent.files.stat("f").mode == 0o640


def test_what_a_read_returns_is_bounded_and_a_download_is_not(env: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1000)
    monkeypatch.setattr(files, "MOST_READ_BYTES", 20_000)
    sent = Sent(env, limit=2000)
    printed(env, "cd; truncate -s 50000 f 2>/dev/null || head -c 50000 /dev/zero >f")
    for path in ("f", ["f"]):
        with pytest.raises(ActionRefused, match="^(f|the archive of these files) has more .* download it") as caught:
            sent.files.read(path)
        assert caught.value.problem == "FileTooLarge"
    assert sent.kinds.count("cpu.read_file") < 50
    assert not any(sent.files.exists(path) for path in sent.through)
    sent.files.download("f", tmp_path / "deep" / "f")
    assert (tmp_path / "deep" / "f").read_bytes() == bytes(50_000)


def test_a_transfer_is_in_memory_once(tmp_path: Path) -> None:
    size, place = 24 << 20, Place("j", "t", "e")

    def peak(steps: Generator[Action, Any, Any]) -> float:
        """Return how often a transfer holds what it moves, at most."""

        def act(action: Action) -> bytes:
            said = action.arguments
            return bytes(max(0, min(said["length"], size - said["offset"]))) if action.kind == "cpu.read_file" else b""

        tracemalloc.start()
        try:
            files.drive(steps, act)
            return tracemalloc.get_traced_memory()[1] / size
        finally:
            tracemalloc.stop()

    (tmp_path / "f").write_bytes(bytes(size))
    assert peak(files._read(place, "f")) < 1.5
    assert peak(files.upload(place, "f", files._Local.pack(tmp_path / "f"))) < 0.5  # beside the file itself


def test_what_is_too_large_for_a_text_and_an_output_goes_through_a_file_that_is_removed(
    env: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 4000)
    sent = Sent(env, limit=2000)
    given = {f"f{number}": os.urandom(3000) for number in range(5)}

    sent.files.write(given)

    assert sent.files.read(list(given)) == given
    sent.files.download("~", tmp_path / "all")
    assert (tmp_path / "all" / "f3").read_bytes() == given["f3"]
    # Also where it goes wrong, as there is no room here
    with pytest.raises(ActionRefused):
        sent.files.write({"f0/below": os.urandom(9000)})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        sent.files.download("~", tmp_path / "again")
    assert len(sent.through) == 5
    assert not any(sent.files.exists(path) for path in sent.through)


def test_what_is_there_is_listed_told_moved_and_removed(env: Environment) -> None:
    found = Sent(env).files
    found.make_dir("a/b", "a/b", "c")
    found.write({"a/one": b"1", "a/b/two": b"22"})
    printed(env, "cd; ln -s one a/link; chmod 600 a/one")

    assert [(one.name, one.kind, one.target) for one in found.list("a")] == [
        ("b", "folder", ""), ("link", "link", "one"), ("one", "file", ""),
    ]  # fmt: skip
    assert [one.path.rpartition("/a/")[2] for one in found.list("~/a", depth=2)] == ["b", "b/two", "link", "one"]
    told = found.stat("a/one")
    assert (told.kind, told.size, told.mode, told.permissions, told.changed_at > 0) == ("file", 1, 0o600, "-rw-------", True)
    assert found.rename("a/one", "new/place").path.endswith("/new/place")
    assert (found.exists("a/one"), found.exists("a/link"), found.exists("new/place")) == (False, True, True)
    found.remove("a", "new/place", "never-there")
    assert sorted(one.name for one in found.list() if not one.name.startswith(".")) == ["c", "new"]


def test_folders_and_files_come_and_go(env: Environment, tmp_path: Path) -> None:
    found = Sent(env).files
    local = tmp_path / "local"
    (local / "sub").mkdir(parents=True)
    (local / "sub" / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (local / "sub" / "run").chmod(0o755)
    (local / "link").symlink_to("sub/run")

    found.upload(local, "~/there")
    assert printed(env, "cd; there/sub/run; there/link") == "ran\nran\n"
    found.download("there", tmp_path / "back")
    found.upload(local / "link", "one")
    found.download("one", tmp_path / "deep" / "one")

    assert (tmp_path / "back" / "sub" / "run").read_bytes() == (tmp_path / "deep" / "one").read_bytes() == (local / "link").read_bytes()
    assert (tmp_path / "deep" / "one").stat().st_mode & 0o777 == 0o755
    found.upload(local, "C:\\new")
    found.download("C:\\new", tmp_path / "C:\\new")
    found.download("C:\\new/sub/run", tmp_path / "run")
    assert (tmp_path / "C:\\new" / "sub" / "run").read_bytes() == (tmp_path / "run").read_bytes() == (local / "link").read_bytes()
    assert os.readlink(tmp_path / "back" / "link") == "sub/run"
    # What cannot be unpacked is named
    found.write({"taken/link/x": b""})
    with pytest.raises(ActionRefused, match="link"):
        found.upload(local, "taken")


def test_an_archive_of_a_program_writes_nothing_beside_the_local_folder(env: Environment, tmp_path: Path) -> None:
    found = Sent(env).files
    found.make_dir("bad")
    printed(env, "cd; ln -s /etc bad/out")
    with pytest.raises(ActionRefused, match="absolute path"):
        found.download("bad", tmp_path / "here")


def packed(*members: dict[str, Any], mode: str = "w") -> str:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for fields in members:
            member = tarfile.TarInfo("0")
            for name, value in fields.items():
                setattr(member, name, value)
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return base64.b64encode(file.getvalue()).decode()


def answered(exit_code: int | None, **fields: str) -> Files:
    """Return files of an environment in which each command ends so."""
    said = {"stdout": "", "stderr": "", **fields}
    act = Act(queue_s=0.0, overhead_s=0.0, execution_s=0.0)
    result = ExecResult(status="succeeded", exit_code=exit_code, truncated=False, dop=1, act=act, **said)
    return Files(cast(Any, SimpleNamespace(submit=lambda action: SimpleNamespace(result=lambda: result))), Place("j", "t", "e"))


HUGE = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 44), "GNU.sparse.name": "0"}
CLAIMING = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 50), "GNU.sparse.numblocks": "1"}


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "no base64!",
        "\u00e9",
        base64.b64encode(b"no archive" * 1000).decode(),
        packed({}, mode="w:xz"),  # which may hold a thousand times as much
        packed(),
        packed({}, {}),
        packed({"pax_headers": HUGE}),
        packed({"pax_headers": CLAIMING}),
        packed({"pax_headers": {**CLAIMING, "GNU.sparse.size": "many"}}),
        packed({"type": tarfile.LNKTYPE, "linkname": "none"}),
        packed({"type": tarfile.SYMTYPE, "linkname": "0"}),
        packed({"type": tarfile.FIFOTYPE}),
        packed({"size": 5000})[:2000],
    ],
)
def test_what_programs_of_an_environment_print_instead_of_an_archive_is_refused(printed: str, tmp_path: Path) -> None:
    found = answered(0, stdout=printed)
    with pytest.raises(ActionRefused) as caught:
        found.read(["f"])
    assert caught.value.problem == "FileUnusable"
    if printed != packed({}, {}):
        with pytest.raises(ActionRefused):
            found.download("f", tmp_path / "f")
        assert not (tmp_path / "f").exists()


def test_what_cannot_be_done_is_refused_and_says_why(env: Environment) -> None:
    found = Sent(env).files
    found.make_dir("folder")
    for ask, problem in (
        (lambda: found.read("none"), "NoSuchFile"),
        (lambda: found.read(["none"]), "NoSuchFile"),
        (lambda: found.read(["folder"]), "FileUnusable"),
        (lambda: found.stat("none"), "NoSuchFile"),
        (lambda: found.list("none"), "NoSuchFile"),
        (lambda: found.write({"folder": b""}), "FileUnusable"),
        (lambda: found.rename("none", "some"), "NoSuchFile"),
        (lambda: found.download("none", "x"), "NoSuchFile"),
    ):
        with pytest.raises(ActionRefused) as caught:
            ask()
        assert (caught.value.problem, caught.value.fault) == (problem, "caller")
    for wrong in (
        lambda: found.read(["a\0"]),
        lambda: found.stat(""),
        lambda: found.write({"a": b""}, mode=0o600),
        lambda: found.write({"a": cast(Any, 5)}),
        lambda: found.write("a", cast(Any, 5)),
        lambda: found.write({"a": "\ud800"}),
    ):
        with pytest.raises(InvalidAction):
            wrong()
    with pytest.raises(FileNotFoundError):
        found.upload("/never/there", "x")


@pytest.mark.parametrize(
    ("exit_code", "cause", "fault"),
    [
        (254, "exit", "program"),  # no process could be started beside those that programs have left
        (137, "exit", "program"),
        (137, "out_of_memory", "program"),
        (127, "exit", "infrastructure"),  # the image lacks a tool
        (126, "exit", "infrastructure"),
        (2, "exit", "program"),  # as dash says it where no process can be started
    ],
)
def test_what_ends_the_tools_of_a_file_call_is_the_programs_affair(exit_code: int, cause: str, fault: str) -> None:
    with pytest.raises(ActionFailed, match="^sh: 4: Cannot fork$") as caught:
        answered(exit_code, cause=cause, stderr="tar: Exiting now\nsh: 4: Cannot fork\n").list(".")
    assert (caught.value.cause, caught.value.fault) == (cause if fault == "program" else "sandbox_failed", fault)


@own_root
def test_relative_paths_begin_nowhere_else_where_the_home_is_locked(env: Environment) -> None:
    printed(env, "chmod 000 .")
    for ask in (lambda: Sent(env).files.list("."), lambda: Sent(env).files.write({"a": b"", "b": b""})):
        with pytest.raises(ActionRefused, match="cd: ") as caught:
            ask()
        assert caught.value.problem == "FileUnusable"
    printed(env, "chmod 755 ~")


def test_coroutines_have_the_same_words(env: Environment, tmp_path: Path) -> None:
    found = AsyncFiles(cast(Any, Sent(env)), Place("j", "t", "e"))

    async def main() -> None:
        await found.write({"a/one": b"1", "two": "2"})
        await found.write("three", b"3")
        assert await found.read(["two", "three"]) == {"two": b"2", "three": b"3"}
        await found.make_dir("d")
        await found.upload(tmp_path, "d")
        await found.download("a", tmp_path / "a")
        await found.rename("two", "d/two")
        await found.remove("three")
        assert [await found.exists(name) for name in ("two", "d/two", "three")] == [False, True, False]
        assert (await found.stat("d")).kind == "folder"
        assert [one.name for one in await found.list("a")] == ["one"]
        with pytest.raises(ActionRefused):
            await found.read("none")

    asyncio.run(main())
    assert (tmp_path / "a" / "one").read_bytes() == b"1"
