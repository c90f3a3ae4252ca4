"""Metrics of the embedded stack, as a person turns them on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from app.local.processes import wait_until
from tests.cli.forked import forked
from tests.cli.support import leftovers, started
from tests.metrics.load import SERVICES
from tests.ports import free_ports


@pytest.mark.real
def test_up_says_where_each_process_serves_its_metrics(tmp_path: Path) -> None:
    # When the stack is started with a port
    (tmp_path / "services.toml").write_text(SERVICES)
    first = free_ports(6)
    with started(tmp_path, "up", "--cores", "1", "--cells", "1", TANGRAM_METRICS_PORT=str(first)) as up:
        assert up.stderr is not None
        said = ""
        while "metrics:" not in said:
            said = up.stderr.readline()
            assert said, "it ended"
        # Then it says where every process serves its own, one port after another
        addresses = re.findall(r"127\.0\.0\.1:\d+", said)
        assert addresses == [f"127.0.0.1:{first + number}" for number in range(len(addresses))] and len(addresses) >= 4
        # And so does a file for Prometheus, and the stack's own
        state = tmp_path / "state"
        targets = json.loads((state / "metrics.json").read_text())
        assert [one["targets"][0] for one in targets] == addresses
        assert json.loads((state / "stack.json").read_text())["metrics"] == {
            one["labels"]["process_name"]: one["targets"][0] for one in targets
        }
        # And each answers as itself
        for one in targets:
            assert wait_until(lambda one=one: _answers(one["targets"][0]), 60), one
    # And when it has ended, nothing is left of it
    assert not (state / "metrics.json").exists() and not leftovers(tmp_path)


def _answers(address: str) -> bool:
    try:
        return "tangram_build_info" in httpx.get(f"http://{address}/metrics", timeout=10).text
    except httpx.HTTPError:
        return False


def test_counting_celerys_events_needs_a_port(tmp_path: Path) -> None:
    done = forked("metrics", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tangram: set TANGRAM_METRICS_PORT to the port to listen at\n"
