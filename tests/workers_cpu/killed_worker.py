"""A worker to be killed, with commands in environments of a process sandbox.

Arguments: the sandbox's folder, further ones of `ProcessSandbox` as JSON, and commands, each with its environment and session. All but the
last are over when it says that it is `running`, and all when it says so. With `background` after these, the last one runs there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workers.cpu.abstract import EnvironmentSpec, ExecRequest, Holding
from workers.cpu.process.sandbox import ProcessSandbox


def main() -> None:
    folder, options, commands = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    box = ProcessSandbox(Path(folder), **options)
    for number, (environment, session, command) in enumerate(commands, 1):
        if number == len(commands):
            print("running", flush=True)
        holding = Holding(background=number == len(commands) and sys.argv[4:] == ["background"])
        request = ExecRequest(action_id="a", command=command, session=session, holding=holding)
        box.open(EnvironmentSpec(id=environment)).start(request).wait()
    print("over", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
