"""What must hold inside the core at any time: its indexes agree with the books of a `Ledger`, and with each other."""

from __future__ import annotations

from collections import Counter, defaultdict

from scheduler.core import Core
from scheduler.model import Running
from scheduler.policies.elastic import Elastic
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.ladder import Climber, Ladder
from scheduler.state import Node, State, own_memory
from tangram.action import CORES

from .ledger import Ledger


def check_inside(core: Core, ledger: Ledger) -> None:
    """Compare the core's own indexes with the ledger and with each other."""
    state = core.state
    assert set(state.waiting) == {i for i, book in ledger.actions.items() if book.state == "waiting"}
    assert set(state.running) == set(ledger.running())
    assert all(state.running[i].grant == book.grant for i, book in ledger.running().items())
    assert state.waiting_by_job == Counter(waiting.action.job for waiting in state.waiting.values())
    assert state.dirty == {}
    assert not state.room_returned
    assert set(state.environments) == set(ledger.environments)
    assert core._environments._opening == sum(e.state == "opening" for e in state.environments.values())
    check_places(state)
    check_shares(state, ledger)
    for node in state.nodes.values():
        check_node(state, node, ledger)
    for name, quota in state.quotas.items():
        assert quota.running == sum(r.waiting.action.cost.least(f"quota:{name}") for r in state.running.values())


def check_places(state: State) -> None:
    """Every waiting action waits in exactly one place; what is parked belongs to its environment."""
    groups = [node.cores for node in state.nodes.values()] + list(state.pods.values())
    queues = [state.floating_cells, state.floating_cores, state.opens, state.unplaced]
    queues += [group.queue for group in groups] + [quota.queue for quota in state.quotas.values()]
    places = [waiting.id for queue in queues for waiting in queue]
    assert all(len(queue) == sum(len(line.items) for line in queue.lines.values()) for queue in queues)
    for environment in state.environments.values():
        places += [waiting.id for waiting in environment.parked]
        assert {waiting.id for waiting in environment.parked} <= set(environment.actions)
        assert set(environment.actions) <= set(state.waiting) | set(state.running)
        assert set(environment.sessions.values()) <= set(environment.actions)
        assert (environment.node is None) == (environment.state == "waiting")
        assert environment.node is None or environment.id in state.nodes[environment.node].environments
    assert sorted(places) == sorted(state.waiting)


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


def check_node(state: State, node: Node, ledger: Ledger) -> None:
    """Each core and each cell of a node is in one place, and its memory is what nobody holds."""
    name = node.spec.name
    assert set(node.running) == {i for i, book in ledger.running().items() if book.grant.node == name}
    assert node.memory_free == node.spec.memory_mb - ledger.memory_held(name)
    assert set(node.environments) == {e.id for e in state.environments.values() if e.node == name}
    groups = [node.cores, *(state.pods[e] for e in node.environments if e in state.pods)]
    assert sorted(core for group in groups for core in check_cores(group)) == sorted(
        core for domain in node.spec.core_domains() for core in domain
    )
    group = node.cells
    assert [group.on(cell) for cell in range(node.spec.cells)] == [
        [instance for instance in group.instances if cell in instance.cell_ids] for cell in range(node.spec.cells)
    ]
    assert set(node.cells.running) == {i for instance in node.cells.instances for i in instance.active}
    check_no_idling(state, node)


def check_cores(group: CoreGroup) -> list[int]:
    """Each core of a group is free, held whole by one grant, or shared; return all of them."""
    running = group.running
    assert group.free_ids == sorted(set(group.free_ids))
    assert group.free == len(group.free_ids)
    shared: dict[int, float] = defaultdict(float)
    for one in running.values():
        if one.grant.share < 1.0:
            shared[one.grant.core_ids[0]] += one.grant.share
    assert group.room == {core: 1.0 - borne for core, borne in shared.items()}
    assert min(group.room.values(), default=0.0) >= 0.0
    whole = [core for one in running.values() if one.grant.share == 1.0 for core in one.grant.core_ids]
    assert group.capacity == group.free + len(whole) + len(shared)
    assert set(group.sharing) == {i for i, one in running.items() if one.grant.share < 1.0}
    assert set(group.light) == {i for i, one in running.items() if could_share(one)}
    check_ladder(group)
    used: dict[str, float] = defaultdict(float)
    for one in running.values():
        used[one.waiting.action.job] += len(one.grant.core_ids) * one.grant.share
    assert {job: peak.used for job, peak in group.peaks.items() if peak.used} == used
    assert all(max(peak.now, peak.before) >= peak.used for peak in group.peaks.values())
    return [*group.free_ids, *whole, *shared]


def could_share(running: Running) -> bool:
    """Say whether an action holds a core of its own and needs little of it."""
    return running.grant.share == 1.0 and running.waiting.share < 1.0 and not running.hungry and len(running.grant.core_ids) == 1


def check_ladder(group: CoreGroup) -> None:
    """Whoever climbs stands where its grant says, and is to be found by whoever looks for the next rung up or down."""
    assert set(group.climbers) <= set(group.running)
    climbers = [climber for climber in group.climbers.values() if not climber.gone]
    assert all(climber.running is not None and climber.running.stopping for climber in group.climbers.values() if climber.gone)
    extra: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    resting = {id(climber) for _, _, turn, climber in group.ladder._resting if turn == climber.turn}
    for climber in climbers:
        assert climber.running is group.running[climber.waiting.id]
        assert climber.units == climber.running.units
        extra[climber.waiting.action.job] += climber.units - climber.waiting.least
        wanted[climber.waiting.action.job] += 0 if id(climber) in resting else climber.wants
        check_entries(group.ladder, climber)
    assert group.ladder.extra == extra.total()
    assert group.ladder.extra_by_job == +extra
    assert group.ladder.wanted_by_job == +wanted


def check_entries(ladder: Ladder, climber: Climber) -> None:
    """A climber has one entry for its next rung, and one for its last."""
    job = climber.waiting.action.job
    ups = sum(entry[3] is climber and entry[2] == climber.turn for entry in [*ladder._ups.get(job, ()), *ladder._resting])
    downs = sum(entry[3] is climber and entry[2] == climber.turn for entry in ladder._downs.get(job, ()))
    assert ups == (climber.at < len(climber.rungs))
    assert downs == (climber.at > 0)


def check_no_idling(state: State, node: Node) -> None:
    """Under `elastic`, the first in the queue of a node waits only where even the extra units of others are too few.

    Who is the first may change by what happens elsewhere: by what jobs hold there, or because another node starts the
    first. A node that is busy is then looked at when next something happens on it, so only idle ones are checked.
    """
    policy, group = state.policy, node.cores
    elsewhere = len(state.nodes) > 1 or (state.shares.contended and policy.shares)
    kept_back = any(group in groups for groups in state.kept_back.values())
    if not isinstance(policy, Elastic) or kept_back or (elsewhere and group.running):
        return
    for waiting in state.in_order([group.queue, state.floating_cores], 0.0):
        action = waiting.action
        if action.environment is None and not (node.offers("cpu", action.requires) and waiting.least <= group.capacity):
            continue
        if own_memory(action) or action.cost.quotas:
            return
        extra = sum(c.units - c.waiting.least for c in group.climbers.values() if c.running is not None and not c.running.stopping)
        assert group.free + (extra if policy.shrinks else 0) < waiting.least, f"{waiting.id} waits beside free cores"
        return
