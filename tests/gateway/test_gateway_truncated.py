"""More output than a result holds, through each shape over HTTP: it is there as a whole, or the answer says that it is not."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tangram.results import FINISHED, LEFT_OUT

SIZE = 1_500_000
PRINT = f"head -c {SIZE} /dev/zero | tr '\\0' x"


def native(http: httpx.Client, command: str) -> Any:
    return http.post(f"/api/v1/environments/{opened(http)}/exec", json={"command": command}).json()["truncated"] and LEFT_OUT


def run_code(http: httpx.Client, command: str) -> Any:
    return http.post("/run_code", json={"code": command, "language": "bash"}).json()["message"]


def run_jupyter(http: httpx.Client, command: str) -> Any:
    done = http.post("/run_jupyter", json={"cells": [f"import os; _ = os.system({command!r})"]}).json()
    return done["message"].replace("output of cells was dropped, being too long: 1", LEFT_OUT)


def opened(http: httpx.Client) -> str:
    return str(http.post("/api/v1/environments", json={"lease_s": 600}).json()["id"])


def in_shell(http: httpx.Client, command: str, check: str = "silent") -> Any:
    place = f"/envs/{opened(http)}"
    assert http.post(f"{place}/create_session", json={"session_type": "bash"}).status_code == 200
    return http.post(f"{place}/run_in_session", json={"action_type": "bash", "command": command, "check": check}).text


def beside_shells(http: httpx.Client, command: str, **options: Any) -> Any:
    return http.post(f"/envs/{opened(http)}/execute", json={"command": command, "shell": True, **options}).text


def merged(http: httpx.Client, command: str) -> Any:
    return beside_shells(http, command, merge_output_streams=True)


def rock(http: httpx.Client, command: str) -> Any:
    start, name = "/apis/envs/sandbox/v1", uuid.uuid4().hex
    assert http.post(f"{start}/start_async", json={"image": "any", "memory": "64m", "sandbox_id": name}).json()["status"] == "Success"
    return http.post(f"{start}/execute", json={"sandbox_id": name, "command": command, "shell": True}).text


@pytest.mark.parametrize("shape", [native, run_code, run_jupyter, in_shell, beside_shells, merged, rock])
def test_a_shape_says_that_output_is_left_out(http: httpx.Client, shape: Callable[[httpx.Client, str], Any]) -> None:
    assert [LEFT_OUT in str(shape(http, command)) for command in (PRINT, "echo x")] == [True, False]


def test_a_submission_that_is_not_whole_is_an_error(http: httpx.Client) -> None:
    for shape in (beside_shells, merged):
        said = shape(http, f"echo {FINISHED}; {PRINT}")
        assert "swerex.exceptions.SwerexException" in said and "the submission is not whole" in said, said[:500]
    for said in (in_shell(http, PRINT, check="raise"), beside_shells(http, PRINT, check=True)):
        assert "swerex.exceptions.SwerexException" in said and "is not whole" in said, said[:500]
