"""A stack with a live page, in trouble of the kinds that operators ask about; and a real browser.

Without chromium the tests that need it are skipped; with CI set, that is a failure.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from app.local.stack import StackPlan
from scheduler.live.entries import ActionGranted, ActionReceived, ActionResized, NodeChanged
from tangram import Client
from tangram.handles import Handle
from tangram.settings import Settings
from tests.conftest import RedisUrls
from tests.journals import new_journal
from tests.live.support import SERVICES, Live, running
from tests.needed import needed
from tests.ports import free_port
from tests.web.journals import DESCRIBED, TOKEN, View, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"


@dataclass
class Trouble:
    """A stack, its page, and what is stuck in it: actions by what they are for."""

    live: Live
    url: str
    clients: list[Client]
    handles: dict[str, Handle[object]]

    def wait_for(self, name: str, status: str) -> None:
        """Wait until an action is in a state."""
        self.live.until(lambda: self.live.rows(f"SELECT 1 FROM actions WHERE id = '{self.handles[name].id}' AND status = '{status}'"))


@pytest.fixture(scope="package")
def trouble(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trouble]:
    """Run a stack whose cores are taken, and which has lost a node that ran an action."""
    pytest.importorskip("fastapi", reason="the extra `web` is not installed")
    folder = tmp_path_factory.mktemp("web")
    (folder / "services.toml").write_text(SERVICES)
    plan = StackPlan(
        nodes=2,
        cores=2,
        memory_mb=4096,
        cells=1,
        cell_memory_mb=1200,
        services_file=folder / "services.toml",
        web_port=free_port(),
        # One node is lost once. The others stand for as long as there are tests, browsers beside them or not.
        variables={"TANGRAM_BEAT_S": "5", "TANGRAM_NODE_LOST_S": "15", "TANGRAM_WEB_TOKEN": TOKEN},
    )
    with running(folder / "state", plan) as live:
        made = Trouble(live, plan.web_url, [], {})
        try:
            _lose_a_node(made)
            _take_cores(made)
            live.until(lambda: _is_shown(made))
            yield made
        finally:
            for client in made.clients:
                client.cancel(job=client.job)


def _client(made: Trouble, job: str) -> Client:
    made.clients.append(made.live.client(job))
    return made.clients[-1]


def _lose_a_node(made: Trouble) -> None:
    """Job `unlucky` runs an action on each CPU node, and cpu-1 dies."""
    client = _client(made, "unlucky")
    environments = [client.open(trajectory=f"t{number}") for number in range(2)]
    handles = [environment.submit("sleep 3000") for environment in environments]
    made.live.until(lambda: len(made.live.rows("SELECT id FROM actions WHERE status = 'running' AND kind = 'cpu.exec'")) == 2)
    worker = made.live.process("cpu-1")
    for process in [worker, *worker.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    made.live.until(lambda: made.live.rows("SELECT 1 FROM nodes WHERE name = 'cpu-1' AND state = 'lost'"))
    made.live.until(lambda: len(made.live.rows("SELECT id FROM actions WHERE status = 'lost'")) == 1)
    lost = made.live.rows("SELECT id FROM actions WHERE status = 'lost'")[0][0]
    made.handles["lost"] = next(handle for handle in handles if handle.id == lost)
    for handle in handles:
        handle.cancel()


def _take_cores(made: Trouble) -> None:
    """Job `holder` keeps both cores of cpu-0; a job `waiter` wants a core, and so does one whose name is markup."""
    made.handles["holder"] = _client(made, "holder").open(trajectory="h1").submit("sleep 3000", units=[2], preemptible=False)
    made.wait_for("holder", "running")
    for name in ("waiter", HOSTILE):
        environment = _client(made, name).open(trajectory=name)
        made.handles[name] = environment.submit(f"echo {name!r}", action_class=name, preemptible=False)
        made.wait_for(name, "waiting")


def _is_shown(made: Trouble) -> bool:
    """Say whether the page's look, which may be two seconds old, knows of all that waits."""
    return bool(httpx.get(f"{made.url}/api/overview", timeout=30).json()["waiting"] >= 2)


@pytest.fixture(scope="module")
def browser(real_component: None) -> Iterator[Browser]:
    """Start Chromium. For one module: Playwright keeps the event loop of its thread, which other modules need."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    from playwright.sync_api import sync_playwright  # half a second that other tests do not need

    # Debian's launcher `chromium` takes twice the CPU time of the program that it starts, and that takes up to twice that of Chromium
    # without windows.
    lighter = ("chromium-headless-shell", "/usr/lib/chromium/chromium")
    names = (os.environ.get("TANGRAM_TEST_CHROMIUM", ""), *lighter, "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    needed("" if found else "there is no chromium on this machine")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """A journal with a node without isolation, on which one action of two cores runs that had one at first."""
    url, now = new_journal(tmp_path / "tangram.sqlite"), time.time()
    header = {"kind": "cpu.exec", "cost": {"cores": [1, 2]}, "job": "coding", "trajectory": "t", "environment": "e"}
    write(
        url,
        NodeChanged(name="n1", state="up", description={**DESCRIBED, "labels": ["isolation:none"]}, at=now - 99),
        ActionReceived(id="a", header=header, message="", submitted_at=now - 60, received_at=now - 60),
        ActionGranted(id="a", attempt=1, node="n1", units=1, core_ids=(0,), cell_ids=(), granted_at=now - 60),
        ActionResized(id="a", attempt=1, core_ids=(0, 1), units=2, background=False, at=now - 20),
    )
    return url


@pytest.fixture
def view(journal: str, redis_urls: RedisUrls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:
    """Return what opens the page of the journal, with a look for each request; settings may be other ones."""
    from starlette.testclient import TestClient

    from app.web.server import make_app

    monkeypatch.setattr("app.web.shared_looks.INTERVAL_S", 0.01)
    monkeypatch.setattr("app.web.shared_looks.MOST_PAUSE_S", 0.0)
    usual = {"broker_url": redis_urls.broker, "result_url": redis_urls.result, "database_url": journal, "state_dir": tmp_path}
    return lambda **settings: TestClient(make_app(Settings(**{**usual, **settings}), journal))
