"""A create whose answer never arrives leaves no second sandbox.

Source: allenai/open-instruct #1887 (a create that a 504 cut was orphaned).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.freezing import freeze
from tests.gateway.conftest import Served

pytestmark = pytest.mark.real

CREATES: list[tuple[str, dict[str, Any]]] = [
    ("/api/v1/environments", {"trajectory": "t"}),
    ("/v2/sandboxes", {"templateID": "base", "timeout": 60}),
]


def opens_of(served: Served, job: str) -> int:
    """Return how many environments a job has ever had, as the journal knows."""
    return int(served.live.rows(f"SELECT count(*) FROM environments WHERE job = '{job}'")[0][0])


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Stop a process, and have it go on afterwards."""
    freeze(process.pid)
    try:
        yield
    finally:
        process.resume()


def cut(connection: socket.socket) -> None:
    """Reset a connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    ("path", "body", "id_key"), [(*create, id_key) for create, id_key in zip(CREATES, ("id", "sandboxID"), strict=True)]
)
def test_a_create_whose_answer_was_cut_gives_the_same_sandbox_when_it_is_sent_again(
    served: Served, path: str, body: dict[str, Any], id_key: str
) -> None:
    # Given a create whose connection is cut before the answer, once the system has begun to carry it out
    job = f"cut-{path.strip('/').replace('/', '-')}"
    headers = {"X-API-Key": served.token(job), "Idempotency-Key": "create-1"}
    with served.begun(path, body, headers):
        served.live.until(lambda: served.live.rows(f"SELECT id FROM actions WHERE kind = 'cpu.open' AND job = '{job}'"))
    # When it is sent again, twice
    with httpx.Client(timeout=60) as http:
        answers = [http.send(httpx.Request("POST", f"{served.url}{path}", json=body, headers=headers)).json() for _ in range(2)]
    assert len({answer[id_key] for answer in answers}) == 1
    assert opens_of(served, job) == 1


@pytest.mark.parametrize(("path", "body"), CREATES)
def test_a_create_without_a_key_whose_connection_breaks_as_it_succeeds_leaves_nothing(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    # Given creates that are being carried out
    job = f"broken-{path.strip('/').replace('/', '-')}"
    headers = {"X-API-Key": served.token(job)}
    environments = f"SELECT id FROM environments WHERE job = '{job}' AND ended_at IS NULL"
    gateway, worker = served.live.process("gateway"), served.live.process("cpu-0")
    with ExitStack() as until_cut:
        with frozen(worker):
            creates = [served.begun(path, body, headers) for _ in range(4)]
            served.live.until(lambda: len(served.live.rows(environments)) == len(creates))
            until_cut.enter_context(frozen(gateway))
        # When they succeed while the gateway does not look, and their connections break before it does
        served.live.until(lambda: len(served.live.rows(f"{environments} AND state = 'open'")) == len(creates))
        for one in creates:
            cut(one)
    served.live.until(lambda: not served.live.rows(environments))
