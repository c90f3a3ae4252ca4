"""What tools read in the result store: the document of the active schedulers, and how long clients have been silent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from redis import Redis, RedisError, ResponseError

from app.journal.overview import Present
from tangram.life_signs import silences
from tangram.shards import FIRST
from tangram.wire import LOAD_TTL_S, SCHEDULER_KEY, SHARDS_KEY, of_shard

SHOWN_TTL_S: Final = 60
"""Seconds for which a scheduler that has died is still shown."""

_TRIED_KEY: Final = "tangram-tried"
_COUNTS: Final = ("waiting", "running", "decisions", "resizes", "restores", "predictions")
_WORST: Final = ("epoch", "decision_us_p50", "decision_us_p99", "prediction_factor_p50", "prediction_factor_p90")


def problem_of(store: Redis) -> str:
    """Return in one line what a store says that answers and takes nothing, such as one without memory. Raises other `RedisError`s."""
    try:
        store.set(_TRIED_KEY, b"", px=1)
    except ResponseError as error:
        return f"the result store takes nothing: {error}"
    return ""


def silences_of(store: Redis, present: Present) -> dict[str, float | None]:
    """Return for how many seconds the clients with environments have been silent; of none where the store does not answer."""
    try:
        return silences(store, sorted({row.client for row in present.clients}))
    except (RedisError, OSError):
        return {}


def show_scheduler(store: Redis, shard: int, shards: int, figures: Mapping[str, Any]) -> None:
    """Keep the document of the scheduler of a shard, and how many shards it counts. Raises `RedisError`."""
    with store.pipeline(transaction=False) as pipe:
        pipe.set(of_shard(SCHEDULER_KEY, shard), json.dumps(dict(figures)), ex=SHOWN_TTL_S)
        pipe.set(SHARDS_KEY, shards, ex=LOAD_TTL_S)
        pipe.execute()


def read_shown(store: Redis, shards: int = 1) -> dict[str, Any] | None:
    """Return the schedulers' document (`scheduler/live/document.py`), of all shards as one; None where none shows itself.

    `shown_ago_s` says how old it is by the clock of the result store, so that clocks of hosts do not matter. Of several shards, it is the
    age of the oldest document, and `shard` says whose that is. Raises `RedisError`.
    """
    with store.pipeline(transaction=False) as pipe:  # a store without memory refuses transactions
        for shard in range(shards):
            pipe.pttl(of_shard(SCHEDULER_KEY, shard))  # first, so that no document is older than it seems
            pipe.get(of_shard(SCHEDULER_KEY, shard))
        answers = pipe.execute()
    found: dict[int, dict[str, Any]] = {}
    for shard, (left_ms, shown) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
        if isinstance(shown, bytes | str):
            found[shard] = {**json.loads(shown), "shown_ago_s": max(0.0, SHOWN_TTL_S - left_ms / 1000)}
    if not found:
        return None
    return found[FIRST] if shards == 1 else _as_one(found, shards)


def _as_one(documents: Mapping[int, Mapping[str, Any]], shards: int) -> dict[str, Any]:
    """Return one document: counts are added up, of percentiles the worst counts, of shares the largest."""
    ages = {shard: documents[shard]["shown_ago_s"] if shard in documents else SHOWN_TTL_S for shard in range(shards)}
    oldest = max(ages, key=lambda shard: ages[shard])
    of_all: dict[str, Any] = {**next(iter(documents.values())), "shown_ago_s": ages[oldest], "shard": oldest}
    every = documents.values()
    of_all.update((name, sum(one[name] for one in every)) for name in _COUNTS)
    of_all.update((name, max(one[name] for one in every)) for name in _WORST)
    of_all["queues"] = [queue for one in every for queue in one["queues"]]
    of_all["quotas"] = {name: quota for one in every for name, quota in one["quotas"].items()}
    starting = [one["starting"] for one in every]
    of_all["starting"] = {name: sum(one[name] for one in starting) for name in ("now", "waiting", "limit")}
    of_all["starting"]["next_in_s"] = min(one["next_in_s"] for one in starting)
    # Each shard knows what jobs hold in all of them, but for those that are not active there.
    for name, most in (("jobs", "share"), ("held_back", "waiting")):
        ranked = sorted(((job, row) for one in every for job, row in one[name].items()), key=lambda pair: pair[1][most])
        of_all[name] = dict(ranked)
    # Readers add the document's age to a beat's.
    of_all["nodes"] = {
        name: {**node, "beat_ago_s": node["beat_ago_s"] + ages[shard] - ages[oldest]}
        for shard, one in documents.items()
        for name, node in one["nodes"].items()
    }
    return of_all
