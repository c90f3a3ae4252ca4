"""The suites of process sandboxes, on control groups version 2 of a real kernel: user-mode Linux, a whole kernel as one process.

It has the files of this machine, one processor and no controller `cpuset`, without which there are no containers. Arithmetic is as fast as
outside, system calls are several times slower. So the suites run here that use control groups, by those only, and one boot serves all.
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

import pytest

from tests.deployment.support import ROOT, missing

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
LEFT_OUT = {
    "[process": "what bubblewrap shows: `workers/cpu/process/groups.py` writes the same files for both",
    "[none": "the same",
    "cannot_bound_memory": "no control group, so nothing of version 2",
    "container": "the controller cpuset",
    "affinity": "no control group, so nothing of version 2",
    "counts_for_its_cores": "two cores",
    "has_left_its_control_group": "two cores",
    "in_version_1": "version 1",
    "in_version_2_a_worker": "a controller that nobody uses, which a machine with version 1 has",
}
"""Words in the names of tests that do not run here, and what they need or take."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Boot the kernel, and return how each test in it ended."""
    if not all(map(shutil.which, (KERNEL, "cc", "mkfs.ext4", "ip"))) or os.geteuid():
        missing("needs Debian's user-mode-linux, gcc, libc6-dev, e2fsprogs and iproute2, and root")
    folder = tmp_path_factory.mktemp("kernel")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "xstate.so", HERE / "xstate.c"], check=True)
    with (folder / "disk").open("wb") as disk:
        disk.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", folder / "disk"], check=True)
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.second_try", f"--write-outcomes-to={folder}/outcomes.json", "-rs"]
    inside = [sys.executable, "-B", "-m", "pytest", *words, "-k", " and ".join(f"not {word}" for word in LEFT_OUT), *SUITES]
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
    print((folder / "output").read_text(errors="replace"))
    assert (folder / "outcomes.json").exists(), "the kernel has ended before the tests in it"
    return {name: outcome for name, (outcome, _) in json.loads((folder / "outcomes.json").read_text()).items()}


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_holds_with_version_2(suite: str, outcomes: dict[str, str]) -> None:
    found = {name: outcome for name, outcome in outcomes.items() if name.startswith(suite)}
    assert found and set(found.values()) == {"passed"}, found
