"""Ageing: how a service queue gets an instance in time, though other queues are preferred.

The other rules prefer actions whose service is resident, queues with more waiting actions, and jobs within their share. Such
preferred work could arrive without end. So the preference ends once a queue is old enough:

1. *Age.* A queue has *aged* once its first action has waited for `Tuning.aged_s`. An aged queue needs an instance however soon a
   place should fall free, and does not wait for a cheaper eviction.
2. *Starving.* An aged queue is starving while it is shut out: no instance that it could use is resident, or each is idle while
   others compute on its cells. Starving queues are served before all others, longest wait first. The wait counts from the arrival of
   the first action, or from the time when the queue was last brought an instance, whichever is later.
3. *Reservation.* A starving queue that finds no room reserves a node. It chooses the node on which the turns of the instances in its
   way end first. A busy instance has had its turn `Tuning.turn_s` after it was brought; an idle one is not protected. Nothing else
   is brought onto a reserved node. When all turns have ended, the instances in the way take no more actions, and are evicted once
   idle. The queue may have an instance on the node, and wait only for the cells. Then the other instances on these cells are not
   evicted. They take no actions until the queue has started.
4. *Release.* Reservations are made anew in each round. An instance takes actions again when no reservation needs it to go.

*Bound.* Let no action hold cells for longer than L seconds, its restore included. Let p be the number of starving queues up to and
including an action's own. If its service is resident nowhere, the action waits at most `aged_s` + p · (`turn_s` + L) seconds.

*Proof.* The queue is starving after at most `aged_s`, since a round is held when it ages. Consider the first of the starving queues.
Nothing is brought onto the node that this queue reserves, so all turns on the node end within `turn_s`. Then the instances in the
way take no more actions, and are idle within L. Now the queue is brought an instance. From then on it comes after all queues that
are starving by then. So each of the p queues takes at most `turn_s` + L. ∎

The bound does not hold while a quota, the memory of the node, `instances_per_node` or a pinned instance keeps the queue back. Where its
service is resident, an action waits as in any queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.eviction import candidates
from scheduler.gpu.round import Round, ServiceQueue
from scheduler.gpu.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Reservation:
    """The service for which a node is reserved, the instances in its way, and the time at which the last turn of them ends."""

    service: str
    evicted: list[Instance]
    ready_at: float


class Ageing:
    """Says which queues have aged and which are starving, and keeps the reservations of one round."""

    def __init__(self) -> None:
        self._brought: dict[tuple[str, tuple[int, ...]], float] = {}
        self._reserved: dict[CellGroup, Reservation] = {}

    @property
    def reserves(self) -> bool:
        """Whether the last round made any reservation."""
        return bool(self._reserved)

    def precedence(self, queue: ServiceQueue) -> tuple[float, float]:
        """Return where a starving queue stands among the others: smaller goes first."""
        brought = self._brought.get((queue.service, queue.units), -math.inf)
        return max(queue.since, brought), brought

    def aged(self, queue: ServiceQueue, now: float) -> bool:
        """Say whether a queue has waited for long."""
        return queue.since + TUNING.aged_s <= now

    def starving(self, queue: ServiceQueue, round_: Round) -> bool:
        """Say whether a queue has aged and is shut out."""
        return self.aged(queue, round_.now) and round_.shut_out(queue)

    def note_brought(self, queue: ServiceQueue, now: float) -> None:
        """Take note that a queue has been brought an instance."""
        self._brought[queue.service, queue.units] = now

    def begin(self) -> None:
        """Forget the reservations of the last round."""
        self._reserved = {}

    def may_use(self, group: CellGroup, queue: ServiceQueue) -> bool:
        """Say whether a node is reserved for no other service than the queue's."""
        return group not in self._reserved or self._reserved[group].service == queue.service

    def reserve(self, queue: ServiceQueue, round_: Round) -> None:
        """Reserve the node where a starving queue will have room soonest.

        A node on which instances already make way for the queue comes first.
        """
        found: list[tuple[bool, float, CellGroup, Reservation]] = []
        for group in queue.groups:
            evicted = _in_the_way(group, queue, round_) if group.node.memory_free >= queue.memory_mb else None
            if evicted is not None:
                ready_at = max((one.since + TUNING.turn_s for one in evicted if one.busy), default=round_.now)
                elsewhere = all(one.evicting_for != queue.service for one in group.instances)
                found.append((elsewhere, ready_at, group, Reservation(queue.service, evicted, ready_at)))
        if not found:
            return
        _, ready_at, group, reservation = min(found, key=lambda each: each[:2])
        if group in self._reserved:  # for another queue of the service
            reservation.evicted.extend(self._reserved[group].evicted)
        self._reserved[group] = reservation
        if ready_at <= round_.now:
            for instance in reservation.evicted:
                instance.evicting_for = queue.service
            round_.refresh()

    def release(self, round_: Round) -> bool:
        """Let instances take actions again if no reservation needs them to go. Say whether there were any."""
        needed = {id(instance) for reservation in self._reserved.values() for instance in reservation.evicted}
        released = [
            instance
            for group in round_.groups
            for instance in group.instances
            if instance.evicting_for is not None and id(instance) not in needed
        ]
        for instance in released:
            instance.evicting_for = None
        return bool(released)

    def next_round(self, queues: Iterable[ServiceQueue], now: float) -> float | None:
        """Return when time alone changes something: a queue has aged, or the turns on a reserved node have ended."""
        times = [queue.since + TUNING.aged_s for queue in queues if queue.waiting]
        times += [reservation.ready_at for reservation in self._reserved.values()]
        return min((at for at in times if at > now), default=None)


def _in_the_way(group: CellGroup, queue: ServiceQueue, round_: Round) -> list[Instance] | None:
    """Return the instances that must be idle for a queue to have room on a node; None if the node cannot have room."""
    for instance in group.instances:
        if instance.service == queue.service and instance.size in queue.units and instance.evicting_for is None:
            return group.others_on(instance)
    plan = group.plan(queue.spec, queue.units[0], candidates(group, queue, round_))
    return None if plan is None else list(plan.evicted)
