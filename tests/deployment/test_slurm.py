"""The batch job of `deploy/slurm`, in a cluster of two nodes on this machine: Slurm itself, with a munge and ports of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram import Client, Settings
from tests.engines.waiting import until
from tests.ports import free_ports

from .support import ROOT, missing

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

WAIT_S = 200.0

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES
"""


class Slurm:
    """A cluster in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        host, first = socket.gethostname().partition(".")[0], free_ports(3)
        (folder / "slurm.conf").write_text(SLURM_CONF.format(folder=folder, host=host, ports=range(first, first + 3)))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = (f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed"))
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
        daemons = [munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]]
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "STACK_ADDRESS": "127.0.0.1"}
        self.variables |= {"STACK_COMMAND": str(Path(sys.executable).with_name("tangram")), "STACK_LOCAL_DIR": str(folder / "own disk")}
        self.daemons = [self._start(words) for words in daemons]

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        if words[0] != "munged":
            until(lambda: (self.folder / "munge.socket").exists(), WAIT_S)
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            return subprocess.Popen(words, env=self.variables, stdout=log, stderr=log)

    def say(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        said = self.say("scontrol", "show", "job", job)
        return said.partition("JobState=")[2].split()[0] if said else ""

    def end(self) -> None:
        self.say("scancel", "--full", "--user=root")
        until(lambda: not self.say("squeue", "--noheader"), WAIT_S)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))) or os.geteuid():
        missing("needs Debian's slurm-wlm and root")
    cluster = Slurm(tmp_path / "slurm")
    yield cluster
    cluster.end()


def test_a_job_serves_a_trainer_and_drains_before_its_limit(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a job on two nodes that has said where a trainer finds it, and what else is on the disk where it works
    (slurm.folder / "own disk").mkdir()
    (slurm.folder / "own disk" / "thesis.tex").touch()
    until(lambda: slurm.say("sinfo", "--noheader", "--states=idle", "--format=%D") == "2", WAIT_S)
    job = slurm.say("sbatch", "--parsable", "--output=out.log", "--time=60", str(ROOT / "deploy" / "slurm" / "arl-tangram.sbatch"))
    folder = slurm.folder / f"arl-tangram-{job}"
    until(lambda: (folder / "trainer.env").exists() or slurm.state(job) not in ("PENDING", "CONFIGURING", "RUNNING"), WAIT_S)
    assert (folder / "trainer.env").stat().st_mode & 0o77 == 0
    for line in (folder / "trainer.env").read_text().splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        monkeypatch.setenv(name, value)
    # When it is told that its limit is near, and once more, with an environment open in which a command runs
    with Client("slurm", settings=Settings()) as client:
        environment = client.open(trajectory="t1")
        running = environment.submit("sleep 5; echo done")
        slurm.say("scancel", "--batch", "--signal=USR1", job)
        until(lambda: "draining" in (slurm.folder / "out.log").read_text(), WAIT_S)
        slurm.say("scancel", "--batch", "--signal=USR1", job)
        # Then the command comes to its end, and the environment lives until it is closed
        assert running.result().stdout == "done\n"
        assert environment.exec("echo more").stdout == "more\n"
        environment.close()
    # And the job ends well, leaves its journal, and nothing else on the machines
    until(lambda: slurm.state(job) == "COMPLETED", WAIT_S)
    assert "drained and ended" in (slurm.folder / "out.log").read_text()
    assert (folder / "tangram.sqlite").exists() and not (folder / "trainer.env").exists()
    assert os.listdir(slurm.folder / "own disk") == ["thesis.tex"]


def test_a_job_whose_scheduler_does_not_start_ends(slurm: Slurm) -> None:
    slurm.variables["TANGRAM_POLICY"] = "nonsense"
    job = slurm.say("sbatch", "--parsable", "--output=out.log", "--time=60", str(ROOT / "deploy" / "slurm" / "arl-tangram.sbatch"))
    until(lambda: slurm.state(job) == "FAILED", WAIT_S)
    assert "has ended, see" in (slurm.folder / "out.log").read_text()
    assert not os.listdir(slurm.folder / "own disk")
