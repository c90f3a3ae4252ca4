"""The upgrade from the last release, whole; `python -m tests.upgrade` has more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.needed import needed
from tests.upgrade.deployment import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_environments_and_their_commands_go_on_under_this_release() -> None:
    # Given the last release, or what is committed as long as there is none
    needed("" if (ROOT / ".git").exists() else "this is no checkout of git")
    tag = subprocess.run(["git", "describe", "--tags", "--abbrev=0", "--match=v*"], cwd=ROOT, capture_output=True, text=True)
    # When a deployment of it is upgraded to this tree with environments open; then nothing of them is lost
    words = [sys.executable, "-m", "tests.upgrade", "--from", tag.stdout.strip() or "HEAD", "--environments", "6"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
