"""Clients that vanish without a word: no packet of theirs arrives any more, so no connection of theirs ends by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.gateway.conftest import Served
from tests.hosts.link import Weather
from tests.hosts.network import FIRST, HUB, Network, beside

pytestmark = pytest.mark.real

SERVE = """
import sys
from app.gateway.server import Keepalive, serve
from tangram.settings import Settings
settings = Settings()
serve(settings, str(settings.database_url), sys.argv[2], int(sys.argv[4]), Keepalive(idle_s=1, interval_s=1, probes=2))
"""

CLIENT = """
import json, socket, sys
host, port, *requests = sys.argv[1:]
held = []
for one in requests:
    head, _, body = one.partition("\\n\\n")
    held.append(socket.create_connection((host, int(port))))
    held[-1].sendall((head.replace("\\n", "\\r\\n") + f"\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n{body}").encode())
print("sent", flush=True)
sys.stdin.read()
"""
"""Sends requests, each on a connection of its own, and reads nothing."""


@dataclass
class Apart:
    """A gateway that is reached over a line which can be cut."""

    served: Served
    network: Network
    process: psutil.Process

    def connections(self) -> int:
        """Return how many connections of the other host it holds."""
        held = [one for one in self.process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
        return sum(one.raddr.ip == FIRST for one in held)

    def statuses(self, environment: str) -> dict[str, str]:
        """Return how the actions of an environment are, by session."""
        session = "json_extract(header, '$.session')"
        found = self.served.live.rows(f"SELECT {session}, status FROM actions WHERE environment = '{environment}' AND kind = 'cpu.exec'")
        return {row[0]: row[1] for row in found}


@pytest.fixture
def apart(served: Served) -> Iterator[Apart]:
    with beside("client") as network, served.beside("-c", SERVE, host=HUB) as other:
        yield Apart(other, network, served.live.process("beside"))


def test_connections_whose_packets_are_dropped_give_everything_back(apart: Apart) -> None:
    live = apart.served.live
    with apart.served.http("half-open") as http:
        opened = http.post("/api/v1/environments", json={}).json()["id"]
        sandbox = http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600}).json()
        token = http.headers["X-API-Key"]
        # Given a client whose commands wait: one without an idempotency key, one with a key, one of E2B that prints
        path = f"POST /api/v1/environments/{opened}/exec HTTP/1.1\nContent-Type: application/json\nX-API-Key: {token}"
        one = '{"command": "sleep 600", "session": "plain"}'
        kept = '{"command": "until [ -e go ]; do sleep 0.05; done", "session": "kept"}'
        access = f"E2b-Sandbox-Id: {sandbox['sandboxID']}\nX-Access-Token: {sandbox['envdAccessToken']}"
        start = f"POST /process.Process/Start HTTP/1.1\nContent-Type: application/json\n{access}"
        loop = "until [ -e go ]; do echo printing; sleep 0.05; done"
        prints = f'{{"process": {{"cmd": "/bin/sh", "args": ["-c", "{loop}"]}}}}'
        requests = (f"{path}\n\n{one}", f"{path}\nIdempotency-Key: k\n\n{kept}", f"{start}\n\n{prints}")
        argv = [sys.executable, "-c", CLIENT, HUB, apart.served.url.rpartition(":")[2], *requests]
        with subprocess.Popen(apart.network.on("client", argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            try:
                assert client.stdout is not None and client.stdout.readline() == b"sent\n"
                live.until(lambda: list(apart.statuses(opened).values()) == ["running"] * 2)
                live.until(lambda: list(apart.statuses(sandbox["sandboxID"]).values()) == ["running"])
                assert apart.connections() == 3
                apart.network.worsen("client", Weather(inward=False, outward=False))
            finally:
                client.kill()
        live.until(lambda: apart.connections() == 0)
        # And the command that nobody can come back for is cancelled, the others go on
        live.until(lambda: apart.statuses(opened)["plain"] == "cancelled")
        assert apart.statuses(opened)["kept"] == "running"
        assert list(apart.statuses(sandbox["sandboxID"]).values()) == ["running"]
        answer = http.post(f"/api/v1/environments/{opened}/exec", json={"command": "touch go", "session": "other"})
        assert answer.json()["exit_code"] == 0
        again = http.post(
            f"/api/v1/environments/{opened}/exec", content=kept, headers={"Idempotency-Key": "k", "Content-Type": "application/json"}
        )
        assert again.json()["exit_code"] == 0, again.text
        http.delete(f"/sandboxes/{sandbox['sandboxID']}")
