"""Runs a module of this project in a process of its own, as a user of this machine."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def run_module(module: str, *arguments: str, user: str) -> subprocess.CompletedProcess[str]:
    """Run it with the packages of this Python, and by this Python if the user may, else by the system's."""
    account = pwd.getpwnam(user)
    who: dict[str, Any] = {}
    program = sys.executable
    if account.pw_uid != os.geteuid():
        who = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        program = next((each for each in (program, shutil.which("python3", path=os.defpath)) if each and _runs(each, who)), program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([program, "-m", module, *arguments], capture_output=True, text=True, env=environment, check=False, **who)


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of what it said on its standard error."""
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def _runs(program: str, who: Mapping[str, Any]) -> bool:
    try:
        return subprocess.run([program, "-c", ""], capture_output=True, check=False, **who).returncode == 0
    except OSError:
        return False
