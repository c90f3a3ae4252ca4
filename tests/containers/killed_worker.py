"""A worker to be killed, or stopped: an environment, others that stand ready, a background process and a running command."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, ExecRequest
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox

STARTS = "starts"
"""In the place of the first command: a worker that waits for the engine to start its container."""


class StuckEngine(DockerEngine):
    """An engine that never gets to start a container, and prints its id."""

    def start(self, container_id: str) -> tuple[int, str, tuple[str, ...]]:
        print(container_id, flush=True)
        signal.pause()
        raise AssertionError


def main() -> None:
    base, node, image, command, hold, ready = sys.argv[1:]
    options = ContainerOptions(image=image, pull="never", warm={image: int(ready)} if int(ready) else {})
    if hold == STARTS:
        ContainerSandbox(Path(base), node=node, options=replace(options, warm={}), engine=StuckEngine()).open(EnvironmentSpec(id="e1"))
    sandbox = ContainerSandbox(Path(base), node=node, options=options)
    environment = sandbox.open(EnvironmentSpec(id="e1", memory_mb=64))
    environment.start(ExecRequest(action_id="a1", command=hold)).wait()
    print(environment.container.id, flush=True)
    outcome = environment.start(ExecRequest(action_id="a2", command=command)).wait()
    print(outcome.cause, outcome.reason, sep=": ", flush=True)


if __name__ == "__main__":
    main()
