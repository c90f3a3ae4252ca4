"""Faults of hosts, services and lines: one by one, and schedules of several that a seed draws."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from tangram import TangramError
from tangram.errors import ActionLost, EnvironmentLost
from tests.hosts.deployment import NODES, Deployment
from tests.hosts.link import Weather

CUT, UNHEARD, DEAF = Weather(inward=False, outward=False), Weather(inward=False), Weather(outward=False)


@dataclass(frozen=True)
class Fault:
    """`begin` and `end` change a deployment; between them `lasts_s` pass."""

    name: str
    lasts_s: float
    begin: Callable[[Deployment], object]
    end: Callable[[Deployment], object] = lambda _deployment: None
    may_lose: tuple[type[TangramError], ...] = ()
    """What commands of the first node may end with."""
    may_lose_results: bool = False
    """Whether a stored result may be lost before the trainer has read it. The trainer is told so."""


def _weather(name: str, lasts_s: float, weather: Weather, *hosts: str, may_lose: tuple[type[TangramError], ...] = ()) -> Fault:
    """Let the lines of some hosts, or of all, be no better than this for a while, whatever else is wrong with them."""

    def begin(deployment: Deployment) -> None:
        for host in hosts or deployment.network.hosts:
            deployment.network.worsen(host, weather)

    def end(deployment: Deployment) -> None:
        for host in hosts or deployment.network.hosts:
            deployment.network.better(host, weather)

    return Fault(f"{name}, {lasts_s:g} s", lasts_s, begin, end, may_lose)


def _cut(host: str, lasts_s: float, weather: Weather = CUT, what: str = "cut off", *may_lose: type[TangramError]) -> Fault:
    return _weather(f"{host} {what}", lasts_s, weather, host, may_lose=may_lose)


def _slow(delay_s: float, loss: float, lasts_s: float) -> Fault:
    lossy = f" and {loss:.0%} loss" if loss else ""
    weather = Weather(delay_s=delay_s / 2, loss=loss)
    return _weather(f"{delay_s * 1000:g} ms{lossy} everywhere", lasts_s, weather)


def _frozen(service: str, lasts_s: float) -> Fault:
    name = f"{service} frozen, {lasts_s:g} s"
    return Fault(name, lasts_s, lambda on: on.services[service].freeze(), lambda on: on.services[service].thaw())


def _ended(service: str, sent: signal.Signals, *may_lose: type[TangramError]) -> Fault:
    return Fault(f"{service} {sent.name}", 3.0, lambda on: on.services[service].end(sent), may_lose=may_lose)


def _away(service: str, lasts_s: float) -> Fault:
    name = f"{service} away, {lasts_s:g} s"
    return Fault(name, lasts_s, lambda on: on.services[service].take_away(), lambda on: on.services[service].bring_back())


def _redis(what: str, begin: Sequence[str], end: Sequence[str], lasts_s: float) -> Fault:
    return Fault(f"redis {what}, {lasts_s:g} s", lasts_s, lambda on: on.tell_redis(begin), lambda on: on.tell_redis(end))


_flushed = partial(_redis, "FLUSHALL", ["FLUSHALL"], ["PING"], 1.0)
_full = partial(_redis, "full", ["CONFIG", "SET", "maxmemory", "1"], ["CONFIG", "SET", "maxmemory", "0"])
_read_only = partial(_redis, "read-only", ["REPLICAOF", "127.0.0.1", "1"], ["REPLICAOF", "NO", "ONE"])

FAULTS = (
    *(_cut(NODES[0], lasts_s) for lasts_s in (10.0, 20.0, 50.0)),
    _cut(NODES[0], 20.0, UNHEARD, "unheard"),
    _cut(NODES[0], 20.0, DEAF, "deaf"),
    _cut(NODES[0], 70.0, CUT, "cut off", EnvironmentLost),
    _frozen(NODES[0], 30.0),
    _ended(NODES[0], signal.SIGTERM),
    # What the worker has claimed and not yet told a shell is lost with it.
    _ended(NODES[0], signal.SIGKILL, ActionLost),
    _cut("trainer", 30.0),
    _frozen("redis", 8.0),
    _away("redis", 30.0),
    _flushed(),
    _full(0.5),
    _read_only(3.0),
    _away("postgres", 10.0),
    _ended("scheduler-1", signal.SIGKILL),
    _frozen("scheduler-1", 30.0),
    _slow(0.05, 0.0, 30.0),
    _slow(0.05, 0.02, 60.0),
)

_KINDS: dict[str, list[Fault | Callable[[float], Fault]]] = {
    **{
        f"line of {host}": [
            partial(_cut, host),
            partial(_cut, host, weather=UNHEARD, what="unheard"),
            partial(_cut, host, weather=DEAF, what="deaf"),
        ]
        for host in (*NODES, "trainer")
    },
    **{node: [partial(_frozen, node), _ended(node, signal.SIGTERM), _ended(node, signal.SIGKILL, ActionLost)] for node in NODES},
    **{name: [partial(_frozen, name), _ended(name, signal.SIGKILL)] for name in ("scheduler-1", "scheduler-2")},
    # Another fault may keep the trainer from reading a result until Redis has lost it.
    "redis": [_frozen("redis", 8.0), partial(_away, "redis"), replace(_flushed(), may_lose_results=True), _full(0.5), _read_only(3.0)],
    "postgres": [partial(_frozen, "postgres"), partial(_away, "postgres")],
    "all lines": [partial(_slow, 0.02, 0.0), partial(_slow, 0.1, 0.0), partial(_slow, 0.05, 0.02)],
}
"""What can happen to each thing; at most one of it does in a schedule."""

FAULTS_OF_ONE, BEGINS_WITHIN_S, LONGEST_S = (2, 5), 15.0, 20.0
"""How many faults a schedule has, when each begins, and how long it lasts. All are over before a silent node is lost."""


def schedule(seed: int) -> Fault:
    """Return the faults of a seed as one fault. They overlap. It lasts until all of them have ended."""
    draw = Random(seed)
    drawn: list[tuple[float, Fault]] = []
    for name in draw.sample(list(_KINDS), draw.randint(*FAULTS_OF_ONE)):
        begins_s, lasts_s, kind = draw.uniform(0.0, BEGINS_WITHIN_S), round(draw.uniform(1.0, LONGEST_S), 1), draw.choice(_KINDS[name])
        drawn.append((round(begins_s, 1), kind if isinstance(kind, Fault) else kind(lasts_s)))
    drawn.sort(key=lambda event: event[0])
    threads, going = ThreadPoolExecutor(len(drawn)), list[Future[None]]()

    def happen(begins_s: float, fault: Fault, deployment: Deployment) -> None:
        time.sleep(begins_s)
        try:
            fault.begin(deployment)
            time.sleep(fault.lasts_s)
        finally:
            fault.end(deployment)

    def begin(deployment: Deployment) -> None:
        going.extend(threads.submit(happen, begins_s, fault, deployment) for begins_s, fault in drawn)

    def end(_: Deployment) -> None:
        threads.shutdown()
        for each in going:
            each.result()

    name = "; ".join(f"at {begins_s:g} s {fault.name}" for begins_s, fault in drawn)
    lasts_s = max(begins_s + fault.lasts_s for begins_s, fault in drawn)
    may_lose = tuple({error for _, fault in drawn for error in fault.may_lose})
    return Fault(f"seed {seed}: {name}", lasts_s, begin, end, may_lose, any(fault.may_lose_results for _, fault in drawn))
