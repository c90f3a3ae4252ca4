"""Record what a release leaves to the next scheduler: `python -m tests.upgrade.recording --from TAG > tests/upgrade/left.json`.

That is the journal, and what a trainer and a worker of that release send before the next scheduler begins. `test_formats.py` reads it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from redis import Redis

from app.local.processes import wait_until
from tangram.wire import EVENTS_QUEUE, INGRESS_QUEUE
from tests.upgrade.deployment import UP_S, Deployment

TRAINER = """
import os, sys
from tangram import Client
client = Client(job="job")
env = client.open(trajectory="t", memory_mb=100)
env.exec("mkfifo ~/go")
runs = env.submit("echo runs >> ~/marks; read _ <~/go", session="a", timeout_s=60.0, variables={"A": "1"})
parked = env.submit("echo parked", session="a")
print(env.id, runs.id, parked.id, flush=True)
sys.stdin.readline()
print(env.submit("echo sent", session="b").id, flush=True)
sys.stdin.readline()
os._exit(0)
"""


def record(deployment: Deployment) -> dict[str, Any]:
    """Return what a deployment leaves, as JSON has it."""
    store = Redis(unix_socket_path=str(deployment.folder / "redis.sock"))

    def lying(queue: str) -> list[Any]:
        return [json.loads(raw) for raw in reversed(store.lrange(queue, 0, -1))]

    with deployment.client(deployment.older, ["-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer, closing(store):
        assert trainer.stdin is not None and trainer.stdout is not None
        environment, runs, parked = trainer.stdout.readline().split()
        assert wait_until(lambda: deployment.marked(environment, "runs"), UP_S)
        deployment.end("scheduler", signal.SIGTERM)
        deployment.let_go([environment], "go")
        print("go on", file=trainer.stdin, flush=True)
        sent = trainer.stdout.readline().strip()
        assert wait_until(lambda: lying(INGRESS_QUEUE) and "finished" in str(lying(EVENTS_QUEUE)), UP_S)
        with closing(sqlite3.connect(deployment.folder / "tangram.sqlite")) as journal:
            dump = list(journal.iterdump())
        print("end", file=trainer.stdin, flush=True)
        ids = {"environment": environment, "runs": runs, "parked": parked, "sent": sent}
        queues = {queue: lying(queue) for queue in (INGRESS_QUEUE, EVENTS_QUEUE)}
        return {"ids": ids, "now": time.time(), "journal": dump, "queues": queues}


if __name__ == "__main__":
    parser = argparse.ArgumentParser("tests.upgrade.recording", description=__doc__)
    parser.add_argument("--from", dest="revision", required=True, metavar="REVISION", help="the release: a revision or tag of git")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tangram-upgrade-") as name, Deployment(Path(name), "", chosen.revision, 8) as running:
        json.dump(record(running), sys.stdout, indent=1)
