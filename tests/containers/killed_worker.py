"""A worker to be killed: an environment, one that stands ready, a background process and a running command."""

from __future__ import annotations

import sys
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, ExecRequest
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox


def main() -> None:
    base, node, image, nap, hold = sys.argv[1:]
    options = ContainerOptions(image=image, pull="never", warm={image: 1})
    sandbox = ContainerSandbox(Path(base), node=node, options=options)
    environment = sandbox.open(EnvironmentSpec(id="e1"))
    environment.start(ExecRequest(action_id="a1", command=hold)).wait()
    print(environment.container.id, flush=True)
    environment.start(ExecRequest(action_id="a2", command=f"sleep {nap}")).wait()


if __name__ == "__main__":
    main()
