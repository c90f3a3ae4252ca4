"""Rows of E2B's clients for JavaScript: how methods go here, by the names of the checks in `javascript/checks.mjs`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.clients.environments import ENVIRONMENTS
from tests.clients.rows import Row, node, said
from tests.gateway.e2b_methods import OTHERWISE

NAME = "javascript"
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


def rows() -> Iterator[Row]:
    """Yield the rows."""
    version = ENVIRONMENTS[NAME].version("e2b")
    for methods, how in HOW.items():
        tests = node("clients/test_e2b_javascript", f"test_row[{methods}]")
        yield Row(client="e2b (npm)", version=version, method=methods, **said(how), environment=NAME, tests=tests)
