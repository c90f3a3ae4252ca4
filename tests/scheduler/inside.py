"""What must hold inside the core at any time: its books agree with those of a `Ledger`, and nothing waits beside what is free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from scheduler.core.core import Core
from scheduler.core.environments import STARTS
from scheduler.model.shares import Shares
from scheduler.model.state import Node, own_memory
from tangram.action import CORES, MEMORY_MB

from .ledger import Ledger


def check_inside(core: Core, ledger: Ledger) -> None:
    """Compare the core's own books with the ledger."""
    state = core.state
    running = ledger.running()
    assert set(state.waiting) == {i for i, book in ledger.actions.items() if book.state == "waiting"}
    assert {i: one.grant for i, one in state.running.items()} == {i: book.grant for i, book in running.items()}
    assert state.waiting_by_job == Counter(waiting.action.job for waiting in state.waiting.values())
    assert {e.id: e.node for e in state.environments.values()} == {e.id: e.node for e in ledger.environments.values()}
    jobs = Counter(ledger.actions[i].action.job for i in (*state.waiting, *running))
    check_shares(state.shares, state.limits.weights, jobs, ledger.held_by_job(), {CORES: sum(spec.cores for spec in ledger.nodes.values())})
    memory_mb = sum(spec.memory_mb for spec in ledger.nodes.values() if "cpu" in spec.pools)
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for environment in ledger.environments.values():
        held[environment.job][MEMORY_MB] += max(1, environment.memory_mb) if environment.node is not None else 0
        held[environment.job][STARTS] += environment.state == "opening"
    owners = Counter(environment.job for environment in ledger.environments.values())
    check_shares(core._environments.shares, state.limits.weights, owners, held, {MEMORY_MB: memory_mb})
    for node in state.nodes.values():
        check_node(core, node, ledger)
    for name, quota in core.pools.quotas.accounts.items():
        assert quota.running == sum(book.action.cost.least(f"quota:{name}") for book in running.values())


def check_shares(
    shares: Shares,
    weights: Mapping[str, float],
    active: Counter[str],
    held: Mapping[str, Mapping[str, float]],
    offered: Mapping[str, float],
) -> None:
    """The books of shares agree with ones that are kept anew: jobs are active as long as they have something, and hold what they have."""
    assert {name: shares._offered.get(name, 0) for name in offered} == offered
    anew = Shares(weights)
    for name, amount in shares._offered.items():
        anew.offer(name, amount)
    for job in active.elements():
        anew.enter(job)
    for job, of_job in held.items():
        for name, amount in of_job.items():
            anew.hold(job, name, amount)
    assert set(shares.active()) == set(active)
    for job in active:
        assert (shares.dominant(job), shares.entitlement(job)) == (anew.dominant(job), anew.entitlement(job))


def check_node(core: Core, node: Node, ledger: Ledger) -> None:
    """What nobody holds of a node is free."""
    name = node.spec.name
    assert (node.draining, node.silent) == (name in ledger.draining, name in ledger.silent)
    assert node.memory_free == node.spec.memory_mb - ledger.memory_held(name)
    assert set(node.environments) == {e.id for e in ledger.environments.values() if e.node == name}
    held = {core_id for at, core_id in ledger.check_cores() if at == name}
    assert set(core.pools.cpu.groups[name].free_ids) == {core_id for domain in node.spec.core_domains() for core_id in domain} - held
    check_no_idling(core, node)


def check_no_idling(core: Core, node: Node) -> None:
    """Under `elastic`, the first in the queue of a node waits only where even the extra units of others are too few.

    Who is the first may change by what happens elsewhere: by what jobs hold there, or because another node starts the
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
