"""Environments that a killed client leaves are listed as orphans, with whose they are, until they end by themselves.

Source: OpenEnv #991 (30 orphans ran for 25 hours, and nobody could say whose they were).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from app.cli.environments import read_environments
from app.journal.environments import SILENCE_S
from tangram.life_signs import silences
from tests.gateway.conftest import Served
from tests.live.support import Live
from tests.live.test_live_trainers import training

pytestmark = pytest.mark.real


def listed(live: Live, *flags: str) -> dict[str, dict[str, Any]]:
    """Return what `tangram envs` lists, by environment."""
    words = [sys.executable, "-m", "tangram", "envs", "--json", *flags]
    done = subprocess.run(words, env=live.environment, capture_output=True, text=True, check=True)
    return {one["id"]: one for one in json.loads(done.stdout)["environments"]}


def known(live: Live, *, orphans: bool = False) -> set[str]:
    """Return what `tangram envs` would list of the job `left`, without a process of its own for each look."""
    return {one["id"] for one in read_environments(live.settings, job="left", orphans=orphans)}


def test_the_environment_of_a_killed_client_is_listed_as_an_orphan_and_ends(served: Served) -> None:
    live = served.live
    with training(live, job="left") as trainer:
        # Given a client that lives: its environment is nobody's orphan
        assert trainer.environment in known(live) and known(live, orphans=True) == set()
        pid = trainer.process.pid
    # When it is killed, as `training` does at its end
    with served.store() as store:
        live.until(lambda: (silences(store, [trainer.client])[trainer.client] or 0.0) > SILENCE_S)
    found = listed(live, "--orphans")
    one = found[trainer.environment]
    assert one["owner"].endswith(f":{pid}") and one["job"] == "left" and one["age_s"] > SILENCE_S / 2
    assert one["orphan"].startswith("its client gave no sign of life for")
    assert trainer.detached not in found
    ended = f"SELECT id FROM environments WHERE id = '{trainer.environment}' AND ended_at IS NOT NULL"
    live.until(lambda: live.rows(ended), timeout_s=120)
    assert known(live) == {trainer.detached}
