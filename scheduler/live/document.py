"""The active scheduler's document for tools: its figures, and facts of its queues that are not in the journal.

The document is small under any load: it names only the first few actions of each queue. `Service` writes it to the result store at
every housekeeping (`HOUSEKEEPING_S`). `tangram status`, `tangram top` and the live page read it there.

| key | what it is |
|---|---|
| `queues` | for each queue that is not empty: its `kind` (`cores`, `quota`), the `name` of the node or account (empty for cores of any \
node), how many are `waiting`, and the ids of the `first` ones in order |
| `quotas` | for each account: `names` of its quotas, limits, requests `running`, `opens_in_s`, `throttle` and its `factor` |
| `jobs` | for each active job: its `share` of the resource that it has most of, `share_of`; its `entitlement`; whether it is `over` that |
| `starting` | environments that are opening `now`, those that are `waiting` for it, the `limit`, seconds until the rate allows the next \
one (`next_in_s`) |
| `held_back` | for each job that is held back by its circuit breaker: how many are `waiting`; how many of the actions that had `ended` \
were our fault (`ours`); for how long (`held_s`), when one is tried (`next_in_s`), and the ids \
of those that are (`trials`) |
| `lease_s` | seconds without an action after which an environment is closed; null for never |
| `beat_s` | the interval in which nodes beat; null where beats are not looked at |
| `nodes` | for each node: seconds since its last `beat_ago_s`, its `busy_cores` (null where its worker does not measure them), \
for how long nothing more opens on it (`rests_s`; null where it does not rest), and its `memory`: what is `granted_mb` \
to environments, what they `held_mb` between actions, the `reserve_mb`, how many are paused for want of it (`paused_count`), and the first \
of these with the seconds (`paused`); null where limits are booked |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from scheduler.core.core import Core
from scheduler.model import Waiting

FIRST = 20
"""Most actions that are named of a queue."""

JOBS = 200
"""Most jobs whose shares are shown."""


def queues_and_shares(core: Core, busy_cores: Mapping[str, float], now: float) -> dict[str, Any]:
    """Return the keys of the table above."""
    state = core.state
    return {
        "queues": _queues(core, now),
        "quotas": _quotas(core, now),
        "jobs": {
            job: {
                **dict(zip(("share", "share_of"), state.shares.dominant_of(job), strict=True)),
                "entitlement": state.shares.entitlement(job),
                "over": state.shares.over(job),
            }
            for job in islice(state.shares.active(), JOBS)
        },
        "starting": core.opening(now),
        "held_back": dict(islice(core.breaker.shown(now).items(), JOBS)),
        "lease_s": state.limits.lease_s,
        "beat_s": state.limits.beat_s,
        "nodes": {
            name: {
                "beat_ago_s": max(0.0, now - node.last_beat),
                "busy_cores": busy_cores.get(name),
                "rests_s": node.rests_until - now if node.rests_until > now else None,
                "memory": core.memory.books.shown(name, now),
            }
            for name, node in state.nodes.items()
        },
    }


def _queues(core: Core, now: float) -> list[dict[str, Any]]:
    state, pools = core.state, core.pools
    found = []
    for name, group in pools.cpu.groups.items():
        if len(group.queue):
            found.append(_queue("cores", name, len(group.queue), state.in_order([group.queue], now)))
    if len(pools.cpu.floating):
        found.append(_queue("cores", "", len(pools.cpu.floating), state.in_order([pools.cpu.floating], now)))
    for account in dict.fromkeys(pools.quotas.accounts.values()):
        if len(account.queue):
            found.append(_queue("quota", account.name, len(account.queue), state.in_order([account.queue], now)))
    return found


def _queue(kind: str, name: str, waiting: int, first: Iterable[Waiting]) -> dict[str, Any]:
    return {"kind": kind, "name": name, "waiting": waiting, "first": [one.id for one in islice(first, FIRST)]}


def _quotas(core: Core, now: float) -> dict[str, Any]:
    names: dict[str, list[str]] = {}
    accounts = {}
    for quota, account in core.pools.quotas.accounts.items():
        names.setdefault(account.name, []).append(quota)
        accounts[account.name] = account
    shown = {}
    for name, account in accounts.items():
        opens_at = account.opens_at(now)
        shown[name] = {
            "names": names[name],
            "rate_per_s": account.spec.rate_per_s,
            "concurrency": account.spec.concurrency,
            "tokens_per_min": account.spec.tokens_per_min,
            "running": account.running,
            "opens_in_s": None if opens_at is None else max(0.0, opens_at - now),
            "throttle": account.throttle.state(now),
            "factor": account.throttle.factor,
        }
    return shown
