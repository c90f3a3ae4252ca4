"""Calls of half an hour: what could end one too early, and one call through every shape that outlasts all timers.

`TANGRAM_LONG_CALL_S` says how long the latter takes; without it, it is skipped on a laptop and takes 40 s with `CI` set. The timers of the
stack are set so short that each of them ends many times meanwhile.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.gateway import e2b_output, e2b_process, e2b_table, records, rex_runtime, run_code
from tangram import wire
from tangram.settings import Settings
from tests.gateway import shapes
from tests.gateway.conftest import Served, serving

HALF_AN_HOUR_S = 1800.0
LENGTH_S = float(os.environ.get("TANGRAM_LONG_CALL_S", "40" if "CI" in os.environ else "0"))
SHORT = {"TANGRAM_LEASE_S": "10", "TANGRAM_ORPHAN_S": "10", "TANGRAM_TIMEOUT_S": "10", "TANGRAM_CONNECT_TIMEOUT_S": "10"}
"""The timers of a stack, far below the length of the call."""

needs_length = pytest.mark.skipif(LENGTH_S <= 0, reason="TANGRAM_LONG_CALL_S does not say how long the call is to be")


def test_nothing_that_is_counted_from_the_beginning_of_a_call_is_over_within_half_an_hour() -> None:
    # What begins with the action, or with its last sign of use, and is not renewed while it runs
    kept_s = {
        "claims": wire.CLAIM_TTL_S,
        "results": wire.RESULT_TTL_S,
        "published output": wire.OUTPUT_TTL_S,
        "arguments in the result store": wire.BLOB_TTL_S,
        "records of environments": records.KEPT_S,
        "shells of SWE-ReX": rex_runtime.KEPT_S,
        "processes of E2B": e2b_table.KEPT_S,
        "E2B's commands without a limit": e2b_process.UNLIMITED_S,
        "actions without a limit": Settings.model_fields["timeout_s"].default,
    }
    assert {name: limit_s for name, limit_s in kept_s.items() if limit_s < 2 * HALF_AN_HOUR_S} == {}
    # And the lease of an environment for one call goes beyond the time for which anybody may wait for the call
    assert run_code.MARGIN_S > 0
    # And a silent stream is alive before anything on the way, or the client, gives it up: most allow a minute
    assert e2b_output.KEEPALIVE_S <= 30


@pytest.fixture(scope="module")
def short_timers(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("long"), cores=16, memory_mb=65536, variables=dict(SHORT)) as served:
        yield served


def e2b_stream(http: httpx.Client, command: str, timeout_s: float) -> str:
    """Read the stream of a command as it is sent; a silence of more than some seconds breaks it."""
    sandbox = http.post("/v2/sandboxes", json={"templateID": "base", "timeout": round(timeout_s)}).json()
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "X-Access-Token": sandbox["envdAccessToken"], "Keepalive-Ping-Interval": "1"}
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).encode()
    headers["Content-Type"] = "application/connect+json"
    kinds: list[str] = []
    timeout = httpx.Timeout(30, read=15)
    content = struct.pack(">BI", 0, len(message)) + message
    with http.stream("POST", "/process.Process/Start", content=content, headers=headers, timeout=timeout) as answer:
        held = b""
        for data in answer.iter_bytes():
            held += data
            while len(held) >= 5 and len(held) >= 5 + (length := struct.unpack_from(">BI", held)[1]):
                event: dict[str, Any] = json.loads(held[5 : 5 + length]).get("event", {})
                kinds += event
                held = held[5 + length :]
    assert kinds.count("keepalive") > LENGTH_S / 4, kinds
    return "done" if kinds[-1] == "end" and "data" in kinds else str(kinds)


@needs_length
@pytest.mark.timeout(60 + 3 * LENGTH_S)
def test_one_long_call_through_every_shape(short_timers: Served) -> None:
    with short_timers.http("long") as http, ThreadPoolExecutor(6) as threads:
        http.timeout = None
        http.headers["XRL-Authorization"] = f"Bearer {http.headers['X-API-Key']}"
        command, limit_s = f"sleep {LENGTH_S:g}; echo done", 2 * LENGTH_S
        streamed = threads.submit(e2b_stream, http, command, 3 * LENGTH_S)
        others = (shapes.native, shapes.in_shell, shapes.rock, shapes.run_code, shapes.run_jupyter)
        calls = [threads.submit(shape, http, command, limit_s) for shape in others]
        assert all("done" in call.result().text for call in calls) and streamed.result() == "done"
