"""What several of these tests need: what is left of containers, a neighbour that works meanwhile, a worker to be killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from docker import APIClient

from tests.workers_cpu.support import Worker, admit, worker_to_be_killed
from workers.cpu.abstract import Environment, ExecOutcome
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox

from .conftest import node_name


@cache
def engine() -> APIClient:
    """Return a client of the engine. Conditions ask often, and a command of docker's costs more."""
    return APIClient("unix:///var/run/docker.sock", version="auto")


def docker(*argv: str) -> str:
    return subprocess.run(["docker", *argv], check=True, capture_output=True, text=True).stdout.strip()


def containers(node: str) -> list[str]:
    """Return the ids of a node's containers, running or not."""
    return [each["Id"] for each in engine().containers(all=True, filters={"label": f"tangram.node={node}"})]


def pauses(container_id: str) -> bool:
    """Have the engine freeze a container; False where it could not, as happens on a busy machine with version 1 of control groups."""
    return subprocess.run(["docker", "pause", container_id], capture_output=True).returncode == 0


@contextmanager
def alone_as(node: str) -> Iterator[None]:
    """Be the only test on this machine with a stack whose containers are of a node: a worker removes those that bear its name."""
    with open(f"/tmp/tangram-test-node-{node}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def waits_for_its_worker(container_id: str) -> bool:
    """Say whether the container init has come to where it notices that its worker ends."""
    pid = engine().inspect_container(container_id)["State"]["Pid"]
    try:
        return os.readlink(f"/proc/{pid}/fd/0").endswith("/alive")
    except OSError:
        return False


def groups_of(container_id: str) -> list[str]:
    top = Path("/sys/fs/cgroup")
    return [str(path) for pattern in ("docker", "*/docker", "system.slice") for path in top.glob(f"{pattern}/*{container_id}*")]


def processes_of(container_id: str) -> list[int]:
    """Return the processes of a container that have not ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and container_id in Path(f"/proc/{name}/cgroup").read_text():
                found.append(int(name))
        except OSError:
            continue
    return found


def sandbox_threads(*besides: threading.Thread) -> list[str]:
    """Return the names of the threads of sandboxes. Those of tests before this one in the same process go `besides`."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("tangram-") and thread not in besides)


@dataclass
class Meanwhile:
    """What a neighbour's commands came to."""

    outcomes: list[ExecOutcome] = field(default_factory=list)

    def is_untouched(self) -> bool:
        """Say whether each command printed what it had to."""
        wrong = [each for each in self.outcomes if (each.status, each.stdout) != ("succeeded", b"499500\n")]
        return bool(self.outcomes) and not wrong


@contextmanager
def neighbour_at_work(neighbour: Environment, core: int) -> Iterator[Meanwhile]:
    """Have a neighbour carry out small sums on `core`, one after the other, as long as the block lasts."""
    meanwhile, stop = Meanwhile(), threading.Event()
    command = "i=0; s=0; while [ $i -lt 1000 ]; do s=$((s + i)); i=$((i + 1)); done; echo $s"

    def work() -> None:
        while not stop.wait(0.05) or not meanwhile.outcomes:
            meanwhile.outcomes.append(admit(neighbour, command, cores=(core,)).wait())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield meanwhile
    finally:
        stop.set()
        thread.join()


@contextmanager
def box_of(base: Path, options: ContainerOptions, node: str = "", engine: DockerEngine | None = None) -> Iterator[ContainerSandbox]:
    box = ContainerSandbox(base, node=node or node_name(), options=options, engine=engine)
    try:
        yield box
    finally:
        box.close()


class StuckEngine(DockerEngine):
    """An engine that never gets to start a container."""

    def start(self, container_id: str) -> None:
        signal.pause()


def worker(base: Path, node: str, image: str, *commands: str, **more: Any) -> AbstractContextManager[Worker]:
    """Return a worker to be killed with containers of `image`, which carries out `commands`; `more` are further options."""
    engine = more.pop("engine", None)
    options = ContainerOptions(image=image, pull="never", **more)
    make = partial(ContainerSandbox, node=node, options=options, engine=engine)
    return worker_to_be_killed(base, *(("e1", "main", command) for command in commands), memory_mb=64, make=make)
