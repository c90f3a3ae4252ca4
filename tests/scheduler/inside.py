"""What must hold inside the core at any time: its indexes agree with the books of a `Ledger`, and with each other."""

from __future__ import annotations

from collections import Counter

from scheduler.core.core import Core
from scheduler.core.environments import STARTS
from scheduler.core.open_queue import OpenQueue
from scheduler.cpu.cores import CoreGroup
from scheduler.model.queue import WaitQueue
from scheduler.model.state import Node, State, own_memory
from tangram.action import CORES, MEMORY_MB

from .ledger import Ledger


def check_inside(core: Core, ledger: Ledger) -> None:
    """Compare the core's own indexes with the ledger and with each other."""
    state = core.state
    assert set(state.draining) == ledger.draining
    assert set(state.waiting) == {i for i, book in ledger.actions.items() if book.state == "waiting"}
    assert set(state.running) == set(ledger.running())
    assert all(state.running[i].grant == book.grant for i, book in ledger.running().items())
    assert state.waiting_by_job == Counter(waiting.action.job for waiting in state.waiting.values())
    assert not core.pools.changed
    assert set(state.environments) == set(ledger.environments)
    assert core._environments.opening == sum(e.state == "opening" for e in state.environments.values())
    check_places(core)
    check_shares(state, ledger)
    check_shares_of_environments(core, ledger)
    for node in state.nodes.values():
        check_node(core, node, ledger)
    for name, quota in core.pools.quotas.accounts.items():
        assert quota.running == sum(r.waiting.action.cost.least(f"quota:{name}") for r in state.running.values())


def check_places(core: Core) -> None:
    """Every waiting action waits in exactly one place, as does one in the background; what is parked belongs to its environment."""
    state, pools, opens = core.state, core.pools, core._environments.opens
    groups = [*pools.cpu.groups.values(), *pools.cpu.pods.values()]
    queues: list[WaitQueue | OpenQueue] = [pools.gpu.queue, pools.cpu.floating, opens, pools.cpu.unplaced]
    queues += [group.queue for group in groups] + [quota.queue for quota in pools.quotas.accounts.values()]
    places = [waiting.id for queue in (*queues, core.breaker) for waiting in queue]
    assert all(len(queue) == sum(len(jobs.items) for jobs in queue.by_job.values()) for queue in queues if isinstance(queue, WaitQueue))
    assert len(opens) == len(list(opens))
    for environment in state.environments.values():
        places += [waiting.id for waiting in environment.parked]
        assert {waiting.id for waiting in environment.parked} <= set(environment.actions)
        assert set(environment.actions) <= set(state.waiting) | set(state.running)
        assert set(environment.sessions.values()) <= set(environment.actions)
        assert (environment.node is None) == (environment.state == "waiting")
        assert environment.node is None or environment.id in state.nodes[environment.node].environments
    in_background = [action_id for group in groups for action_id in group.background]
    assert sorted(places) == sorted([*state.waiting, *in_background])


def check_shares(state: State, ledger: Ledger) -> None:
    """Jobs are active as long as they have actions, and hold what these were granted; an idle job holds nothing."""
    shares = state.shares
    actions = Counter(waiting.action.job for waiting in state.waiting.values())
    actions.update(running.waiting.action.job for running in state.running.values())
    assert shares._actions == actions
    assert shares._active_weight == sum(state.limits.weights.get(job, 1.0) for job in actions)
    assert shares._offered.get(CORES, 0) == sum(spec.cores for spec in ledger.nodes.values())
    held = ledger.held_by_job()
    assert set(shares._held) <= set(actions)
    for job in actions:
        assert {name: amount for name, amount in shares._held.get(job, {}).items() if amount} == held.get(job, {})
        parts = [amount / shares._offered[name] for name, amount in held.get(job, {}).items() if shares._offered.get(name)]
        assert shares.dominant(job) == max(parts, default=0.0)


def check_shares_of_environments(core: Core, ledger: Ledger) -> None:
    """Jobs are active as long as they have environments, and hold the memory of those that have a node."""
    shares, environments = core._environments.shares, ledger.environments.values()
    assert shares._actions == Counter(environment.job for environment in environments)
    assert shares._offered.get(MEMORY_MB, 0) == sum(spec.memory_mb for spec in ledger.nodes.values() if "cpu" in spec.pools)
    memory_mb: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for environment in environments:
        memory_mb[environment.job] += max(1, environment.memory_mb) if environment.node is not None else 0
        starts[environment.job] += environment.state == "opening"
    for job in shares._actions:
        held = shares._held.get(job, {})
        assert (held.get(MEMORY_MB, 0), held.get(STARTS, 0)) == (memory_mb[job], starts[job])


def check_node(core: Core, node: Node, ledger: Ledger) -> None:
    """Each core and each cell of a node is in one place, and its memory is what nobody holds."""
    state, cpu, name = core.state, core.pools.cpu, node.spec.name
    assert (node.draining, node.silent) == (name in ledger.draining, name in ledger.silent)
    assert set(node.running) == {i for i, book in ledger.running().items() if book.grant.node == name}
    assert node.memory_free == node.spec.memory_mb - ledger.memory_held(name)
    assert set(node.environments) == {e.id for e in state.environments.values() if e.node == name}
    groups = [cpu.groups[name], *(cpu.pods[e] for e in node.environments if e in cpu.pods)]
    cores = [core for domain in node.spec.core_domains() for core in domain]
    assert sorted(core for group in groups for core in check_cores(group)) == sorted(cores)
    group = core.pools.gpu.groups[name]
    for cell in range(node.spec.cells):
        assert group.on(cell) == [instance for instance in group.instances if cell in instance.cell_ids]
    assert set(group.running) == {i for instance in group.instances for i in instance.active}
    check_no_idling(core, node)


def check_cores(group: CoreGroup) -> list[int]:
    """Each core of a group is free or held by one grant; return all of them."""
    running = group.running
    assert group.free_ids == sorted(set(group.free_ids))
    assert group.free == len(group.free_ids)
    held = [core for one in running.values() for core in one.grant.core_ids]
    assert group.capacity == group.free + len(held)
    return [*group.free_ids, *held]


def check_no_idling(core: Core, node: Node) -> None:
    """Under `elastic`, the first in the queue of a node waits only where even the extra units of others are too few.

    Who is the first may version by what happens elsewhere: by what jobs hold there, or because another node starts the
    first. A node that is busy is then looked at when next something happens on it, so only idle ones are checked. Nothing is
    said of where somebody waits for its turn, for whom cores are kept.
    """
    state, rules, group = core.state, core.policy.rules, core.pools.cpu.groups[node.spec.name]
    elsewhere = len(state.nodes) > 1 or (state.shares.contended and rules.shares)
    if core.policy.name != "elastic" or (elsewhere and group.running):
        return
    for waiting in state.in_order([group.queue, core.pools.cpu.floating], 0.0):
        action = waiting.action
        if waiting.id in group.background and group.background[waiting.id].stopping:
            continue
        if action.environment is None and not (node.takes("cpu", action.requires) and waiting.least <= group.capacity):
            continue
        if own_memory(action) or action.cost.quotas:
            return
        extra = sum(c.units - c.waiting.least for c in group.candidates.values() if c.running is not None and not c.running.stopping)
        assert group.free + (extra if core.pools.cpu._dispatcher._shrinks else 0) < waiting.least, f"{waiting.id} waits beside free cores"
        return
