"""The table of `bench.gateway`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_HEADS = {"client": -9, "load": -7, "calls": 7, "p50": 9, "p99": 9, "native p50": 12, "native p99": 12, "added": 8, "calls/s": 9}
_HEADS |= {"native/s": 10, "CPU": 8}
"""Columns and their widths; those below 0 begin at the left."""


def text(document: Mapping[str, Any]) -> str:
    """Return it for a person."""
    return "\n".join(_lines(document))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    targets = found["targets"]
    loads = ", ".join(f"{one:.1f}" for one in found["machine_load"])
    yield f"{found['environments']} environments of each client; {found['cores']} cores, load average {loads}; milliseconds"
    yield "".join(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in _HEADS.items())
    for row in found["compared"]:
        cells = f"{row['client']:9}{row['load']:7}{row['calls']:7}{row['p50_ms']:9.1f}{row['p99_ms']:9.1f}"
        cells += f"{row['native_p50_ms']:12.1f}{row['native_p99_ms']:12.1f}{row['added_ms']:8.1f}"
        cells += f"{row['per_s']:9.0f}{row['native_per_s']:10.0f}{row['gateway_cpu_ms']:8.2f}"
        yield cells
    yield f"added, `paced` ({found['rate_per_s']:g} calls/s): at most {targets['added_ms']:g} wanted"
    yield f"event-loop lag, p99: {found['loop_lag_p99_ms']:.1f}, below {targets['loop_lag_p99_ms']:g} wanted"
    creates = ", ".join(f"{name} {rate:.0f}" for name, rate in found["creates_per_s"].items())
    yield f"environments opened per second, all at once: {creates}"
    if found["reference"] is not None:
        own = found["reference"]
        yield f"SWE-ReX's own server: {own['p50_ms']:.0f} an empty command, {own['sessions_per_s']:.1f} sessions per second"
    yield from _counted(found["counts"])


def _counted(counts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    moments = list(counts)
    yield f"{'held':24}" + "".join(f"{moment:>12}" for moment in moments)
    for name in counts[moments[0]]["processes"]:
        for what, digits in (("descriptors", 0), ("connections", 0), ("threads", 0), ("rss_mib", 1)):
            values = [counts[moment]["processes"][name][what] for moment in moments]
            yield f"{f'{name} {what}':24}" + "".join(f"{value:12.{digits}f}" for value in values)
    for what in ("environments", "redis_clients", "redis_keys", "lasting_keys", "redis_mib"):
        yield f"{what:24}" + "".join(f"{counts[moment][what]:12.{1 if what == 'redis_mib' else 0}f}" for moment in moments)
