"""E2B's client for JavaScript, unchanged, against a whole stack: what a program of node finds, one test for each of its checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Served
from tests.clients.environments import ENVIRONMENTS
from tests.clients.javascript_rows import HOW, NAME

ENVIRONMENT = ENVIRONMENTS[NAME]
MISSING = ENVIRONMENT.missing or ("" if shutil.which("node") else "there is no node")
pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def found(served: Served) -> dict[str, str]:
    """Return what each check found wrong."""
    variables = {**os.environ, "GATEWAY": served.url, "TOKEN": served.token("e2b-javascript")}
    command = ["node", "--input-type=module"]
    # A program from the standard input finds the packages of its folder.
    with Path(__file__).with_name("javascript").joinpath("checks.mjs").open() as program:
        done = subprocess.run(
            command, stdin=program, cwd=ENVIRONMENT.packages, env=variables, capture_output=True, text=True, check=False, timeout=250
        )
    found = {check["methods"]: check["wrong"] for check in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == HOW.keys(), done.stderr
    return found


@pytest.mark.parametrize("methods", HOW)
def test_row(methods: str, found: dict[str, str]) -> None:
    assert not found[methods]
