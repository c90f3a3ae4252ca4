"""What a week of training weighs: memory of each process, keys in Redis, and bytes in the journal, for each action.

`python -m bench.week` runs commands in environments of an embedded stack, in bursts. After each burst it reads the memory of every
process. At the end it reads what is left in Redis, how long each key lasts, and how many bytes each table and index of the journal holds.
A line of least squares through the bursts after the first third says by how much a process grows. The last lines say what `--rate`
actions a second come to: keys of Redis as long as they last, rows of the journal for each day.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from redis import Redis

from app.local import stack
from app.local.embedded import EmbeddedStack
from bench.tools import MIB, running
from tangram.client import Client
from tangram.settings import Settings

CORES = 8
ENVIRONMENTS = 16
DAY_S = 86_400


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=20_000, help="commands in all")
    parser.add_argument("--bursts", type=int, default=20, help="readings of the processes' memory")
    parser.add_argument("--rate", type=float, default=300.0, help="actions a second for which the last lines reckon")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    found = measure(options.actions, options.bursts)
    print(json.dumps(found, indent=2) if options.json else _text(found, options.rate))
    return 0


def measure(actions: int, bursts: int) -> dict[str, Any]:
    """Run the commands, and return what they left: by process, by kind of key, and by table."""
    with running(stack.StackPlan(cores=CORES, api_nodes=0)) as started:
        memory: defaultdict[str, list[float]] = defaultdict(list)
        with Client(job="week", settings=stack.settings_of(started, Settings())) as client:
            rollouts = [client.open(trajectory=f"rollout-{number}") for number in range(ENVIRONMENTS)]
            with ThreadPoolExecutor(ENVIRONMENTS) as threads:
                each = actions // bursts // ENVIRONMENTS
                for _ in range(bursts):
                    list(threads.map(lambda env: [env.exec("echo done") for _ in range(each)], rollouts))
                    for name, mib in _memory(started):
                        memory[name].append(mib)
            ran = each * bursts * ENVIRONMENTS
            keys = _keys(Redis(unix_socket_path=str(started.state_dir / "redis.sock")))
        tables = _tables(started.state_dir / "tangram.sqlite")
    first = bursts // 3
    at = np.arange(first, bursts) * ran / bursts
    growth = {name: float(np.polyfit(at, mib[first:], 1)[0] * 10_000) for name, mib in memory.items()}
    last = {name: mib[-1] for name, mib in memory.items()}
    return {"actions": ran, "memory_mib": last, "mib_per_10000": growth, "keys": keys, "tables": tables}


def _memory(started: EmbeddedStack) -> Iterator[tuple[str, float]]:
    """Yield the resident memory of each process in MiB, and that of the process that runs the client."""
    pids = json.loads(started.stack_file.read_text())["pids"]
    for name, pid in {**pids, "client": os.getpid()}.items():
        yield name, psutil.Process(pid).memory_info().rss / MIB


def _keys(store: Redis) -> list[dict[str, Any]]:
    """Return kinds of keys: how many there are, their bytes, and how long the longest lasts; None for one without end."""
    kinds: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for key in store.scan_iter(count=1000):
        name = key.decode()
        kinds[re.sub("-?[0-9a-f]{8,}.*", "", name)].append((store.memory_usage(key) or 0, store.ttl(key)))
    return [
        {"kind": kind, "count": len(found), "bytes": sum(size for size, _ in found), "lasts_s": max(ttl for _, ttl in found)}
        for kind, found in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]


def _tables(journal: Path) -> dict[str, int]:
    """Return the bytes of each table and index of a journal, with what is free in their pages."""
    with sqlite3.connect(journal) as database:
        return dict(database.execute("SELECT name, SUM(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC"))


def _text(found: dict[str, Any], rate: float) -> str:
    actions = found["actions"]
    lines = [
        f"{actions} commands in {ENVIRONMENTS} environments",
        "",
        f"{'process':16}{'MiB at the end':>16}{'MiB per 10,000 actions':>24}",
    ]
    lines += [f"{name:16}{mib:16.1f}{found['mib_per_10000'][name]:24.2f}" for name, mib in found["memory_mib"].items()]
    lines += ["", f"{'keys in Redis':40}{'count':>8}{'bytes each':>12}{'lasts s':>10}"]
    lines += [f"{key['kind']:40}{key['count']:8}{key['bytes'] / key['count']:12.0f}{key['lasts_s']:10}" for key in found["keys"]]
    lines += ["", f"{'journal':40}{'bytes per action':>18}"]
    lines += [f"{name:40}{size / actions:18.1f}" for name, size in found["tables"].items() if size / actions >= 1]
    row = sum(found["tables"].values()) / actions
    lasting = sum(key["bytes"] / actions * min(key["lasts_s"], 7 * DAY_S) for key in found["keys"] if key["count"] >= actions // 2)
    lines += [f"{'all':40}{row:18.1f}", "", f"{rate:g} actions a second: {rate * lasting / 1e9:.2f} GB in Redis,"]
    lines[-1] += f" {rate * DAY_S * row / 1e9:.1f} GB a day in the journal, {7 * rate * DAY_S * row / 1e9:.0f} GB a week"
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
