"""What E2B's client sees of a stack that is busy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import Served, options_of

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real


@dataclass
class Busy:
    """A stack whose one core has a command until `free` is called; one more action of the job may wait."""

    served: Served
    options: dict[str, str]
    sandbox: e2b.Sandbox
    command: e2b.CommandHandle
    go: Path

    def free(self) -> None:
        self.go.touch()
        assert self.command.wait().exit_code == 0

    def waiting(self) -> int:
        return len(self.served.live.rows("SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = 'waiting'"))


@pytest.fixture
def busy(one_core: Served) -> Iterator[Busy]:
    options = options_of(one_core, "busy")
    sandbox = e2b.Sandbox.create(**options)
    folder = Path(sandbox.commands.run("pwd").stdout.strip())
    command = sandbox.commands.run("touch begun; until [ -e go ]; do sleep 0.05; done", background=True, timeout=0)
    one_core.live.until((folder / "begun").exists)
    yield Busy(one_core, options, sandbox, command, folder / "go")
    sandbox.kill()


def test_a_command_is_held_while_there_is_no_core_for_it(busy: Busy) -> None:
    held = busy.sandbox.commands.run("echo ran", background=True)
    busy.served.live.until(lambda: busy.waiting() == 1)
    busy.free()
    assert held.wait().stdout == "ran\n"


def test_the_time_limit_of_a_command_includes_its_wait(busy: Busy) -> None:
    with pytest.raises(e2b.TimeoutException):
        busy.sandbox.commands.run("touch ran", timeout=1)
    busy.served.live.until(lambda: busy.waiting() == 0)
    busy.free()
    assert not busy.sandbox.files.exists("ran")


def test_a_full_queue_is_said_to_be_one(busy: Busy) -> None:
    held = busy.sandbox.commands.run("echo ran", background=True)
    busy.served.live.until(lambda: busy.waiting() == 1)
    with pytest.raises(e2b.RateLimitException):
        busy.sandbox.commands.run("true")
    answer = httpx.post(
        f"{busy.served.url}/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-Key": busy.options["api_key"]}, timeout=30
    )
    assert (answer.status_code, answer.json()["code"]) == (503, 503) and int(answer.headers["Retry-After"]) > 0
    # Then a create that the client sends again comes through
    with ThreadPoolExecutor(1) as thread:
        creating = thread.submit(e2b.Sandbox.create, **busy.options)
        refused = "POST /v2/sandboxes 503"
        busy.served.live.until(lambda: busy.served.live.log("gateway").count(refused) >= 2)
        busy.free()
        creating.result().kill()
    assert held.wait().stdout == "ran\n"


def test_what_can_never_run_is_refused(one_core: Served) -> None:
    options = options_of(one_core, "busy")
    keys = {name: options[name] for name in ("api_key", "api_url")}
    e2b.Template.build(e2b.Template().from_image("large"), "large", memory_mb=10**6, **keys)
    with pytest.raises(e2b.SandboxException, match="400"):
        e2b.Sandbox.create("large", **options)
