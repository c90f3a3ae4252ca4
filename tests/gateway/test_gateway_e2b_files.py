"""Files: E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest

from tangram.calls import Place
from tangram.results import Chunk
from tests.gateway.conftest import Served

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from fastapi import Request

from app.gateway import calls
from app.gateway.e2b import RpcError
from app.gateway.e2b_filesystem import list_folder
from app.gateway.errors import GatewayError, InfraFailed, ProgramFailed

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

MB = 2**20


def test_a_large_file_goes_in_and_comes_out(e2b_sandbox: e2b.Sandbox) -> None:
    data = bytes(range(256)) * (7 * MB // 256)
    e2b_sandbox.files.write("large", io.BytesIO(data))
    assert e2b_sandbox.files.read("large", format="bytes") == data
    with pytest.raises(e2b.SandboxException, match="413"):
        e2b_sandbox.files.write("larger", io.BytesIO(data + data))


def test_a_form_may_have_thousands_of_files(served: Served, e2b_headers: dict[str, str]) -> None:
    # Given a form that is refused for what it says, so that nothing is written
    files = [("file", (f"many/{number}", b"x")) for number in range(5000)]
    answer = httpx.post(f"{served.url}/files", params={"path": "one"}, files=files, headers=e2b_headers, timeout=60)
    # Then it is not its length that it is refused for
    assert answer.status_code == 400 and "one alone where the query names a path" in answer.text


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("ListDir", {"path": ".", "depth": 10**30}, "invalid_argument"),
        ("MakeDir", {"path": "/proc/x"}, "invalid_argument"),
        ("MakeDir", {"path": "/dev/null/x"}, "invalid_argument"),
        ("Move", {"source": "here", "destination": "here/below"}, "invalid_argument"),
        ("Move", {"source": "here", "destination": "/proc/sys/x"}, "permission_denied"),
        ("Remove", {"path": "/proc/self/status"}, "permission_denied"),
        ("Stat", {"path": "x" * 2**17}, "invalid_argument"),
        ("ListDir", {"path": "a\0b"}, "invalid_argument"),
        ("Move", {"source": "a\0b", "destination": "c"}, "invalid_argument"),
    ],
)
def test_what_no_file_system_does_is_the_callers_affair(
    served: Served, e2b_sandbox: e2b.Sandbox, e2b_headers: dict[str, str], method: str, message: dict[str, Any], code: str
) -> None:
    e2b_sandbox.files.make_dir("here")
    answer = httpx.post(f"{served.url}/filesystem.Filesystem/{method}", json=message, headers=e2b_headers, timeout=60)
    assert answer.json()["code"] == code, answer.text
    if code == "invalid_argument":
        assert not answer.json()["message"].startswith(("command", "interpreter")), answer.text


def test_a_full_file_system_is_no_rate_limit(e2b_sandbox: e2b.Sandbox) -> None:
    if e2b_sandbox.commands.run("df -m /dev/shm | awk 'NR == 2 {print $2}'").stdout != "64\n":
        pytest.skip("the sandbox has no /dev/shm of its own")
    e2b_sandbox.files.write("large", b"x" * MB)
    e2b_sandbox.commands.run("head -c 70M /dev/zero >/dev/shm/full || true")
    with pytest.raises(e2b.NotEnoughSpaceException, match="No space left"):
        e2b_sandbox.files.write("/dev/shm/more", b"x" * MB)
    with pytest.raises(e2b.SandboxException, match="No space left") as refused:
        e2b_sandbox.files.rename("large", "/dev/shm/large")
    assert not isinstance(refused.value, e2b.RateLimitException)


@pytest.mark.parametrize(
    ("exit_code", "cause", "said", "kind"), [(137, "out_of_memory", "", ProgramFailed), (127, "exit", "stat: not found", InfraFailed)]
)
async def test_what_ends_the_tools_of_a_file_call_is_the_programs_affair(
    monkeypatch: pytest.MonkeyPatch, exit_code: int, cause: str, said: str, kind: type[Exception]
) -> None:
    result = SimpleNamespace(exit_code=exit_code, truncated=False, stdout="", stderr=f"{said}\n", cause=cause)
    monkeypatch.setattr(calls, "run", AsyncMock(return_value=result))
    with pytest.raises(kind) as caught:
        await list_folder(*listing())
    assert cast(GatewayError, caught.value).cause == ("sandbox_failed" if kind is InfraFailed else cause)


def test_a_folder_of_thousands_of_files_is_listed_and_a_larger_one_is_refused(e2b_sandbox: e2b.Sandbox) -> None:
    # Given a folder whose entries are more than the output limit of a command lets through
    e2b_sandbox.commands.run("mkdir many more; cd many; seq -f '%0200g' 6000 | xargs touch")
    assert len(e2b_sandbox.files.list("many", depth=2**32 - 1)) == 6000
    # When one has more than is ever read; then that is the caller's error, and none that it would try again
    deep = '"$(printf "%0200d/" $(seq 15))"'
    e2b_sandbox.commands.run(f"cd more; mkdir -p {deep}; cd {deep}; seq -f '%0200g' 3000 | xargs touch")
    with pytest.raises(e2b.SandboxException, match="more entries") as refused:
        e2b_sandbox.files.list("more", depth=16)
    assert not isinstance(refused.value, e2b.RateLimitException)


async def test_a_large_folder_is_not_listed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a listing that is too large for a result, and whose stream ends since the command ran out of time
    async def chunks(*_: object) -> AsyncIterator[Chunk]:
        yield Chunk(stream="stdout", data=b"/many\0//81a4 0 0 root root -rw-r--r-- ./a\n", id="1")

    whole = SimpleNamespace(exit_code=0, truncated=True, stdout="")
    handle = SimpleNamespace(id="listing", cancel=lambda: None)
    monkeypatch.setattr(calls, "run", AsyncMock(return_value=whole))
    monkeypatch.setattr(calls, "submit", lambda *_: handle)
    monkeypatch.setattr(calls, "wait", AsyncMock(return_value=SimpleNamespace(exit_code=None)))
    with pytest.raises(RpcError, match="was ended after"):
        await list_folder(*listing(chunks))


def listing(chunks: object = None) -> tuple[Request, Any]:
    """Return a request for what is in a folder, and a sandbox whose commands print `chunks`."""
    sandbox = SimpleNamespace(
        processes=SimpleNamespace(unlisted_session=lambda: contextlib.nullcontext("s")),
        record=SimpleNamespace(place=Place("e2b", "t", "env-1")),
        caller=SimpleNamespace(session=SimpleNamespace(streams=SimpleNamespace(read_async=chunks))),
    )
    body = AsyncMock(return_value={"type": "http.request", "body": b'{"path": "many"}'})
    return Request({"type": "http", "headers": []}, body), sandbox


def test_names_and_links_may_have_any_character(e2b_sandbox: e2b.Sandbox) -> None:
    names = sorted(["a\x1eb", "a\x1fb", "line\nfeed", " ", "-rf", "L\n", "$(id)", "back\\slash", "é"])
    e2b_sandbox.commands.run("mkdir odd; cd odd; " + "; ".join(f"touch -- {shlex.quote(name)}" for name in names))
    e2b_sandbox.commands.run(r"""cd odd; ln -s "$(printf '//81a4 \036\037//')" link; ln -s "$(printf 'x\ny\n.')" -- "$(printf 'l\036')" """)
    listed = {entry.name: entry for entry in e2b_sandbox.files.list("odd")}
    assert sorted(listed) == sorted([*names, "link", "l\x1e"])
    assert (listed["link"].symlink_target, listed["l\x1e"].symlink_target) == ("//81a4 \x1e\x1f//", "x\ny\n.")
    for name, entry in listed.items():
        found = e2b_sandbox.files.get_info(f"odd//{name}")
        assert (found.path, found.symlink_target, found.type) == (entry.path, entry.symlink_target, entry.type)
    assert e2b_sandbox.files.list("odd")[0].path == e2b_sandbox.files.list("odd/../odd//")[0].path
    e2b_sandbox.files.remove("odd")


def test_an_upload_that_is_cut_is_no_failure_of_the_system(served: Served, e2b_sandbox: e2b.Sandbox, e2b_headers: dict[str, str]) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in e2b_headers.items())
    earlier = served.infra_failed()
    with served.connected() as connection:
        connection.sendall(f"POST /files?path=cut HTTP/1.1\r\nHost: x\r\n{head}".encode())
        connection.sendall(b"Content-Type: application/octet-stream\r\nContent-Length: 1000\r\n\r\npartly")
        shutting = "POST /files"
        before = served.live.log("gateway").count(shutting)
    served.live.until(lambda: served.live.log("gateway").count(shutting) > before)
    assert served.infra_failed() == earlier
    assert not e2b_sandbox.files.exists("cut")


@pytest.mark.parametrize("expires", ["²", "9" * 5000], ids=["no ASCII", "too long"])
def test_a_signature_that_expires_at_no_time_is_no_failure_of_the_system(served: Served, e2b_sandbox: e2b.Sandbox, expires: str) -> None:
    query = {"path": "signed", "signature": "v1_x", "signature_expiration": expires}
    assert httpx.get(f"{served.url}/files", params=query, headers={"E2b-Sandbox-Id": e2b_sandbox.sandbox_id}).status_code == 401
