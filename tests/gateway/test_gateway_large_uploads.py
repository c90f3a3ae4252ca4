"""Large uploads beside short calls: nobody waits behind a body."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.conftest import Served

pytestmark = pytest.mark.real

MIB = 2**20
SIZE_MIB = 6
BOUNDARY = b"part-of-a-form"
FORM_HEAD = b"".join(
    b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b' % (BOUNDARY, name, more, value)
    for name, more, value in ((b"target_path", b"", b"large\r\n"), (b"unzip", b"", b"false\r\n"), (b"file", b'; filename="large"', b""))
)


@pytest.mark.parametrize("way", ["body", "form"])
def test_short_calls_go_on_beside_a_large_upload(served: Served, way: str) -> None:
    half_sent, may_go_on = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield FORM_HEAD if way == "form" else b""
        for number in range(SIZE_MIB):
            if number == SIZE_MIB // 2:
                half_sent.set()
                assert may_go_on.wait(120)
            yield bytes(MIB)
        yield b"\r\n--%b--\r\n" % BOUNDARY if way == "form" else b""

    with served.http("uploads") as http, ThreadPoolExecutor(1) as threads:
        opened = http.post("/api/v1/environments", json={}).json()["id"]
        # Given an upload of which one half has been sent
        if way == "form":
            headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
            uploading = threads.submit(http.post, f"/envs/{opened}/upload", content=body(), headers=headers)
        else:
            uploading = threads.submit(http.put, f"/api/v1/environments/{opened}/files", params={"path": "large"}, content=body())
        assert half_sent.wait(120)

        def printed(command: str) -> str:
            return str(http.post(f"/api/v1/environments/{opened}/exec", json={"command": command}).json()["stdout"])

        # When short commands run; then they have their results before the other half is sent
        assert [printed(f"echo {number}") for number in range(3)] == ["0\n", "1\n", "2\n"]
        may_go_on.set()
        assert uploading.result(120).is_success
        assert printed("stat -c %s large").strip() == str(SIZE_MIB * MIB)
        http.delete(f"/api/v1/environments/{opened}")
