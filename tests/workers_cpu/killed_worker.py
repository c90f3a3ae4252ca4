"""A worker to be killed: a background process and a running command in the sandbox of the folder given."""

from __future__ import annotations

import sys
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, ExecRequest
from workers.cpu.process.sandbox import ProcessSandbox


def main() -> None:
    environment = ProcessSandbox(Path(sys.argv[1])).open(EnvironmentSpec(id="e1"))
    environment.start(ExecRequest(action_id="a1", command="touch file; setsid sleep 300.59375 &")).wait()
    print("running", flush=True)
    environment.start(ExecRequest(action_id="a2", command="sleep 300.59375")).wait()


if __name__ == "__main__":
    main()
