"""Environments that a killed client leaves are listed as orphans, with whose they are, until they end by themselves.

Source: OpenEnv #991 (30 orphans ran for 25 hours, and nobody could say whose they were).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from app.cli.environments import read_environments
from app.journal.environments import SILENCE_S
from app.local.stack import StackPlan
from tests.live.support import Live, running
from tests.live.test_live_trainers import training

ORPHAN_S = 3 * SILENCE_S
"""Silence after which environments of a client are closed; before that they are listed for long enough to be seen."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack whose clients may be silent for `ORPHAN_S`."""
    variables = {"TANGRAM_ORPHAN_S": str(ORPHAN_S)}
    plan = StackPlan(nodes=1, cores=2, memory_mb=2048, api_nodes=0, variables=variables)
    with running(tmp_path_factory.mktemp("orphans") / "state", plan) as live:
        yield live


def listed(live: Live, *flags: str) -> dict[str, dict[str, Any]]:
    """Return what `tangram envs` lists, by environment."""
    words = [sys.executable, "-m", "tangram", "envs", "--json", *flags]
    done = subprocess.run(words, env=live.environment, capture_output=True, text=True, check=True)
    return {one["id"]: one for one in json.loads(done.stdout)["environments"]}


def known(live: Live, *, orphans: bool = False) -> set[str]:
    """Return what `tangram envs` would list, without a process of its own for each look."""
    return {one["id"] for one in read_environments(live.settings, job=None, orphans=orphans)}


def test_the_environment_of_a_killed_client_is_listed_as_an_orphan_and_ends(live: Live) -> None:
    with training(live, job="left") as trainer:
        # Given a client that lives: its environment is nobody's orphan
        assert trainer.environment in listed(live) and listed(live, "--orphans") == {}
        pid = trainer.process.pid
    # When it is killed, as `training` does at its end
    live.until(lambda: trainer.environment in known(live, orphans=True))
    # Then its environment is listed with its owner, its job and its age
    found = listed(live, "--orphans")
    one = found[trainer.environment]
    assert one["owner"].endswith(f":{pid}") and one["job"] == "left" and one["age_s"] > SILENCE_S / 2
    assert one["orphan"].startswith("its client gave no sign of life for")
    # And the one that was opened to outlast its client is not
    assert trainer.detached not in found
    # And it ends without anybody's doing
    live.until(lambda: trainer.environment not in known(live), timeout_s=120)
    assert trainer.detached in listed(live)
