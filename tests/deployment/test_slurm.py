"""The batch job of `deploy/slurm`, in a cluster of two nodes on this machine: Slurm itself, with a munge and ports of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tangram import ActionLost, Client, Settings
from tests.engines import waiting
from tests.needed import needed
from tests.ports import free_ports

from .support import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

WAIT_S = 200.0
until = partial(waiting.until, timeout_s=WAIT_S, longest_pause_s=0.5)
"""Most of what is waited for is seen by commands of Slurm, which cost more than a look."""

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
        interfaces = Path("/proc/net/if_inet6")  # an address of IPv6 needs brackets in a URL
        address = "::1" if interfaces.exists() and interfaces.read_text() else "127.0.0.1"
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "STACK_ADDRESS": address}
        self.variables |= {"STACK_COMMAND": str(Path(sys.executable).with_name("tangram")), "STACK_LOCAL_DIR": str(folder / "own disk")}
        self.daemons = [self._start(words) for words in daemons]

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        if words[0] != "munged":
            until(lambda: (self.folder / "munge.socket").exists())
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            return subprocess.Popen(words, env=self.variables, stdout=log, stderr=log)

    def say(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job; empty where the controller does not answer in time."""
        said = self.say("scontrol", "show", "job", job)
        return said.partition("JobState=")[2].split()[0] if said else ""

    def submit(self, *words: str) -> str:
        """Submit the job, and return its number."""
        until(lambda: self.say("sinfo", "--noheader", "--states=idle", "--format=%D") == "2")
        return self.say("sbatch", "--parsable", "--output=%j.log", *words, str(ROOT / "deploy" / "slurm" / "arl-tangram.sbatch"))

    def output(self, job: str) -> str:
        """Return what a job has printed."""
        return (self.folder / f"{job}.log").read_text()

    def serve(self, job: str) -> dict[str, str]:
        """Wait until the job has said where a trainer finds it, and return the variables."""
        file = self.folder / f"arl-tangram-{job}" / "trainer.env"
        until(lambda: file.exists() or self.state(job) not in ("", "PENDING", "CONFIGURING", "RUNNING"))
        assert file.stat().st_mode & 0o77 == 0
        lines = (line.removeprefix("export ").partition("=") for line in file.read_text().splitlines())
        return {name: value for name, _, value in lines}

    def end(self) -> None:
        self.say("scancel", "--full", "--user=root")
        until(lambda: not self.say("squeue", "--noheader"))
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    is_here = all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))) and not os.geteuid()
    needed("" if is_here else "needs Debian's slurm-wlm and root")
    cluster = Slurm(tmp_path_factory.mktemp("cluster") / "slurm")
    yield cluster
    cluster.end()


def test_a_job_serves_a_trainer_and_drains_before_its_limit(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a job on two nodes that has said where a trainer finds it, and what else is on the disk where it works
    (slurm.folder / "own disk").mkdir()
    (slurm.folder / "own disk" / "thesis.tex").touch()
    submitted_at = time.monotonic()
    job = slurm.submit("--time=60")
    folder = slurm.folder / f"arl-tangram-{job}"
    for name, value in slurm.serve(job).items():
        monkeypatch.setenv(name, value)
    with Client("slurm", settings=Settings()) as client:
        # And two environments in which commands run, one of which nobody closes
        environment, left = client.open(trajectory="t1"), client.open(trajectory="left open")
        running, never_ends = environment.submit("sleep 5; echo done"), left.submit("sleep 1000")
        # When it is told that its limit, which is a minute and a half away or more, is near, and once more
        minutes = int(time.monotonic() - submitted_at + 30) // 60 + 2
        slurm.say("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
        slurm.say("scancel", "--batch", "--signal=USR1", job)
        until(lambda: "draining" in slurm.output(job))
        slurm.say("scancel", "--batch", "--signal=USR1", job)
        # Then a command comes to its end, and its environment lives until it is closed
        assert running.result().stdout == "done\n"
        assert environment.exec("echo more").stdout == "more\n"
        environment.close()
        # And before the limit the trainer is told that what is left open is lost
        with pytest.raises(ActionLost):
            never_ends.result(WAIT_S)
    # And the job ends well, leaves its journal, and nothing else on the machines
    until(lambda: slurm.state(job) == "COMPLETED")
    assert "drained and ended" in slurm.output(job)
    with closing(sqlite3.connect(folder / "tangram.sqlite")) as journal:
        ends = dict(journal.execute("SELECT status, count(*) FROM actions WHERE kind = 'cpu.exec' GROUP BY status").fetchall())
    assert ends == {"succeeded": 2, "lost": 1} and not (folder / "trainer.env").exists()
    assert os.listdir(slurm.folder / "own disk") == ["thesis.tex"]


def test_a_job_whose_scheduler_does_not_start_ends(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(slurm.variables, "TANGRAM_POLICY", "nonsense")
    monkeypatch.setitem(slurm.variables, "STACK_LOCAL_DIR", str(slurm.folder / "other disk"))
    job = slurm.submit("--time=60")
    until(lambda: slurm.state(job) == "FAILED")
    assert "has ended, see" in slurm.output(job)
    assert not os.listdir(slurm.folder / "other disk")
