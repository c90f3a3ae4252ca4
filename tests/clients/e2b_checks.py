"""What shows how each method of E2B's client goes: the rest of them is in `e2b_git.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import e2b
import httpx
import psutil
import pytest

from tests.gateway.conftest import Served
from tests.ports import free_port

SIZE = e2b.PtySize(rows=20, cols=70)


@dataclass(frozen=True)
class Here:
    """A sandbox of E2B's client, with what it was made with."""

    served: Served
    options: dict[str, str]
    sandbox: e2b.Sandbox

    @property
    def control(self) -> dict[str, str]:
        """The options of calls that go to the control plane alone."""
        return {name: self.options[name] for name in ("api_key", "api_url")}

    def new(self, **more: Any) -> e2b.Sandbox:
        """Make a sandbox."""
        return e2b.Sandbox.create(**more, **self.options)

    def says(self, command: str) -> str:
        """Return what a command prints."""
        return str(self.sandbox.commands.run(command).stdout)

    def logged(self, text: str) -> bool:
        """Return whether the gateway has written a text down."""
        return text in self.served.live.log("gateway")


Check = Callable[[Here], object]
CHECKS: dict[str, Check] = {}


def check(*methods: str) -> Callable[[Check], Check]:
    """Register what shows how one method goes, or several that belong together."""

    def register(function: Check) -> Check:
        for method in methods:
            assert method not in CHECKS, method
            CHECKS[method] = function
        return function

    return register


def refused(call: Callable[[], object], says: str, error: type[Exception] = e2b.SandboxException) -> None:
    """Assert that a call is refused in words."""
    with pytest.raises(error, match=says):
        call()


# -- sandboxes ------------------------------------------------------------------------------------------------------


@check("Sandbox.create")
def _(here: Here) -> None:
    sandbox = here.new(envs={"A": "1"}, timeout=60, allow_internet_access=False)
    assert sandbox.commands.run("echo $A").stdout == "1\n" and sandbox.kill()
    assert here.logged("names a network for a sandbox: that is for the operator")
    refused(lambda: here.new(lifecycle={"on_timeout": "pause"}), "autoPause")


@check("Sandbox.connect")
def _(here: Here) -> None:
    before = here.sandbox.get_info().end_at
    again = e2b.Sandbox.connect(here.sandbox.sandbox_id, timeout=1, **here.options)
    assert again.commands.run("echo $GREETING").stdout == "hello\n"
    assert here.sandbox.get_info().end_at == before, "a connect makes no timeout shorter"


@check("Sandbox.list")
def _(here: Here) -> None:
    found = e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"task": "shared"}), **here.options).next_items()
    assert here.sandbox.sandbox_id in [info.sandbox_id for info in found]


@check("Sandbox.get_info")
def _(here: Here) -> None:
    info = here.sandbox.get_info()
    assert (info.sandbox_id, info.state.value, info.cpu_count) == (here.sandbox.sandbox_id, "running", 1)
    assert (info.metadata, info.template_id) == ({"task": "shared"}, "base")
    assert timedelta(seconds=1800) < info.end_at - datetime.now(UTC) <= timedelta(seconds=3600)
    assert not hasattr(info, "disk_size_mb") or not info.disk_size_mb


@check("Sandbox.set_timeout")
def _(here: Here) -> None:
    sandbox = here.new(timeout=3600)
    sandbox.set_timeout(1)
    here.served.live.until(lambda: not sandbox.is_running())
    ended = here.new()
    assert e2b.Sandbox.connect(ended.sandbox_id, timeout=0, **here.options).is_running()
    ended.set_timeout(0)
    assert not ended.is_running()
    refused(lambda: ended.set_timeout(0), "not found", e2b.SandboxNotFoundException)


@check("Sandbox.kill", "Sandbox.is_running")
def _(here: Here) -> None:
    sandbox = here.new()
    assert sandbox.is_running() and sandbox.kill() and not sandbox.is_running() and not sandbox.kill()
    refused(sandbox.get_info, "not found", e2b.SandboxNotFoundException)


@check("Sandbox.get_metrics")
def _(here: Here) -> None:
    assert here.sandbox.get_metrics() == []


@check("Sandbox.update_network")
def _(here: Here) -> None:
    here.sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    assert here.logged(f"names a network for sandbox {here.sandbox.sandbox_id}: that is for the operator")


@check("Sandbox.download_url")
def _(here: Here) -> None:
    here.sandbox.files.write("by-url", "here")
    url, host = here.sandbox.download_url("by-url"), f"49983-{here.sandbox.sandbox_id}.example.org"
    assert httpx.get(url).status_code >= 400
    assert httpx.get(url, headers={"Host": host}).text == "here"
    # What is signed is the path and the time at which the signature ends
    assert httpx.get(url.replace("path=by-url", "path=other"), headers={"Host": host}).status_code == 401
    for seconds, code in ((60, 200), (-5, 401)):
        url = here.sandbox.download_url("by-url", use_signature_expiration=seconds)
        assert httpx.get(url, headers={"Host": host}).status_code == code


@check("Sandbox.upload_url")
def _(here: Here) -> None:
    url, host = here.sandbox.upload_url("up-by-url"), f"49983-{here.sandbox.sandbox_id}.example.org"
    assert httpx.post(url, files={"file": b"lost"}).status_code >= 400
    assert httpx.post(url, files={"file": b"there"}, headers={"Host": host}).status_code == 200
    assert here.sandbox.files.read("up-by-url") == "there"


@check("Sandbox.get_host")
def _(here: Here) -> None:
    port = free_port()
    server = here.sandbox.commands.run(f"python3 -u -m http.server --bind 127.0.0.1 {port}", background=True)
    assert next(iter(server))[0].startswith("Serving")
    host, token = here.sandbox.get_host(port), here.sandbox.traffic_access_token

    def asked(**headers: str) -> httpx.Response:
        return httpx.get(here.served.url, headers={"Host": host, **{name.replace("_", "-"): text for name, text in headers.items()}})

    for name in ("e2b_traffic_access_token", "X_Access_Token"):
        assert "Directory listing" in asked(**{name: token}).text
    assert asked().status_code == 401
    assert asked(X_Access_Token=token, Connection="Upgrade", Upgrade="websocket").status_code == 501
    # When it is killed, which takes its time, then nobody answers
    assert server.kill()
    here.served.live.until(lambda: asked(X_Access_Token=token).status_code == 502)
    assert asked(X_Access_Token=token).json()["port"] == port


@check("Sandbox.get_mcp_url")
def _(here: Here) -> None:
    host = here.sandbox.get_mcp_url().split("/")[2]
    assert httpx.get(f"{here.served.url}/mcp", headers={"Host": host}).status_code >= 400


@check("Sandbox.get_mcp_token")
def _(here: Here) -> None:
    refused(here.sandbox.get_mcp_token, "mcp", Exception)


for _name in ("pause", "beta_pause", "fork", "create_snapshot"):
    CHECKS[f"Sandbox.{_name}"] = lambda here, name=_name: refused(getattr(here.sandbox, name), "not served")


@check("Sandbox.list_snapshots")
def _(here: Here) -> None:
    refused(lambda: here.sandbox.list_snapshots().next_items(), "404: GET /snapshots is not served")


@check("Sandbox.delete_snapshot")
def _(here: Here) -> None:
    assert e2b.Sandbox.delete_snapshot("none", **here.control) is False


# -- commands -------------------------------------------------------------------------------------------------------


@check("Commands.run")
def _(here: Here) -> None:
    out: list[str] = []
    err: list[str] = []
    run = here.sandbox.commands.run
    done = run("echo $GREETING $MORE; echo oops >&2", envs={"MORE": "more"}, on_stdout=out.append, on_stderr=err.append)
    assert (done.stdout, done.stderr, done.exit_code, done.error) == ("hello more\n", "oops\n", 0, None)
    assert ("".join(out), "".join(err)) == (done.stdout, done.stderr)
    assert run("id -un", user="nobody").stdout == here.says("id -un") != "nobody\n"
    here.sandbox.files.make_dir("some dir")
    assert run("pwd", cwd="some dir").stdout.endswith("/some dir\n")
    assert run("pwd", cwd="~", user="root").stdout == here.says("echo $HOME")
    assert run("env | grep ^discovery", envs={"discovery.type": "single-node"}).stdout == "discovery.type=single-node\n"
    # Without `stdin` there is nothing to read
    assert here.says("cat") == ""


def _background(here: Here, command: str = "sleep 60", **more: Any) -> e2b.CommandHandle:
    return here.sandbox.commands.run(command, background=True, **more)


def _error_of(running: e2b.CommandHandle) -> str | None:
    """Return what ended a command that failed."""
    with pytest.raises(e2b.CommandExitException) as failed:
        running.wait()
    return failed.value.error


@check("Commands.list")
def _(here: Here) -> None:
    running = _background(here, envs={"A": "b"}, cwd="/")
    (listed,) = [process for process in here.sandbox.commands.list() if process.pid == running.pid]
    assert (listed.cmd, listed.args, listed.envs, listed.cwd) == ("/bin/bash", ["-l", "-c", "sleep 60"], {"A": "b"}, "/")
    assert running.kill() and _error_of(running) == "signal: killed"
    assert running.pid not in [process.pid for process in here.sandbox.commands.list()]


@check("Commands.kill", "CommandHandle.kill")
def _(here: Here) -> None:
    nap = f"98765.{os.getpid()}"  # others on this machine may run the same test

    def children() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", nap]]

    running = _background(here, f"sleep {nap} & echo begun; wait")
    assert next(iter(running))[0] == "begun\n"
    here.served.live.until(children)  # the shell goes on before its child has become `sleep`
    assert here.sandbox.commands.kill(running.pid)
    here.served.live.until(lambda: not children())
    assert _error_of(running) == "signal: killed" and not here.sandbox.commands.kill(running.pid)
    assert _error_of(here.sandbox.commands.connect(running.pid)) == "signal: killed"
    refused(lambda: here.sandbox.commands.connect(running.pid + 1000), ".", e2b.NotFoundException)
    other = _background(here)
    assert other.kill() and _error_of(other) == "signal: killed"


@check("Commands.connect", "CommandHandle.disconnect")
def _(here: Here) -> None:
    running = _background(here, "rm -f joined; echo before; until [ -e joined ]; do sleep 0.02; done; echo after")
    assert next(iter(running))[0] == "before\n"
    running.disconnect()
    joined = here.sandbox.commands.connect(running.pid)
    here.sandbox.files.write("joined", "")
    assert joined.wait().stdout == "before\nafter\n"


@check("Commands.send_stdin", "Commands.stream_input", "Commands.close_stdin", "CommandHandle.send_stdin", "CommandHandle.close_stdin")
def _(here: Here) -> None:
    commands = here.sandbox.commands
    first, second = (_background(here, "cat; echo over >&2", stdin=True) for _ in range(2))
    first.send_stdin("one\n")
    commands.send_stdin(first.pid, b"two\n")
    commands.stream_input(first.pid, iter(["three\n", b"x" * 200_000]))
    first.close_stdin()
    commands.close_stdin(second.pid)
    assert [(done.stdout, done.stderr) for done in (first.wait(), second.wait())] == [
        ("one\ntwo\nthree\n" + "x" * 200_000, "over\n"),
        ("", "over\n"),
    ]
    closed = _background(here, "cat; sleep 300", stdin=True)
    for _ in range(2):
        closed.close_stdin()
    for call in (lambda: closed.send_stdin("x"), lambda: commands.stream_input(closed.pid, ["x"])):
        refused(call, f"FAILED_PRECONDITION.*stdin of process {closed.pid} was closed")
    assert closed.kill()
    deaf = _background(here)
    for call in (lambda: deaf.send_stdin("x"), deaf.close_stdin, lambda: commands.stream_input(deaf.pid, ["x"])):
        refused(call, "without stdin", e2b.InvalidArgumentException)
    assert deaf.kill()


@check("CommandHandle.wait")
def _(here: Here) -> None:
    with pytest.raises(e2b.CommandExitException) as failed:
        _background(here, "echo partly; exit 7").wait()
    assert (failed.value.exit_code, failed.value.stdout) == (7, "partly\n")


# -- terminals ------------------------------------------------------------------------------------------------------


@check("Pty.create", "Pty.connect", "Pty.send_stdin", "Pty.stream_input", "Pty.resize")
def _(here: Here) -> None:
    shown, pty = bytearray(), here.sandbox.pty
    begun = pty.create(SIZE, envs={"PS1": "> "}, timeout=60)
    begun.disconnect()
    terminal = pty.connect(begun.pid)
    pty.send_stdin(terminal.pid, b"stty size; tty >/dev/null && echo is-$((40 + 2))\n")
    for _, _, data in terminal:
        shown += data or b""
        if b"is-42" in shown:
            break
    assert b"20 70" in shown
    pty.resize(terminal.pid, e2b.PtySize(rows=30, cols=90))
    pty.stream_input(terminal.pid, [b"stty size\n", b"exit 3\n"])
    with pytest.raises(e2b.CommandExitException) as ended:
        terminal.wait(on_pty=shown.extend)
    assert ended.value.exit_code == 3 and b"30 90" in shown


@check("Pty.kill")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE)
    assert here.sandbox.pty.kill(terminal.pid) and _error_of(terminal) == "signal: killed"
    assert not here.sandbox.pty.kill(terminal.pid)


# -- files ----------------------------------------------------------------------------------------------------------


@check("Filesystem.read")
def _(here: Here) -> None:
    data, files = bytes(range(256)), here.sandbox.files
    files.write("read/it", data)
    assert files.read("read/it", format="bytes") == data
    assert b"".join(files.read("read/it", format="stream")) == data
    files.write("read/packed", data * 100, gzip=True)
    assert files.read("read/packed", format="bytes", gzip=True) == data * 100
    assert here.says("wc -c < read/packed") == "25600\n"


@check("Filesystem.write")
def _(here: Here) -> None:
    info = here.sandbox.files.write("in/written", "grüße")
    assert (info.name, info.path, info.type.value) == ("written", "in/written", "file")
    assert here.sandbox.files.read("in/written") == "grüße"
    refused(lambda: here.sandbox.files.write("written", "", metadata={"kept": "not"}), "File metadata requires", e2b.TemplateException)
    refused(lambda: here.sandbox.files.write("/proc/x", "y"), "/proc/x", Exception)


@check("Filesystem.write_files")
def _(here: Here) -> None:
    written = here.sandbox.files.write_files([{"path": "many/a", "data": "1"}, {"path": "many/b", "data": b"2"}])
    assert [info.name for info in written] == ["a", "b"] and here.says("cat many/a many/b") == "12"
    refused(lambda: here.sandbox.files.write_files([{"path": "/proc/x", "data": "y"}]), "/proc/x", Exception)


@check("Filesystem.list", "Filesystem.get_info", "Filesystem.exists")
def _(here: Here) -> None:
    files = here.sandbox.files
    here.says("rm -rf top; mkdir -p top/mid; cd top; printf 1234 > \"mid/a 'quoted' file\"; chmod 640 mid/a*; ln -s mid link")
    listed = {entry.name: entry for entry in files.list("top", depth=2)}
    assert list(listed) == ["link", "mid", "a 'quoted' file"]
    assert (listed["link"].type.value, listed["link"].symlink_target, listed["mid"].type.value) == ("symlink", "mid", "dir")
    for found in (listed["a 'quoted' file"], files.get_info("top/mid/a 'quoted' file")):
        assert (found.name, found.size, found.mode, found.permissions) == ("a 'quoted' file", 4, 0o640, "-rw-r-----")
        assert found.type.value == "file" and abs(found.modified_time - datetime.now(UTC)) < timedelta(minutes=5)
    assert [entry.name for entry in files.list("top")] == ["link", "mid"]
    assert [entry.path for entry in files.list("")] == [entry.path for entry in files.list(here.says("pwd").strip())]
    assert files.exists("top/link") and not files.exists("nowhere")
    for call in (files.read, files.list, files.get_info, lambda name: files.rename(name, "there")):
        refused(lambda call=call: call("nowhere"), "nowhere", e2b.FileNotFoundException)  # type: ignore[misc]
    refused(lambda: files.list("top/mid/a 'quoted' file"), ".", e2b.InvalidArgumentException)
    refused(lambda: files.read("."), ".", e2b.InvalidArgumentException)


@check("Filesystem.rename")
def _(here: Here) -> None:
    files = here.sandbox.files
    files.write("old/file", "kept")
    moved = files.rename("old", "moved/new")
    assert (moved.name, moved.type.value) == ("new", "dir") and moved.path.endswith("/moved/new")
    assert files.get_info("moved/new/file").path == f"{moved.path}/file" and not files.exists("old")


@check("Filesystem.remove")
def _(here: Here) -> None:
    here.sandbox.files.write("removed/file", "")
    for _ in range(2):
        here.sandbox.files.remove("removed")
        assert not here.sandbox.files.exists("removed")


@check("Filesystem.make_dir")
def _(here: Here) -> None:
    assert here.sandbox.files.make_dir("made/deep") and not here.sandbox.files.make_dir("made/deep")
    here.sandbox.files.write("made/file", "")
    refused(lambda: here.sandbox.files.make_dir("made/file"), ".", e2b.InvalidArgumentException)


@check("Filesystem.watch_dir")
def _(here: Here) -> None:
    refused(lambda: here.sandbox.files.watch_dir("."), "not served")
