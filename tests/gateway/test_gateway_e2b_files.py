"""Files: E2B's client, unchanged, against a whole stack."""

from __future__ import annotations

import io
import socket
import urllib.parse
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.gateway.conftest import Served

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

MB = 2**20


def test_files_go_in_and_come_out(e2b_sandbox: e2b.Sandbox) -> None:
    info = e2b_sandbox.files.write("in/text.txt", "grüße")
    assert (info.name, info.path, info.type.value) == ("text.txt", "in/text.txt", "file")
    assert e2b_sandbox.files.read("in/text.txt") == "grüße"
    data = bytes(range(256))
    assert [info.name for info in e2b_sandbox.files.write_files([{"path": "in/1.bin", "data": data}, {"path": "in/2", "data": "two"}])] == [
        "1.bin",
        "2",
    ]
    assert e2b_sandbox.files.read("in/1.bin", format="bytes") == data
    assert b"".join(e2b_sandbox.files.read("in/1.bin", format="stream")) == data
    e2b_sandbox.files.write("in/packed", data * 100, gzip=True)
    assert e2b_sandbox.files.read("in/packed", format="bytes", gzip=True) == data * 100
    assert e2b_sandbox.commands.run("cat in/2; wc -c < in/packed").stdout == "two25600\n"


def test_a_large_file_goes_in_and_comes_out(e2b_sandbox: e2b.Sandbox) -> None:
    data = bytes(range(256)) * (7 * MB // 256)
    e2b_sandbox.files.write("large", io.BytesIO(data))
    assert e2b_sandbox.files.read("large", format="bytes") == data
    with pytest.raises(e2b.SandboxException, match="413"):
        e2b_sandbox.files.write("larger", io.BytesIO(data + data))


def test_a_file_that_is_not_there_is_not_found(e2b_sandbox: e2b.Sandbox) -> None:
    for call in (
        lambda: e2b_sandbox.files.read("nowhere"),
        lambda: e2b_sandbox.files.list("nowhere"),
        lambda: e2b_sandbox.files.get_info("nowhere"),
        lambda: e2b_sandbox.files.rename("nowhere", "there"),
    ):
        with pytest.raises(e2b.FileNotFoundException, match="nowhere"):
            call()
    assert not e2b_sandbox.files.exists("nowhere")


def test_folders_are_made_listed_moved_and_removed(e2b_sandbox: e2b.Sandbox) -> None:
    files = e2b_sandbox.files
    assert files.make_dir("top/mid") and not files.make_dir("top/mid")
    files.write("top/mid/a 'quoted' file", "1234")
    e2b_sandbox.commands.run("ln -s mid top/link; chmod 640 top/mid/a*")
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


def test_an_upload_that_is_cut_is_no_failure_of_the_system(served: Served, e2b_sandbox: e2b.Sandbox) -> None:
    headers = {"E2b-Sandbox-Id": e2b_sandbox.sandbox_id, "X-Access-Token": e2b_sandbox._envd_access_token}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    address = urllib.parse.urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"POST /files?path=cut HTTP/1.1\r\nHost: x\r\n{head}".encode())
        connection.sendall(b"Content-Type: application/octet-stream\r\nContent-Length: 1000\r\n\r\npartly")
        shutting = "POST /files"
        before = served.live.log("gateway").count(shutting)
    served.live.until(lambda: served.live.log("gateway").count(shutting) > before)
    assert 'shape="e2b"' not in httpx.get(f"{served.url}/metrics").text
    assert not e2b_sandbox.files.exists("cut")


def test_a_signed_url_reads_a_file(served: Served, e2b_sandbox: e2b.Sandbox) -> None:
    e2b_sandbox.files.write("signed", "by url")
    host = f"49983-{e2b_sandbox.sandbox_id}.example.org"

    def get(url: str) -> httpx.Response:
        return httpx.get(url, headers={"Host": host})

    assert get(e2b_sandbox.download_url("signed", use_signature_expiration=60)).text == "by url"
    assert get(e2b_sandbox.download_url("signed").replace("path=signed", "path=file")).status_code == 401
    assert get(e2b_sandbox.download_url("signed", use_signature_expiration=-5)).status_code == 401
