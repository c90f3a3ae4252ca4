"""The CPU worker's container has just the rights that its sandbox needs: run with the ones of docker-compose.yml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.images import BUSYBOX, busybox, make_busybox
from tests.deployment.support import ROOT, services

pytestmark = pytest.mark.real

WORK = f"""
from pathlib import Path
from workers.cpu.abstract import Data, EnvironmentSpec, ExecRequest, Holding, WindowSize
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
import sys
options = ContainerOptions(image="{BUSYBOX}", pull="never")
sandbox = ContainerSandbox(Path(sys.argv[1]) / "base", node="tangram-test-rights", options=options)
environment = sandbox.open(EnvironmentSpec(id="e1"))
environment.write_file("note", b"kept")
request = ExecRequest(action_id="a", command="cat note; sleep 60 & wait", holding=Holding((0,)), timeout_s=8)
outcome = environment.start(request).wait()
request = ExecRequest(action_id="a", command="test -t 0 && tty; read line; echo $line", terminal=WindowSize(24, 80), timeout_s=20)
execution = environment.start(request)
execution.give(Data(b"typed"))
execution.give(Data(bytes([13])))
shown = execution.wait()
sandbox.close()
print(outcome.status, outcome.stdout.decode(), *shown.stdout.decode().split())
"""


@pytest.mark.real
def test_a_worker_with_the_rights_of_its_service_opens_runs_and_ends(tmp_path: Path) -> None:
    if busybox() is None or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers, or there is no statically linked busybox")
    make_busybox()
    # Given a container with the rights and the host's folders of the service, and with this machine's Python
    worker = services()["cpu-worker"]
    argv = ["docker", "run", "--rm", "--network", "none", "--pid", worker["pid"], "--user", worker["user"], "--read-only"]
    argv += [f"--cap-drop={each}" for each in worker["cap_drop"]] + [f"--cap-add={each}" for each in worker["cap_add"]]
    argv += [f"--security-opt={each}" for each in worker["security_opt"]] + ["--tmpfs", "/tmp"]
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        argv += ["--cgroupns", "host"]
    needed = {Path(each) for each in (sys.prefix, sys.base_prefix, ROOT) if not Path(each).is_relative_to("/usr")}
    ours = [f"{each}:{each}:ro" for each in (*map(str, needed), "/usr", "/lib", "/lib64") if Path(each).exists()]
    theirs = ["/var/run/docker.sock:/var/run/docker.sock", "/sys/fs/cgroup:/sys/fs/cgroup:rw", f"{tmp_path}:{tmp_path}"]
    argv += [word for each in (*ours, *theirs) for word in ("--volume", each)]
    argv += ["--env", f"PYTHONPATH={ROOT}", "--env", "PATH=/usr/bin:/bin", BUSYBOX, sys.executable, "-c", WORK, str(tmp_path)]
    # When a sandbox there opens an environment, writes a file, ends a command that is out of time, and gives another one a terminal
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, sorted(done.stdout.split())) == (0, sorted(["timed_out", "kept", "/dev/pts/0", "typed", "typed"])), done.stderr
