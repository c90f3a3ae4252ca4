"""The suites of process sandboxes, on control groups version 2 of a real kernel: user-mode Linux, a whole kernel as one process.

It has the files of this machine, one processor and no controller `cpuset`, without which there are no containers. Arithmetic is as fast as
outside, system calls are several times slower. So those tests run here that show something of version 2, and one boot serves all.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deployment.support import ROOT
from tests.needed import needed

pytestmark = [pytest.mark.real, pytest.mark.timeout(1700)]

HERE = Path(__file__).parent
KERNEL, LIMIT_S = "linux.uml", 1500.0
DISK_BYTES = 2 << 30

SUITES = (
    "tests/sandboxes/test_memory.py",
    "tests/sandboxes/test_background.py",
    "tests/sandboxes/test_allowance.py",
    "tests/workers_cpu/test_memory.py",
)
SHOWN = {
    "too_much_memory": "an environment that its group bounds, and what the kernel ended in it",
    "share_its_memory": "groups of sessions in that of their environment",
    "comes_back_with_all": "the flag of the background, and cores by affinity",
    "of_another_session": "several sessions of an environment, some of which are in the background",
    "where_its_grant_ends": "a bound that moves, how memory is measured, and a group that is frozen",
    "reads_large_files": "pages of files, which the kernel takes back at the bound",
    "grows_to_the_limit": "a bound that has come to the limit",
    "environment_or_session_can_be_closed": "frozen groups whose processes are ended",
    "shell_cannot_start": "a group in which nothing fits",
    "names_no_memory": "the group around all environments",
    "memory_of_all_environments": "whose group was full",
}
"""Words in the names of the tests that run here, with bubblewrap alone, and what they show of version 2. Other tests of these suites use
the same files, or none. What needs two cores, `cpuset` or a controller that nobody uses cannot run here."""


class Booted(NamedTuple):
    """How each test in the kernel ended, and what they said."""

    outcomes: dict[str, str]
    said: str


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Booted:
    """Boot the kernel, and run the tests in it."""
    if not all(map(shutil.which, (KERNEL, "cc", "mkfs.ext4", "ip"))) or os.geteuid():
        needed("needs Debian's user-mode-linux, gcc, libc6-dev, e2fsprogs and iproute2, and root")
    folder = tmp_path_factory.mktemp("kernel")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "xstate.so", HERE / "xstate.c"], check=True)
    with (folder / "disk").open("wb") as disk:
        disk.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", folder / "disk"], check=True)
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.second_try", f"--write-outcomes-to={folder}/outcomes.json", "-rs"]
    chosen = f"bubblewrap and not affinity and not container and ({' or '.join(SHOWN)})"
    inside = [sys.executable, "-B", "-m", "pytest", *words, "-k", chosen, *SUITES]
    (folder / "run.sh").write_text(f"CI={os.environ.get('CI', '')} exec {shlex.join(inside)}\n")
    boots = ["setpriv", "--pdeathsig=TERM"]  # if this process is killed, the kernel ends what it runs
    boots += [KERNEL, "mem=3G", "quiet", "con=null", "con0=fd:0,fd:1", f"uml_dir={folder}/uml", f"ubd0={folder}/disk"]
    boots += ["rootfstype=hostfs", "rootflags=/", "rw", f"init={HERE}/init.sh", "--", str(ROOT), f"{folder}/run.sh"]
    with (folder / "output").open("wb") as output:
        variables = {**os.environ, "LD_PRELOAD": str(folder / "xstate.so")}
        kernel = subprocess.Popen(boots, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                kernel.wait(LIMIT_S)
        finally:  # Ctrl-C too: what the kernel runs are processes of this machine
            if kernel.poll() is None:
                os.killpg(kernel.pid, signal.SIGKILL)
                kernel.wait()
    said = (folder / "output").read_text(errors="replace")
    assert (folder / "outcomes.json").exists(), f"the kernel has ended before the tests in it: {said}"
    return Booted({name: outcome for name, (outcome, _) in json.loads((folder / "outcomes.json").read_text()).items()}, said)


@pytest.mark.parametrize("word", SHOWN)
def test_a_suite_holds_with_version_2(word: str, booted: Booted) -> None:
    found = {name: outcome for name, outcome in booted.outcomes.items() if word in name}
    print(booted.said)  # which pytest shows where this fails
    assert found and set(found.values()) == {"passed"}, found
