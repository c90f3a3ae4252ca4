"""The processes of a server that are hard to find. A program of its own.

    python process_tree.py FOLDER        writes their ids to the file `pids` in FOLDER once all run

| process | is |
|---|---|
| parent | what the guard starts, as the process of a server that listens |
| child | in a session of its own |
| grandchild | below it, and deaf to SIGTERM |
| elsewhere | in another directory, with `TMPDIR` |
| bare | without environment, in the folder |
| unmarked | in another directory and without environment |
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = ["/bin/sleep", "600"]


def main(folder: Path) -> None:
    """Start the others and stay."""
    pids = {"parent": os.getpid()}
    reader, writer = os.pipe()
    pids["child"] = os.fork()
    if not pids["child"]:
        os.setsid()
        grandchild = subprocess.Popen(SLEEP, preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        os.write(writer, str(grandchild.pid).encode())
        time.sleep(600)
    pids["grandchild"] = int(os.read(reader, 20))
    pids["elsewhere"] = subprocess.Popen(SLEEP, cwd="/").pid
    pids["bare"] = subprocess.Popen(SLEEP, env={}).pid
    pids["unmarked"] = subprocess.Popen(SLEEP, cwd="/", env={}).pid
    draft = folder / "draft"
    draft.write_text(json.dumps(pids))
    draft.replace(folder / "pids")
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
