"""What a stack holds at a moment, for `bench.gateway`: what processes have open, what Redis keeps, how late the gateway's loop ran."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from sqlalchemy import Engine, text

from bench.tools import MIB, used_s

_LAG = "tangram_gateway_loop_lag_seconds"


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds, and the CPU time that it has used so far."""

    descriptors: int
    connections: int
    threads: int
    rss_mib: float
    cpu_s: float

    @classmethod
    def of(cls, process: psutil.Process) -> Held:
        """Look at a process."""
        with process.oneshot():
            return cls(
                descriptors=process.num_fds(),
                connections=len(process.net_connections(kind="all")),
                threads=process.num_threads(),
                rss_mib=process.memory_info().rss / MIB,
                cpu_s=used_s(process),
            )


@dataclass(frozen=True, slots=True)
class Counts:
    """What a stack holds. `lasting_keys` are those of Redis that do not expire."""

    processes: dict[str, Held]
    redis_clients: int
    redis_keys: int
    lasting_keys: int
    redis_mib: float
    environments: int

    @classmethod
    def of(cls, processes: Mapping[str, psutil.Process], store: Redis, engine: Engine) -> Counts:
        """Look at a stack whose processes have these names."""
        keys, info = store.info("keyspace").get("db0", {"keys": 0, "expires": 0}), store.info()
        with engine.connect() as connection:
            standing = connection.execute(text("SELECT count(*) FROM environments WHERE ended_at IS NULL")).scalar_one()
        return cls(
            processes={name: Held.of(process) for name, process in processes.items()},
            redis_clients=info["connected_clients"],
            redis_keys=keys["keys"],
            lasting_keys=keys["keys"] - keys["expires"],
            redis_mib=info["used_memory"] / MIB,
            environments=standing,
        )

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return asdict(self)


@dataclass(slots=True)
class Lags:
    """How late the gateway's event loop ran its timers, counted by bounds in seconds, since the last `start`."""

    url: str
    _before: dict[float, float] = field(default_factory=dict)

    async def start(self) -> None:
        """Forget what was before."""
        self._before = await self._read()

    async def p99_s(self) -> float:
        """Return the bound below which 99 % of the timers ran, interpolated as Prometheus does."""
        now = await self._read()
        counts = [(bound, now[bound] - self._before.get(bound, 0.0)) for bound in sorted(now)]
        wanted, lower, below = 0.99 * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / max(count - below, 1e-9)
            lower, below = bound, count
        return lower

    async def _read(self) -> dict[float, float]:
        page = await asyncio.to_thread(lambda: httpx.get(f"{self.url}/metrics", timeout=60).text)
        samples = (sample for family in text_string_to_metric_families(page) if family.name == _LAG for sample in family.samples)
        return {float(sample.labels["le"]): sample.value for sample in samples if sample.name == f"{_LAG}_bucket"}
