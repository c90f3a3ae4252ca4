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
from tests.gateway.e2b_methods import OTHERWISE

NAME = "javascript"
ENVIRONMENT = ENVIRONMENTS[NAME]
MISSING = ENVIRONMENT.missing or ("" if shutil.which("node") else "there is no node")
pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


HOW = {
    "Sandbox.create": OTHERWISE["Sandbox.create"],
    "Sandbox.connect": "works",
    "Sandbox.list": "works",
    "Sandbox.getInfo": OTHERWISE["Sandbox.get_info"],
    "Sandbox.setTimeout": "works",
    "Sandbox.kill, Sandbox.isRunning": "works",
    "Sandbox.getMetrics": OTHERWISE["Sandbox.get_metrics"],
    "Sandbox.updateNetwork": OTHERWISE["Sandbox.update_network"],
    "Sandbox.getHost": OTHERWISE["Sandbox.get_host"],
    "Sandbox.downloadUrl, Sandbox.uploadUrl": "differs: needs a host name for each sandbox (E2B_DOMAIN), not E2B_SANDBOX_URL",
    "Sandbox.getMcpUrl, Sandbox.getMcpToken": OTHERWISE["Sandbox.get_mcp_url"],
    "Sandbox.pause, Sandbox.betaPause": OTHERWISE["Sandbox.pause"],
    "Sandbox.fork": OTHERWISE["Sandbox.fork"],
    "Sandbox.createSnapshot": OTHERWISE["Sandbox.create_snapshot"],
    "Sandbox.listSnapshots": OTHERWISE["Sandbox.list_snapshots"],
    "@e2b/code-interpreter: Sandbox.runCode": "refused: 404, no sandbox runs E2B's Jupyter server",
    "commands.run": OTHERWISE["Commands.run"],
    "commands.run (onStdout)": "works",
    "commands.run (a server, reached by the next command)": "works",
    "commands.run, commands.connect, files.watchDir (errors of streams)": "works; with the classes of the client's errors",
    "commands.list, commands.kill": OTHERWISE["Commands.kill"],
    "commands.connect": OTHERWISE["Commands.connect"],
    "commands.sendStdin, commands.closeStdin": "works",
    "CommandHandle.wait, sendStdin, closeStdin": "works",
    "CommandHandle.kill, disconnect": "works",
    "pty.create, pty.sendInput, pty.resize": "works",
    "pty.connect, pty.kill": "works",
    "files.write, files.read": OTHERWISE["Filesystem.write"],
    "files.writeFiles": OTHERWISE["Filesystem.write_files"],
    "files.list, files.getInfo, files.exists": "works",
    "files.rename, files.remove, files.makeDir": "works",
    "files.watchDir": OTHERWISE["Filesystem.watch_dir"],
}
"""How methods go here, by the names of the checks in `javascript/checks.mjs`."""


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
