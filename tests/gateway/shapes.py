"""A command through each HTTP shape, in an environment of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import httpx

ROCK = "/apis/envs/sandbox/v1"
Shape = Callable[[httpx.Client, str, float], httpx.Response]
"""Runs a command that may take so many seconds, and returns the answer of its call."""


def opened(http: httpx.Client) -> str:
    return str(http.post("/api/v1/environments", json={}).json()["id"])


def native(http: httpx.Client, command: str, timeout_s: float) -> httpx.Response:
    return http.post(f"/api/v1/environments/{opened(http)}/exec", json={"command": command, "timeout_s": timeout_s})


def run_code(http: httpx.Client, command: str, timeout_s: float) -> httpx.Response:
    return http.post("/run_code", json={"code": command, "language": "bash", "run_timeout": timeout_s})


def run_jupyter(http: httpx.Client, command: str, timeout_s: float) -> httpx.Response:
    return http.post("/run_jupyter", json={"cells": [f"import os; _ = os.system({command!r})"], "total_timeout": timeout_s})


def in_shell(http: httpx.Client, command: str, timeout_s: float, check: str = "silent") -> httpx.Response:
    place = f"/envs/{uuid.uuid4().hex}"
    assert http.post(f"{place}/create_session", json={"session_type": "bash", "startup_timeout": 60}).status_code == 200
    return http.post(f"{place}/run_in_session", json={"action_type": "bash", "command": command, "check": check, "timeout": timeout_s})


def beside_shells(http: httpx.Client, command: str, timeout_s: float, **options: Any) -> httpx.Response:
    return http.post(f"/envs/{opened(http)}/execute", json={"command": command, "shell": True, "timeout": timeout_s, **options})


def merged(http: httpx.Client, command: str, timeout_s: float) -> httpx.Response:
    return beside_shells(http, command, timeout_s, merge_output_streams=True)


def rock(http: httpx.Client, command: str, timeout_s: float) -> httpx.Response:
    body = {"image": "any", "memory": "64m", "auto_clear_time_minutes": 1, "sandbox_id": uuid.uuid4().hex}
    assert http.post(f"{ROCK}/start_async", json=body).json()["status"] == "Success"
    said = {"sandbox_id": body["sandbox_id"], "command": command, "shell": True, "timeout": timeout_s}
    return http.post(f"{ROCK}/execute", json=said)


SHAPES: tuple[Shape, ...] = (native, run_code, run_jupyter, in_shell, beside_shells, merged, rock)
