"""A worker whose containers may reach what `allow` names; it prints what a command prints in one, then waits to be killed.

Arguments: base folder, node, image, allow-list, command. What refuses it is printed, too.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from tangram.errors import TangramError
from workers.cpu.abstract import EnvironmentSpec, ExecRequest
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox


def main() -> None:
    base, node, image, allow, command = sys.argv[1:]
    # What the sandbox warns of goes where the test does not read.
    logging.basicConfig(level=logging.CRITICAL)
    try:
        sandbox = ContainerSandbox(
            Path(base), node=node, options=ContainerOptions(image=image, pull="never", allow=tuple(allow.split(",")))
        )
    except TangramError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return
    environment = sandbox.open(EnvironmentSpec(id="e1"))
    outcome = environment.start(ExecRequest(action_id="a1", command=command, timeout_s=20)).wait()
    print(outcome.stdout.decode(), end="", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
