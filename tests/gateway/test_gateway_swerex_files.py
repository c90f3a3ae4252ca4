"""Files and uploads of SWE-ReX's unchanged client."""

from __future__ import annotations

import hashlib
import io
import secrets
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from swerex.exceptions import SwerexException
from swerex.runtime.abstract import ReadFileRequest, UploadRequest, WriteFileRequest

from app.gateway.rex_upload import MOST_ENTRIES
from tests.clients.rows import shows
from tests.gateway.rex_support import Rex, do, rex, runtime_of

pytestmark = pytest.mark.real

__all__ = ["rex", "runtime_of"]


@shows("swe-rex", "read_file", "works, in the environment's own folders; at most 64 MiB")
@shows("swe-rex", "write_file", "works, in the environment's own folders")
def test_files_are_read_as_python_reads_them(rex: Rex) -> None:
    text = "zwölf\nlines ☃\n"
    do(rex.runtime.write_file(WriteFileRequest(path="deep/er/file.txt", content=text)))
    assert do(rex.runtime.read_file(ReadFileRequest(path="deep/er/file.txt"))).content == text
    # And a patch is whole, which SWE-agent submits as a file, however long it is
    rex.execute("seq 500000 > model.patch", shell=True)
    assert len(do(rex.runtime.read_file(ReadFileRequest(path="model.patch"))).content) == 3_388_895
    rex.execute("printf 'a\\r\\nb\\377' > odd", shell=True)
    assert do(rex.runtime.read_file(ReadFileRequest(path="odd", encoding="latin-1"))).content == "a\nbÿ"
    assert do(rex.runtime.read_file(ReadFileRequest(path="odd", errors="backslashreplace"))).content == "a\nb\\xff"
    # And what cannot be read so, or cannot travel as text, is an error of its file
    before = rex.served.infra_failed()
    for options, says in (({}, "decode"), ({"encoding": "no-such-code"}, "no-such-code"), ({"errors": "surrogateescape"}, "surrogates")):
        with pytest.raises(SwerexException, match=says):
            do(rex.runtime.read_file(ReadFileRequest(path="odd", **options)))
    assert rex.served.infra_failed() == before


@shows("swe-rex", "read_file")
@shows("swe-rex", "write_file")
def test_a_file_that_cannot_be_used_is_pythons_error(rex: Rex) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        do(rex.runtime.read_file(ReadFileRequest(path="nowhere")))
    rex.execute(["mkdir", "-p", "folder"])
    with pytest.raises(IsADirectoryError):
        do(rex.runtime.read_file(ReadFileRequest(path="folder")))
    with pytest.raises(IsADirectoryError):
        do(rex.runtime.write_file(WriteFileRequest(path="folder", content="")))


@shows("swe-rex", "upload", "works; a folder keeps its permissions; needs `tar` in the image")
@pytest.mark.parametrize("size", [0, 1000, 2**20, 3 * 2**20 + 1])
def test_a_file_of_any_size_is_uploaded_whole(rex: Rex, tmp_path: Path, size: int) -> None:
    data = secrets.token_bytes(size)
    (tmp_path / "data").write_bytes(data)
    do(rex.runtime.upload(UploadRequest(source_path=str(tmp_path / "data"), target_path=f"up/{size} ü.bin")))
    assert rex.execute(["wc", "-c", f"up/{size} ü.bin"]).stdout.split()[0] == str(size)
    assert rex.execute(["sha256sum", f"up/{size} ü.bin"]).stdout.split()[0].lstrip("\\") == hashlib.sha256(data).hexdigest()
    assert rex.execute("ls -A up | grep tangram", shell=True).stdout == ""


def test_a_large_upload_takes_the_place_of_a_file_at_once_or_leaves_it(rex: Rex, tmp_path: Path) -> None:
    # Given a program behind a link, and a folder that cannot hold another file of that size
    (tmp_path / "data").write_bytes(b"x" * (3 * 2**20))
    rex.execute("mkdir -p kept && cd kept && echo old > run && chmod 750 run && ln -sf run link && echo old > /dev/shm/small", shell=True)
    rex.execute("head -c 62M /dev/zero > /dev/shm/full", shell=True)
    # When the upload fits, then the program has its permissions, and the link still leads to it
    do(rex.runtime.upload(UploadRequest(source_path=str(tmp_path / "data"), target_path="~/kept/link")))
    assert rex.execute("cd kept && stat -c '%a %s' run && readlink link && ls -A", shell=True).stdout.split() == (
        ["750", str(3 * 2**20), "run", "link", "run"]
    )
    # And where it does not fit, the file is as it was, and nothing else is there
    if rex.execute("df -m /dev/shm | tail -1", shell=True).stdout.split()[1] == "64":
        with pytest.raises(Exception, match="No space left"):
            do(rex.runtime.upload(UploadRequest(source_path=str(tmp_path / "data"), target_path="/dev/shm/small")))
        assert rex.execute("cat /dev/shm/small && ls -A /dev/shm", shell=True).stdout.split() == ["old", "full", "small"]
    rex.execute("rm /dev/shm/full /dev/shm/small", shell=True)


def test_a_large_upload_goes_where_a_small_one_goes(rex: Rex, tmp_path: Path) -> None:
    # Given a file that may be written in a folder that may not, and places that are no files
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"x" * (2**20 + 1))
    small.write_bytes(b"x")
    rex.execute(
        "mkdir -p places/shut && cd places && mkfifo pipe && ln -s loop loop && ln -s shut/own link && echo old > fixed", shell=True
    )
    rex.execute("cd places && echo old > fixed && chmod 400 fixed && echo old > shut/own && chmod 500 shut", shell=True)
    for place in ("~", "places/pipe", "places/loop", "places/fixed", "places/shut/new", "/dev/null"):
        for source in (small, large):
            with pytest.raises(OSError):
                do(rex.runtime.upload(UploadRequest(source_path=str(source), target_path=place)))
    for extra, place in ((0, "places/shut/own"), (1, "places/link")):
        large.write_bytes(b"x" * (2**20 + 1 + extra))
        do(rex.runtime.upload(UploadRequest(source_path=str(large), target_path=place)))
        shown = rex.execute("cd places && stat -c %s shut/own fixed && ls -A shut && stat -c %F pipe loop link", shell=True).stdout
        assert shown.split("\n") == [str(2**20 + 1 + extra), "4", "own", "fifo", "symbolic link", "symbolic link", ""]
    # And what has no name in UTF-8, or in any, leaves nothing
    with pytest.raises(Exception, match="400"):
        do(rex.runtime.upload(UploadRequest(source_path=str(large), target_path="places/n\0l")))
    assert rex.execute("ls -A . places /tmp | grep -c -e '[.]tangram'; chmod 700 places/shut; rm -r places", shell=True).stdout == "0\n"


def test_words_that_no_program_can_be_given_are_pythons_error(rex: Rex) -> None:
    no_words: list[dict[str, Any]] = [{"env": {"A=B": "1"}}, {"env": {"": "1"}}, {"env": {"A": "\0"}}, {"command": ["echo", "a\0b"]}]
    for body in (*no_words, {"command": "echo \0", "shell": True}, {"cwd": "/a\0"}):
        with pytest.raises(ValueError, match="must be|has '"):
            rex.execute(**{"command": ["env"], **body})
    too_long: list[dict[str, Any]] = [{"env": {"A": "x" * 2**17}}, {"command": ["echo", *["x" * 100_000] * 20]}]
    for body in (*too_long, {"command": ["echo", "x" * 2**17]}):
        with pytest.raises(OSError, match="Argument list too long"):
            rex.execute(**{"command": ["env"], **body})
    assert rex.execute(f"echo {'x' * 2**17} | wc -c", shell=True).stdout == f"{2**17 + 1}\n"


@shows("swe-rex", "upload")
def test_a_folder_is_uploaded_with_what_is_in_it(rex: Rex, tmp_path: Path) -> None:
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "sub" / "tool").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "sub" / "tool").chmod(0o755)
    (tmp_path / "big").write_bytes(secrets.token_bytes(2 * 2**20))
    do(rex.runtime.upload(UploadRequest(source_path=str(tmp_path), target_path="tools")))
    assert rex.execute(["./tools/sub/tool"]).stdout == "ran\n"
    assert rex.execute("cd tools && find . | sort", shell=True).stdout.split() == [".", "./big", "./sub", "./sub/empty", "./sub/tool"]
    assert rex.execute(["sha256sum", "tools/big"]).stdout.split()[0] == hashlib.sha256((tmp_path / "big").read_bytes()).hexdigest()


def test_an_upload_that_cannot_be_taken_leaves_nothing(rex: Rex, tmp_path: Path) -> None:
    rex.execute(["mkdir", "-p", "taken/in"])
    (tmp_path / "data").write_bytes(bytes(2**20 + 1))
    with pytest.raises(IsADirectoryError):
        do(rex.runtime.upload(UploadRequest(source_path=str(tmp_path / "data"), target_path="taken/in")))
    assert rex.execute(["find", "taken"]).stdout.split() == ["taken", "taken/in"]


@pytest.mark.parametrize(
    ("names", "code", "says"),
    [
        (None, 400, "ZIP"),
        (["long" * 75], 511, "builtins.OSError"),
        (["a", "a/b"], 511, "builtins.OSError"),
        (map(str, range(MOST_ENTRIES - 1)), 413, ""),
    ],
    ids=["none", "a name that is too long", "a file as a folder", "too many entries"],
)
def test_an_archive_that_cannot_be_unpacked_is_an_error_of_its_files(rex: Rex, names: Iterable[str] | None, code: int, says: str) -> None:
    archive = io.BytesIO(b"no archive")
    if names is not None:
        with zipfile.ZipFile(archive, "w") as packed:
            for name in names:
                packed.writestr(name, b"x")
    before, form = rex.served.infra_failed(), {"target_path": "unpacked", "unzip": "true"}
    answer = httpx.post(f"{rex.url}/upload", data=form, files={"file": archive.getvalue()}, headers={"X-API-Key": rex.token}, timeout=60)
    assert answer.status_code == code and says in answer.text
    assert rex.served.infra_failed() == before
    assert rex.execute("ls -A unpacked | grep tangram", shell=True).stdout == ""
