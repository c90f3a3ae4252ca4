"""What shows how each method of E2B's client goes: the rest of them is in `e2b_git.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
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


def check(method: str) -> Callable[[Check], Check]:
    """Register what shows how a method goes."""

    def register(function: Check) -> Check:
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


@check("Sandbox.connect")
def _(here: Here) -> None:
    again = e2b.Sandbox.connect(here.sandbox.sandbox_id, **here.options)
    assert again.commands.run("echo $GREETING").stdout == "hello\n"


@check("Sandbox.list")
def _(here: Here) -> None:
    found = e2b.Sandbox.list(query=e2b.SandboxQuery(metadata={"task": "shared"}), **here.options).next_items()
    assert here.sandbox.sandbox_id in [info.sandbox_id for info in found]


@check("Sandbox.get_info")
def _(here: Here) -> None:
    info = here.sandbox.get_info()
    assert (info.sandbox_id, info.state.value, info.cpu_count) == (here.sandbox.sandbox_id, "running", 1)
    assert not hasattr(info, "disk_size_mb") or not info.disk_size_mb


@check("Sandbox.is_running")
def _(here: Here) -> None:
    gone = here.new()
    assert gone.is_running() and gone.kill() and not gone.is_running()


@check("Sandbox.set_timeout")
def _(here: Here) -> None:
    sandbox = here.new(timeout=3600)
    sandbox.set_timeout(1)
    here.served.live.until(lambda: not sandbox.is_running())


@check("Sandbox.kill")
def _(here: Here) -> None:
    sandbox = here.new()
    assert sandbox.kill() and not sandbox.kill()


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
    asked = {"Host": here.sandbox.get_host(port), "e2b-traffic-access-token": here.sandbox.traffic_access_token}
    assert "Directory listing" in httpx.get(here.served.url, headers=asked).text
    assert httpx.get(here.served.url, headers={"Host": asked["Host"]}).status_code == 401
    assert httpx.get(here.served.url, headers={**asked, "Connection": "Upgrade", "Upgrade": "websocket"}).status_code == 501
    assert server.kill()


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
    refused(lambda: here.sandbox.list_snapshots().next_items(), "404")


@check("Sandbox.delete_snapshot")
def _(here: Here) -> None:
    assert e2b.Sandbox.delete_snapshot("none", **here.control) is False


# -- commands -------------------------------------------------------------------------------------------------------


@check("Commands.run")
def _(here: Here) -> None:
    done = here.sandbox.commands.run("echo $GREETING; echo oops >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("hello\n", "oops\n", 0)
    assert here.sandbox.commands.run("id -un", user="nobody").stdout == here.says("id -un") != "nobody\n"


def _background(here: Here, command: str = "sleep 60", **more: Any) -> e2b.CommandHandle:
    return here.sandbox.commands.run(command, background=True, **more)


def _error_of(running: e2b.CommandHandle) -> str | None:
    """Return what ended a command that failed."""
    with pytest.raises(e2b.CommandExitException) as failed:
        running.wait()
    return failed.value.error


@check("Commands.list")
def _(here: Here) -> None:
    running = _background(here)
    assert running.pid in [process.pid for process in here.sandbox.commands.list()]
    assert running.kill()


@check("Commands.kill")
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


@check("Commands.connect")
def _(here: Here) -> None:
    running = _background(here, "echo before; until [ -e joined ]; do sleep 0.02; done; echo after")
    assert next(iter(running))[0] == "before\n"
    running.disconnect()
    joined = here.sandbox.commands.connect(running.pid)
    here.sandbox.files.write("joined", "")
    assert joined.wait().stdout == "before\nafter\n"


@check("Commands.send_stdin")
def _(here: Here) -> None:
    running = _background(here, "read line; echo got $line", stdin=True)
    here.sandbox.commands.send_stdin(running.pid, "it\n")
    assert running.wait().stdout == "got it\n"


@check("Commands.stream_input")
def _(here: Here) -> None:
    running = _background(here, "head -c 6", stdin=True)
    here.sandbox.commands.stream_input(running.pid, iter(["one", b"two"]))
    assert running.wait().stdout == "onetwo"


@check("Commands.close_stdin")
def _(here: Here) -> None:
    running = _background(here, "cat; echo over", stdin=True)
    here.sandbox.commands.close_stdin(running.pid)
    assert running.wait().stdout == "over\n"


@check("CommandHandle.wait")
def _(here: Here) -> None:
    with pytest.raises(e2b.CommandExitException) as failed:
        _background(here, "echo partly; exit 7").wait()
    assert (failed.value.exit_code, failed.value.stdout) == (7, "partly\n")


@check("CommandHandle.kill")
def _(here: Here) -> None:
    running = _background(here)
    assert running.kill() and _error_of(running) == "signal: killed"


@check("CommandHandle.disconnect")
def _(here: Here) -> None:
    running = _background(here, "until [ -e left ]; do sleep 0.02; done; echo on > went")
    running.disconnect()
    here.sandbox.files.write("left", "")
    here.served.live.until(lambda: here.sandbox.files.exists("went"))


@check("CommandHandle.send_stdin")
def _(here: Here) -> None:
    running = _background(here, "read line; echo got $line", stdin=True)
    running.send_stdin(b"it\n")
    assert running.wait().stdout == "got it\n"


@check("CommandHandle.close_stdin")
def _(here: Here) -> None:
    running = _background(here, "cat; echo over", stdin=True)
    running.close_stdin()
    assert running.wait().stdout == "over\n"


# -- terminals ------------------------------------------------------------------------------------------------------


def _shown(handle: e2b.CommandHandle) -> bytes:
    """Return all that a terminal shows, until its shell ends."""
    shown = bytearray()
    handle.wait(on_pty=shown.extend)
    return bytes(shown)


@check("Pty.create")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE, timeout=60)
    here.sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    assert b"20 70" in _shown(terminal)


@check("Pty.connect")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE, timeout=60)
    terminal.disconnect()
    joined = here.sandbox.pty.connect(terminal.pid)
    here.sandbox.pty.send_stdin(terminal.pid, b"echo is-$((40 + 2)); exit\n")
    assert b"is-42" in _shown(joined)


@check("Pty.send_stdin")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE, timeout=60)
    here.sandbox.pty.send_stdin(terminal.pid, b"tty > /dev/null && echo is-$((40 + 2)); exit\n")
    assert b"is-42" in _shown(terminal)


@check("Pty.stream_input")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE, timeout=60)
    here.sandbox.pty.stream_input(terminal.pid, [b"echo is-$((40", b" + 2))\n", b"exit\n"])
    assert b"is-42" in _shown(terminal)


@check("Pty.resize")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE, timeout=60)
    here.sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=30, cols=90))
    here.sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    assert b"30 90" in _shown(terminal)


@check("Pty.kill")
def _(here: Here) -> None:
    terminal = here.sandbox.pty.create(SIZE)
    assert here.sandbox.pty.kill(terminal.pid) and _error_of(terminal) == "signal: killed"
    assert not here.sandbox.pty.kill(terminal.pid)


# -- files ----------------------------------------------------------------------------------------------------------


@check("Filesystem.read")
def _(here: Here) -> None:
    data = bytes(range(256))
    here.sandbox.files.write("read/it", data)
    assert here.sandbox.files.read("read/it", format="bytes") == data
    assert b"".join(here.sandbox.files.read("read/it", format="stream")) == data


@check("Filesystem.write")
def _(here: Here) -> None:
    here.sandbox.files.write("written", "grüße")
    assert here.sandbox.files.read("written") == "grüße"
    refused(lambda: here.sandbox.files.write("written", "", metadata={"kept": "not"}), "File metadata requires", e2b.TemplateException)
    refused(lambda: here.sandbox.files.write("/home/user/x", "y"), "/home/user", Exception)


@check("Filesystem.write_files")
def _(here: Here) -> None:
    here.sandbox.files.write_files([{"path": "many/a", "data": "1"}, {"path": "many/b", "data": b"2"}])
    assert here.says("cat many/a many/b") == "12"
    refused(lambda: here.sandbox.files.write_files([{"path": "/home/user/x", "data": "y"}]), "/home/user", Exception)


@check("Filesystem.list")
def _(here: Here) -> None:
    here.says("mkdir -p listed/deep && echo 1 > listed/deep/file")
    assert [entry.name for entry in here.sandbox.files.list("listed", depth=2)] == ["deep", "file"]


@check("Filesystem.exists")
def _(here: Here) -> None:
    here.sandbox.files.write("exists", "")
    assert here.sandbox.files.exists("exists") and not here.sandbox.files.exists("exists-not")


@check("Filesystem.get_info")
def _(here: Here) -> None:
    here.says("printf 1234 > info && chmod 640 info")
    info = here.sandbox.files.get_info("info")
    assert (info.name, info.size, info.permissions) == ("info", 4, "-rw-r-----")
    assert abs(info.modified_time.timestamp() - time.time()) < 300


@check("Filesystem.rename")
def _(here: Here) -> None:
    here.sandbox.files.write("old", "kept")
    assert here.sandbox.files.rename("old", "moved/new").name == "new" and here.sandbox.files.read("moved/new") == "kept"


@check("Filesystem.remove")
def _(here: Here) -> None:
    here.sandbox.files.write("removed/file", "")
    here.sandbox.files.remove("removed")
    assert not here.sandbox.files.exists("removed")


@check("Filesystem.make_dir")
def _(here: Here) -> None:
    assert here.sandbox.files.make_dir("made/deep") and not here.sandbox.files.make_dir("made/deep")


@check("Filesystem.watch_dir")
def _(here: Here) -> None:
    refused(lambda: here.sandbox.files.watch_dir("."), "not served")
