"""What an upgrade keeps: `python -m tests.upgrade --from REVISION`, a row for each thing that it must not change.

A deployment of the older version runs with environments open and commands in them. The newer version, which is this working tree, takes
the place of its files. Then one process after the other is ended by SIGTERM and started again, in the order of docs/deployment.md: the
scheduler, the worker, the gateway. The trainer goes on with the older client, and a newer one is tried before and after.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.local.processes import wait_until
from tests.upgrade import rollouts
from tests.upgrade.deployment import ROOT, TANGRAM, UP_S, Deployment, NotUp, install

ORDER = ["scheduler", "worker", "gateway"]


def carry_out(
    deployment: Deployment, newer: str | None, environments: int, order: Sequence[str], sent: signal.Signals
) -> dict[str, list[Any]]:
    """Upgrade a deployment that is up; return for each thing how often it was right, how often it was looked at, and what was wrong."""
    rows = rollouts.Rows()
    rows.check("a newer client, before", deployment.probe, "")
    new = subprocess.run(
        [TANGRAM, "token", "new", "--job", "upgrade"], env=deployment.of(deployment.installed, "scheduler"), stdout=subprocess.PIPE
    )
    token = new.stdout.decode().strip()
    of_gateway = deployment.ask("environments", {"trajectory": "gateway"}, token)["id"]
    deployment.ask(f"environments/{of_gateway}/exec", {"command": "kept=1"}, token)
    words = [rollouts.__file__, str(environments)]
    with deployment.client(deployment.older, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        opened = json.loads(trainer.stdout.readline())
        install(deployment.installed, newer)
        for name in order:
            deployment.end(name, sent)
            if name == "worker":
                deployment.let_go(opened, "during")
                ended = wait_until(lambda: all(deployment.marked(environment, "during") for environment in opened), UP_S)
                rows.check("commands go on without a worker", lambda ended=ended: ended, True)  # type: ignore[misc]
                print("away", file=trainer.stdin, flush=True)
                trainer.stdout.readline()
            deployment.start(name)
        rows.check("a newer client, after", lambda: deployment.probe(*opened), "")
        deployment.let_go(opened, "after")
        print("end", file=trainer.stdin, flush=True)
        told = json.loads(trainer.stdout.readline() or '{"trainer": [0, 1, ["it has failed"]]}')

    def of_the_gateway() -> str:
        try:
            return str(deployment.ask(f"environments/{of_gateway}/exec", {"command": "echo $kept"}, token)["stdout"])
        except urllib.error.HTTPError as error:
            return error.read().decode()

    rows.check("an environment of the gateway", of_the_gateway, "1\n")
    return {**rows.as_json(), **told}


def main(words: Sequence[str] | None = None) -> int:
    """Upgrade; return 1 where something was not kept, 2 where a part does not come up."""
    parser = argparse.ArgumentParser("tests.upgrade", description=__doc__)
    parser.add_argument("--from", dest="revision", required=True, metavar="REVISION", help="the older version: a revision or tag of git")
    parser.add_argument("--to", metavar="REVISION", help="the newer version (default: this working tree)")
    parser.add_argument("--environments", type=int, default=20, help="open environments (default: 20)")
    parser.add_argument("--database", default="", help="the URL of an empty database for the journal (default: SQLite)")
    parser.add_argument("--order", nargs="+", default=ORDER, choices=ORDER, help=f"(default: {' '.join(ORDER)})")
    parser.add_argument("--kill", action="store_true", help="end processes by SIGKILL, not SIGTERM")
    chosen = parser.parse_args(words)
    if sorted(chosen.order) != sorted(ORDER):
        parser.error("the order has each component once")
    for revision in (chosen.revision, chosen.to or "HEAD"):
        if subprocess.run(
            ["git", "rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}"], cwd=ROOT, stdout=subprocess.DEVNULL
        ).returncode:
            parser.error(f"{revision!r} is no revision of this checkout")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="tangram-upgrade-") as folder:
        try:
            with Deployment(Path(folder), chosen.database, chosen.revision, 8 * chosen.environments) as deployment:
                sent = signal.SIGKILL if chosen.kill else signal.SIGTERM
                rows = carry_out(deployment, chosen.to, chosen.environments, chosen.order, sent)
        except NotUp as error:
            print(f"tests.upgrade: {error}", file=sys.stderr)
            return 2
        is_wrong = any(right != of for right, of, _ in rows.values())
        for log in sorted(Path(folder).glob("*.log")) if is_wrong else ():
            print(f"--- {log.name}\n{log.read_text()[-4000:]}", file=sys.stderr)
    for name, (right, of, wrong) in rows.items():
        seen = "; ".join(" ".join(one.split()) for one in wrong[:3])
        print(f"{'ok   ' if right == of else 'WRONG'} {name:34} {right:3} of {of:3}  {seen}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
