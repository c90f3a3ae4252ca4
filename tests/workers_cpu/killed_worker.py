"""A worker to be killed: a process that was left behind and a running command in a sandbox, in the background where asked.

Arguments: the sandbox's folder, how long both sleep (by which a test finds them), and `background` or nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, ExecRequest, Holding
from workers.cpu.process.sandbox import ProcessSandbox


def main() -> None:
    folder, nap = sys.argv[1:3]
    environment = ProcessSandbox(Path(folder)).open(EnvironmentSpec(id="e1"))
    environment.start(ExecRequest(action_id="a1", command=f"touch file; setsid sleep {nap} &")).wait()
    print("running", flush=True)
    if sys.argv[3:] == ["background"]:
        command = f"setsid sleep {nap} & while :; do :; done"
        environment.start(ExecRequest(action_id="a2", command=command, holding=Holding(background=True))).wait()
    else:
        environment.start(ExecRequest(action_id="a2", command=f"sleep {nap}")).wait()


if __name__ == "__main__":
    main()
