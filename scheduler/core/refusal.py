"""Why an action is refused at once instead of being queued: it could never run, or its job has too many waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.core.state import Node, State, memory_of, wants_cells, wants_cores
from scheduler.model import Environment, ServiceSpec
from tangram.action import CELLS, CORES, Action


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a refused action ends, and why; `environment_lost_on` is the node on which its environment was lost."""

    reason: str
    status: Literal["rejected", "failed", "lost"] = "rejected"
    environment_lost_on: str = ""


def refusal(state: State, action: Action, now: float) -> Refusal | None:
    """Return why `action`, already counted as waiting, is refused at time `now`; None where it is not.

    Where no node of the right pool is up there is nothing to compare with, and the action waits.
    """
    if state.waiting_by_job[action.job] > state.limits.queue_limit and action.kind != "cpu.close":
        return Refusal(f"job {action.job} has {state.limits.queue_limit} actions waiting already")
    for name in action.cost.quotas:
        if name not in state.quotas:
            return Refusal(f"quota {name!r} is not declared")
    for account, requests, tokens in state.draws(action):
        most_requests, most_tokens = account.spec.concurrency, account.spec.tokens_per_min
        if most_requests is not None and requests > most_requests:
            return Refusal(f"needs {requests} requests at once, quota {account.account!r} allows {most_requests}")
        rate = account.spec.rate_per_s
        if rate is not None and requests > max(60.0 * rate, account.spec.burst or 1):
            return Refusal(f"needs {requests} requests, quota {account.account!r} allows {60.0 * rate:g} a minute")
        if most_tokens is not None and tokens > most_tokens:
            return Refusal(f"needs {tokens} tokens, quota {account.account!r} allows {most_tokens:g} a minute")
    if action.environment is not None:
        return _environment_refusal(state, action, now)
    if wants_cells(action):
        return _cells_refusal(state, action)
    return _node_refusal(state, action, "api" if action.cost.quotas and not wants_cores(action) else "cpu")


def _environment_refusal(state: State, action: Action, now: float) -> Refusal | None:
    environment = state.environments.get(action.environment or "")
    if action.kind == "cpu.open":
        if environment is not None:
            return Refusal(f"environment {action.environment} is open already")
        return _node_refusal(state, action, "cpu", extra_cores=state.policy.pod_cores())
    if environment is None:
        return _gone_refusal(state, action.environment or "", now)
    if environment.lost:
        return Refusal(f"environment {environment.id} is lost: {environment.over}", "lost", environment.node or "")
    if environment.state == "closing":
        return Refusal(f"environment {environment.id} is being closed: {environment.close_requested}", "failed")
    return cores_refusal(state, environment, action)


def _gone_refusal(state: State, environment_id: str, now: float) -> Refusal:
    """Return how an environment ended that is no longer there, as far as that is known."""
    gone = state.gone.get(environment_id)
    if gone is None:
        return Refusal(f"environment {environment_id} is unknown: it was never opened, or ended long ago", "failed")
    if gone.state == "lost":
        return Refusal(f"environment {environment_id} is lost: {gone.reason}", "lost", gone.node)
    return Refusal(f"environment {environment_id} was closed {max(0.0, now - gone.at):.0f} s ago: {gone.reason}", "failed")


def cores_refusal(state: State, environment: Environment, action: Action) -> Refusal | None:
    """Return why an action can never run in its environment; None where it can, or where that is not known yet."""
    if environment.node is None:
        return None
    capacity = state.core_group(environment).capacity
    if action.cost.least(CORES) > capacity:
        return Refusal(f"needs {action.cost.least(CORES)} cores, its environment can have {capacity}")
    return None


def _node_refusal(state: State, action: Action, pool: str, extra_cores: int = 0) -> Refusal | None:
    nodes = [node for node in state.nodes.values() if pool in node.spec.pools]
    if not nodes:
        return None
    able = [node for node in nodes if node.offers(pool, action.requires)]
    if not able:
        return Refusal(f"no node has the labels {', '.join(action.requires)}")
    cores = max(action.cost.least(CORES), extra_cores)
    if cores > max(node.spec.cores for node in able):
        return Refusal(f"needs {cores} cores, the largest node has {max(node.spec.cores for node in able)}")
    memory_mb = memory_of(action)
    if memory_mb > max(node.spec.memory_mb for node in able):
        return Refusal(f"needs {memory_mb} MB, the largest node has {max(node.spec.memory_mb for node in able)} MB")
    return None


def _cells_refusal(state: State, action: Action) -> Refusal | None:
    if wants_cores(action):
        return Refusal("asks for cores and for GPU cells; one action is granted only one of them")
    service = state.services.get(action.service or "")
    if service is None:
        return Refusal(f"service {action.service!r} is not declared")
    asked = action.cost.amounts.get(CELLS, service.cells)
    able = [amount for amount in asked if service.sizes is None or amount in service.sizes]
    if not able:
        return Refusal(f"service {service.name} runs on {_listed(service.sizes or ())} cells, not on {_listed(asked)}")
    there = [node for node in state.nodes.values() if "gpu" in node.spec.pools]
    if not there:
        return None
    nodes = [node for node in there if node.offers("gpu", action.requires)]
    if not nodes:
        return Refusal(f"no node with GPUs has the labels {', '.join(action.requires)}")
    serving = [node for node in nodes if node.serves(service.name)]
    if not serving:
        return Refusal(f"no node that is up declares service {service.name!r}")
    return _room_refusal(state, serving, service, min(able), memory_of(action))


def _room_refusal(state: State, nodes: Sequence[Node], service: ServiceSpec, cells: int, own_mb: int) -> Refusal | None:
    """Return why none of the nodes can ever hold an instance on so many cells, and run an action with `own_mb` of memory beside it."""
    most = max(node.cells.capacity for node in nodes)
    if cells > most:
        return Refusal(f"needs {cells} cells, the largest node has {most}")
    memory_mb = max(node.cells.cell_memory_mb for node in nodes if node.cells.capacity)
    if service.memory_mb > memory_mb:
        return Refusal(f"service {service.name} needs {service.memory_mb} MB per cell, a cell has {memory_mb} MB")
    most_mb = max(node.spec.memory_mb for node in nodes)
    if own_mb > most_mb:
        return Refusal(f"needs {own_mb} MB, the largest node has {most_mb} MB")
    if not any(
        node.cells.capacity >= cells and node.cells.cell_memory_mb >= service.memory_mb and node.spec.memory_mb >= own_mb for node in nodes
    ):
        return Refusal(f"no node has {cells} cells of {service.memory_mb} MB for service {service.name}, and {own_mb} MB beside them")
    share = sum(node.cells.capacity for node in state.nodes.values()) // max(1, len(state.services))
    if state.policy.pod_cores() and cells > share:
        return Refusal(f"needs {cells} cells, equal parts of all cells are {share} for each of {len(state.services)} services")
    return None


def _listed(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)
