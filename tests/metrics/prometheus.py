"""A real Prometheus for tests: its own folder, its own port, and questions to it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.local.processes import wait_until
from tests.needed import needed
from tests.ports import free_port

MONITORING = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
SCRAPE_S = 3
"""Time between two scrapes, and the longest that one may take; seconds."""


def tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; without it, skip on a laptop and fail in CI."""
    found = shutil.which(name)
    needed("" if found else f"needs {name} (Debian's package prometheus)")
    return str(found)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return what a query yields now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=30).json()
        assert answer["status"] == "success", (query, answer)
        result = answer["data"]["result"]
        return result if isinstance(result, list) else []

    def values(self, query: str) -> list[float]:
        """Return the figures that a query yields now."""
        return [float(one["value"][1]) for one in self.ask(query)]

    def get(self, path: str) -> Any:
        """Return the data of an endpoint."""
        return httpx.get(f"{self.url}/api/v1/{path}", timeout=30).json()["data"]


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: Path) -> Iterator[Prometheus]:
    """Run Prometheus with the project's rules and alerts, on the targets of a file."""
    binary = tool("prometheus")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(MONITORING / "rules.yml"), str(MONITORING / "alerts.yml")],
        "scrape_configs": [{"job_name": "tangram", "file_sd_configs": [{"files": [str(targets)]}]}],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, *words], stdout=log, stderr=log)
    try:
        assert wait_until(lambda: process.poll() is not None or _ready(address), 60) and process.poll() is None, (
            folder / "log"
        ).read_text()
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def _ready(address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://{address}/-/ready", timeout=5).status_code == 200
    return False
