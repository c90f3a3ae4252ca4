"""Starts the container of the process that keeps environments where the worker is a container itself; see `handover/keeper.py`.

It is made of the worker's own image, as Ryuk of Testcontainers is of one. It has the worker's user, since it takes no other one, and the
host's processes, since it looks whether a worker that comes is below an environment. It has the folder of the sandbox, and the control
groups, in which it lets go on what is paused. It has no capability, no network and no engine. Its container is removed when it ends.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import time
from pathlib import Path

from docker.types import LogConfig, Mount, Ulimit

from workers.cpu.docker.engine import DockerEngine, refusals
from workers.cpu.errors import ContainerFailed, StartTimeout
from workers.cpu.handover.fork_client import ENVIRONMENT, PYTHON
from workers.cpu.handover.protocol import Kept, take_over

log = logging.getLogger(__name__)

LABEL = "tangram.keeper"
MODULE = "workers.cpu.handover.keeper"
MEMORY_BYTES, PROCESSES = 64 << 20, 16
CONTROL_GROUPS = "/sys/fs/cgroup"
PAUSE_S = 0.02


def start_keeper(engine: DockerEngine, image: str, node: str, base: Path, keep_s: float, limit_s: float) -> Kept:
    """Start the keeper of a node, in the place of one that has ended, and connect to it as its first worker.

    The caller holds `base`, but not its lock of cleanup, which the keeper hands over. Raises `ContainerFailed`, `ImageMissing` or
    `EngineUnavailable` as their names say; `StartTimeout` when it did not answer within `limit_s`. Then there is none.
    """
    container, deadline = _run(engine, image, node, base, keep_s), time.monotonic() + limit_s
    try:
        while (kept := take_over(base, keep_s, log.warning)) is None:
            if how := engine.state(container, may_be_full=False):
                raise ContainerFailed(f"the keeper ended as soon as it was started: {how}")
            if time.monotonic() > deadline:
                raise StartTimeout("the keeper did not answer in time")
            time.sleep(PAUSE_S)
    except BaseException:
        engine.remove(container)
        raise
    return kept


def _run(engine: DockerEngine, image: str, node: str, base: Path, keep_s: float) -> str:
    """Run the container and return its id."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # It keeps descriptors of all that the worker has open.
    host = engine.api.create_host_config(
        auto_remove=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        network_mode="none",
        pid_mode="host",
        pids_limit=PROCESSES,
        mem_limit=MEMORY_BYTES,
        memswap_limit=MEMORY_BYTES,
        read_only=True,
        mounts=[Mount(str(each), str(each), type="bind") for each in (base, CONTROL_GROUPS)],
        log_config=LogConfig(type="none"),
        ulimits=[Ulimit(name="nofile", soft=files, hard=files)],
    )
    with refusals("the container of the keeper"):
        for left in engine.labelled(LABEL, node):
            engine.remove(left)
        made = engine.api.create_container(
            image,
            entrypoint=[*PYTHON, MODULE, str(keep_s), str(base)],
            name=f"tangram-keeper-{secrets.token_hex(8)}",  # A node may be called what no container can be.
            user=f"{os.geteuid()}:{os.getegid()}",
            environment=ENVIRONMENT,
            # An image that compose has built bears the name of its project: compose would take the keeper for one of its own.
            labels={LABEL: node, "com.docker.compose.project": ""},
            healthcheck={"test": ["NONE"]},
            host_config=host,
        )
        engine.start(made["Id"])
    container_id: str = made["Id"]
    return container_id
