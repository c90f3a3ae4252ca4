"""A worker to be killed, or stopped: an environment, one that stands ready, a background process and a running command."""

from __future__ import annotations

import sys
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, ExecRequest
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox


def main() -> None:
    base, node, image, command, hold = sys.argv[1:]
    options = ContainerOptions(image=image, pull="never", warm={image: 1})
    sandbox = ContainerSandbox(Path(base), node=node, options=options)
    environment = sandbox.open(EnvironmentSpec(id="e1", memory_mb=64))
    environment.start(ExecRequest(action_id="a1", command=hold)).wait()
    print(environment.container.id, flush=True)
    outcome = environment.start(ExecRequest(action_id="a2", command=command)).wait()
    print(outcome.cause, outcome.reason, sep=": ", flush=True)


if __name__ == "__main__":
    main()
