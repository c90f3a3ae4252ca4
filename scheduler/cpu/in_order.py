"""Cores for the candidates of the moment: the policy is shown who fits, and says who starts on how many."""

from __future__ import annotations

from itertools import islice

from scheduler.core.state import Node, State, own_memory
from scheduler.cpu.cores import CoreGroup
from scheduler.model import Grant, Waiting
from scheduler.model.queue import merged
from scheduler.quotas.holds import Holds


class Cores:
    """Starts what the policy chooses."""

    def __init__(self, state: State, holds: Holds) -> None:
        self._state = state
        self._holds = holds

    def run(self, group: CoreGroup, node: Node, now: float) -> None:
        """Start what can start on the free cores of a group."""
        state, room, memory = self._state, group.free, node.memory_free
        if not room:
            return
        queues = [group.queue, state.floating_cores] if group is node.cores else [group.queue]
        able = (one for one in merged(queues) if one.action.environment is not None or could_run(one, node, group.capacity))
        candidates: list[Waiting] = []
        behind: list[Waiting] = []
        for waiting in able:
            wanted = state.policy.wanted(waiting, group.capacity)
            if wanted > room:
                behind = [waiting, *islice(able, max(0, state.policy.lookahead - 1))] if state.policy.lookahead else []
                break
            own = own_memory(waiting.action)
            if own > memory:
                memory = 0  # those behind that need none of it go on; only closing environments may ever free it
                continue
            if waiting.action.cost.quotas and self._holds.held(waiting, group, now):
                continue
            candidates.append(waiting)
            room -= wanted
            memory -= own
        if not candidates:
            return
        for choice in state.policy.choose(candidates, behind, group.free, group, now):
            if not self._holds.held(choice.waiting, group, now):
                self._holds.take(choice.waiting, now)
                start_on_cores(state, choice.waiting, group, node, choice.units, now)


def start_on_cores(state: State, waiting: Waiting, group: CoreGroup, node: Node, units: int, now: float) -> None:
    """Start a waiting action, whose quotas are taken, on whole cores."""
    unqueue(state, waiting, group)
    grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, units=units, core_ids=group.take(units))
    group.enter(state.start(waiting, grant, now, waiting.duration_s(units)))


def unqueue(state: State, waiting: Waiting, group: CoreGroup) -> None:
    """Take an action out of the queue that it waits in."""
    if not group.queue.remove(waiting):
        state.floating_cores.remove(waiting)


def could_run(waiting: Waiting, node: Node, cores: int) -> bool:
    """Say whether a node could run an action that is bound to none, were so many cores of it free."""
    action = waiting.action
    return node.offers("cpu", action.requires) and waiting.least <= cores and own_memory(action) <= node.spec.memory_mb
