"""A node is drained under load: what is there comes to its end, the rest goes elsewhere, also under the next scheduler."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from app.local.stack import StackPlan
from tangram import Client
from tangram.client import Environment
from tangram.session import Session
from tests.cli.template import PROGRAM, Forked
from tests.live.support import Live, running

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def pair(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack of two nodes; each test puts back what it has drained."""
    plan = StackPlan(nodes=2, cores=2, memory_mb=4096, api_nodes=0)
    with running(tmp_path_factory.mktemp("pair"), plan) as started:
        yield started


@contextmanager
def operator(live: Live) -> Iterator[Callable[[str, bool], None]]:
    """Give what drains a node, or puts it back, and returns once that is so."""
    session = Session("operator", live.settings)
    for started in session.start():
        started.result(session.start_limit_s)

    def drain(node: str, draining: bool) -> None:
        session.wait_for(session.drain(node, draining=draining))
        live.until(lambda: live.rows(f"SELECT 1 FROM nodes WHERE name = '{node}' AND draining = {int(draining)}"))

    yield drain
    session.stop()


def stand_on(live: Live, node: str) -> set[str]:
    """Return the environments that have not ended on a node."""
    return {row[0] for row in live.rows(f"SELECT id FROM environments WHERE node = '{node}' AND ended_at IS NULL")}


def test_a_node_is_drained_under_load_over_a_restart_of_the_scheduler_and_put_back(pair: Live) -> None:
    # Given two nodes on which environments stand, a command that runs in each, and rollouts that come and go
    live = pair
    with live.client("rollouts") as client, operator(live) as drain, ThreadPoolExecutor(4) as rollouts:
        standing = {node: _environment_on(live, client, node) for node in ("cpu-0", "cpu-1")}
        running = standing["cpu-0"].submit("until [ -e go ]; do sleep 0.05; done; echo gone on", session="other")
        live.until(lambda: live.rows(f"SELECT 1 FROM actions WHERE id = '{running.id}' AND status = 'running'"))
        before = [rollouts.submit(_rollout, client, f"before-{number}") for number in range(8)]
        # When the first one is drained
        drain("cpu-0", True)
        left = stand_on(live, "cpu-0")
        after = [rollouts.submit(_rollout, client, f"after-{number}") for number in range(8)]
        # Then every rollout comes to its end, and none opens there any more
        assert {rollout.result(120) for rollout in [*before, *after]} == {"3"}
        # The journal has the last close a moment after its trainer.
        live.until(lambda: stand_on(live, "cpu-0") == {standing["cpu-0"].id})
        assert standing["cpu-0"].id in left
        assert _opened_on(live, "after-%") == {"cpu-1"}
        # When the scheduler is killed, and the next one goes on
        live.replace_scheduler()
        assert _rollout(client, "restarted") == "3"
        assert _opened_on(live, "restarted") == {"cpu-1"}
        # Then what ran on the draining node still does, and comes to its end, and so does its environment
        assert not running.done()
        standing["cpu-0"].exec("touch go")
        assert running.result(60).stdout == "gone on\n"
        standing["cpu-0"].close()
        live.until(lambda: not stand_on(live, "cpu-0"))
        # When the other node is drained, too, an open waits, until the first one is put back
        drain("cpu-1", True)
        waits = rollouts.submit(_rollout, client, "waits")
        live.until(lambda: live.rows("SELECT 1 FROM actions WHERE trajectory = 'waits' AND status = 'waiting'"))
        drain("cpu-0", False)
        assert waits.result(60) == "3"
        assert _opened_on(live, "waits") == {"cpu-0"}
        drain("cpu-1", False)


def _environment_on(live: Live, client: Client, node: str) -> Environment:
    return client.open(trajectory=f"on-{node}", requires=[f"node:{node}"])


def _rollout(client: Client, trajectory: str) -> str:
    """Open an environment, run three commands in it that build on each other, and close it."""
    environment = client.open(trajectory=trajectory)
    for _ in range(3):
        environment.exec("echo x >> lines")
    lines = environment.exec("wc -l < lines").stdout.strip()
    environment.close()
    return lines


def _opened_on(live: Live, trajectory: str) -> set[str]:
    """Return the nodes on which environments of these trajectories were opened."""
    return {row[0] for row in live.rows(f"SELECT node FROM actions WHERE kind = 'cpu.open' AND trajectory LIKE '{trajectory}'")}


def test_a_drain_that_no_scheduler_takes_up_says_so_and_counts_for_the_next_one(pair: Live) -> None:
    # Given a stack whose scheduler has died
    live = pair
    live.end("scheduler")
    # When a node is drained
    words = [*PROGRAM, "drain", "cpu-0"]
    environment = {**os.environ, **live.environment, "TANGRAM_STATE_DIR": str(live.stack.state_dir)}
    with Forked(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as drains:
        out, err = drains.communicate(timeout=100)
    # Then that is said in one line
    assert (drains.returncode, out) == (2, "")
    assert err == "tangram: no scheduler has taken the request up in 6.5 s; the next one that is active will (`tangram status`)\n"
    # And the next scheduler drains it
    live.stack.restart("scheduler")
    live.until(lambda: live.rows("SELECT 1 FROM nodes WHERE name = 'cpu-0' AND draining = 1"))
    with operator(live) as drain:
        drain("cpu-0", False)
