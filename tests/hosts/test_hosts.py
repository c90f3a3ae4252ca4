"""Two nodes on hosts of their own, with TLS, under cuts and a killed scheduler; `python -m tests.hosts` has more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.hosts.network import ROOT
from tests.needed import needed

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_nothing_is_lost_that_could_live_whatever_is_cut_off_or_killed_for_a_while() -> None:
    # Given a deployment over several hosts; when a node is cut off, either way, and the leading scheduler is killed
    words = [sys.executable, "-m", "tests.hosts", "--environments", "4", "--lasts-s", "5", "--json", "--only"]
    done = subprocess.run([*words, "node-1 cut off, 10 s", "node-1 deaf", "scheduler-1 SIGKILL"], cwd=ROOT, capture_output=True, text=True)
    needed(done.stderr.strip() if done.returncode == 2 else "")
    # Then all environments live, each command has run once, and its trainer was told so
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["right"] for row in rounds] == [True] * 3, done.stdout + done.stderr
    assert [(row["lost"], row["delivered"]) for row in rounds] == [(0, 8)] * 3
