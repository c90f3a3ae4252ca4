"""GPU cells under `elastic`: actions of a service share a swap, and get the more cells the fewer actions there are.

*Example.* Two GPUs hold `math` and `code`. A restore takes 0.5 s, and so does an action. An action for `math` starts at once on the
resident instance. A second one waits for this instance, since that takes no longer than a restore. When three more come, they would
wait for long: a second instance of `math` is brought onto the GPU of `code`, which is idle. An action for `code` then waits until a
GPU falls idle. If no GPU does, the action's queue ages, and an instance of `math` makes way.

Waiting actions that are interchangeable form a *service queue* (round.py). A round is held when cells have changed, when such a queue
ages, and when a turn ends. It has four steps:

1. *Start on what is resident.* Actions start in the order of the pool's queue on any instance of their service with a free place. The
   largest instance comes first, then a busy one, then the last used. Two rules keep actions off idle instances, so that these can
   make way. A job beyond its share starts on no idle instance while a job within its share waits for a service that is resident
   nowhere. An overloaded queue starts on no idle instance larger than its best size. Instances that have not made way by the end of
   the round are used after all.
2. *Rank services.* The queues that need an instance are ranked: starving queues first, then jobs within their share (ranking.py).
3. *Choose size and place.* An instance is as large as the backlog allows (sizing.py), or smaller where fewer cells are idle. It
   goes to the node where it can be largest. Among equal nodes, the fewest evictions decide (placement.py).
4. *Choose what to evict.* Idle instances make way, those with least demand first, unless waiting for a busy instance is cheaper
   (eviction.py). For a starving queue, busy instances take no more actions and make way once they are idle (ageing.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.gpu.ageing import Ageing
from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.demand import Demands
from scheduler.gpu.dispatcher import CellDispatcher
from scheduler.gpu.eviction import better_later, candidates
from scheduler.gpu.placement import PlacementPlan
from scheduler.gpu.pool import GpuPool
from scheduler.gpu.ranking import rank, starts_soon
from scheduler.gpu.round import Round, ServiceQueue
from scheduler.gpu.sizing import Backlog, best_size
from scheduler.gpu.tuning import TUNING
from scheduler.model import Waiting


class ElasticCells(CellDispatcher):
    """Starts actions on instances, and decides which instances there are."""

    def __init__(self, pool: GpuPool) -> None:
        super().__init__(pool)
        self._demands = Demands()
        self._ageing = Ageing()
        self._overloaded: dict[tuple[object, ...], int] = {}
        self._wake: float | None = None

    def arrived(self, waiting: Waiting, now: float) -> None:
        """Count an action for the rate of its service."""
        if not waiting.attempt:
            self._demands.arrived(waiting, now)

    def next_round(self) -> float | None:
        """Return when a queue ages, or when a turn ends for which a queue waits."""
        return self._wake

    def node_gone(self) -> None:
        """Wait for nothing if no node has cells any more."""
        if not any(group.capacity for group in self._pool.groups.values()):
            self._wake = None

    def hold_rounds(self, groups: list[CellGroup], now: float) -> None:
        """Hold one round for all changed cells. The starts on one node decide which instances another node gets."""
        if self._ageing.reserves:  # a change on any node may end a reservation
            groups = list(self._pool.groups.values())
        elif not len(self._pool.queue):
            self._overloaded, self._wake = {}, None
            return
        self._round(groups, now)

    def _round(self, groups: list[CellGroup], now: float) -> None:
        round_ = Round(self._pool, self._demands, groups, now)
        kept_idle = self._start_on_resident(round_, self._overloaded)
        self._bring_instances(round_)
        overloaded = {alike: queue.best for alike, queue in round_.queues.items() if queue.waiting and queue.largest == queue.best}
        if self._ageing.release(round_) or kept_idle:
            round_ = Round(self._pool, self._demands, groups, now)
            self._start_on_resident(round_, {})
        self._overloaded = {alike: best for alike, best in overloaded.items() if alike in round_.queues and round_.queues[alike].waiting}
        self._wake = self._ageing.next_round(round_.queues.values(), now)

    def _start_on_resident(self, round_: Round, overloaded: dict[tuple[object, ...], int]) -> bool:
        """Start the actions that have a place, and form service queues of all others. Say whether idle instances were kept from any action.

        `overloaded` gives overloaded queues the largest size of an idle instance on which they may start.
        """
        state, queues, now = self._state, round_.queues, round_.now
        contended, closed = state.shares.contended, False
        # Thousands of actions may wait, and most only join their queue. So this loop does little for each.
        for waiting in state.in_order([self._pool.queue], now):
            queue = queues.get(waiting.alike)
            if queue is None:
                queue = round_.queue_of(waiting)
                queue.largest = overloaded.get(waiting.alike, queue.largest)
            if queue.open and not queue.stuck:
                if contended and state.deprioritised(waiting, now):
                    contended = False
                    if any(self._is_starved_of_cells(each, round_) for each in queues.values()):
                        round_.close_idle()
                        closed = True
                if self._start_one(waiting, queue, now):
                    continue
            queue.waiting.append(waiting)
            if waiting.received_at < queue.since:
                queue.since = waiting.received_at
        self._take_out_started()
        return closed or any(queue.kept_off for queue in queues.values())

    def _is_starved_of_cells(self, queue: ServiceQueue, round_: Round) -> bool:
        """Say whether idle cells are kept for a queue: its service is resident nowhere but could be, and the queue has not aged."""
        if not queue.waiting or self._ageing.aged(queue, round_.now):
            return False
        instances = (instance for group in self._pool.groups.values() if group.node.takes_new for instance in group.instances)
        if any(instance.service == queue.service and instance.size in queue.units for instance in instances):
            return False
        return any(group.plan(queue.spec, queue.units[0], candidates(group, queue, round_)) is not None for group in queue.groups)

    def _start_one(self, waiting: Waiting, queue: ServiceQueue, now: float) -> bool:
        """Start an action on the best of the open instances of its service."""
        fitting = [
            (instance, group)
            for instance, group in queue.open
            if instance.size in queue.units
            and group in queue.groups
            and group.node.memory_free >= queue.memory_mb
            and not group.blocked(instance)
        ]
        allowed = [resident for resident in fitting if resident[0].active or resident[0].size <= queue.largest]
        if not allowed:
            queue.stuck, queue.kept_off = True, bool(fitting)
            return False
        best = max(allowed, key=lambda each: (each[0].size, bool(each[0].active), each[0].last_used))
        instance, group = best
        if self._pool.quotas.keeps_back(waiting, group, now):
            return False
        self._start(waiting, group, instance, now)
        if not instance.takes:
            queue.open.remove(best)
        return True

    def _bring_instances(self, round_: Round) -> None:
        """Bring instances for the queues that need them, and reserve nodes for the starving queues that found no room."""
        self._ageing.begin()
        backlog: Backlog | None = None
        for queue in rank(round_, self._ageing):
            queue.groups = [group for group in queue.groups if self._ageing.may_use(group, queue)]
            soon, aged = starts_soon(queue, round_), self._ageing.aged(queue, round_.now)
            if not aged and len(queue.waiting) <= soon:
                continue
            backlog = backlog or self._backlog(round_)
            self._size(queue, backlog, overloaded=len(queue.waiting) > TUNING.overload * max(1, soon))
            while (chosen := self._choose_placement(queue, round_)) is not None and self._bring_for(queue, *chosen, round_):
                if not queue.waiting or not (aged or len(queue.waiting) > starts_soon(queue, round_)):
                    break
            if queue.waiting and queue.groups and self._ageing.starving(queue, round_) and not self._held(queue, queue.groups[0], round_):
                self._ageing.reserve(queue, round_)
        self._take_out_started()

    def _held(self, queue: ServiceQueue, group: CellGroup, round_: Round) -> bool:
        """Say whether a quota keeps back the action that is next."""
        return self._pool.quotas.keeps_back(queue.first, group, round_.now)

    def _backlog(self, round_: Round) -> Backlog:
        """Count running and waiting actions, and the actions that should come within `ahead_durations` of their durations."""
        backlog = Backlog(self._pool.groups.values())
        for queue in round_.queues.values():
            if queue.waiting:
                backlog.spread(len(queue.waiting), queue.able)
        for service, load in self._demands.loads(round_.now).items():
            nodes = [group for group in self._pool.groups.values() if group.node.heard and group.node.takes_new]
            able = [group for group in nodes if group.node.serves(service)]
            backlog.spread(TUNING.ahead_durations * load, able)
        return backlog

    def _size(self, queue: ServiceQueue, backlog: Backlog, *, overloaded: bool) -> None:
        """Choose the best size for a queue. If the queue is overloaded, its larger instances make way."""
        per_cell = backlog.per_cell(queue.able) / queue.spec.max_concurrency
        restore_s = TUNING.restored_share * queue.spec.restore_s
        queue.best = best_size(queue.units, queue.first.durations_s, restore_s, per_cell)
        queue.largest = queue.best if overloaded else math.inf

    def _choose_placement(self, queue: ServiceQueue, round_: Round) -> tuple[CellGroup, PlacementPlan] | None:
        """Return where the largest instance up to the best size can go now, with the fewest evictions."""
        plans = []
        for group in queue.groups:
            if group.node.memory_free < queue.memory_mb or group.idle < queue.units[0]:
                continue
            could_go = candidates(group, queue, round_)
            plan = self._largest_plan(group, queue, [instance for instance in could_go if not instance.busy])
            if plan is not None and (self._ageing.aged(queue, round_.now) or not better_later(plan, could_go, queue, round_)):
                plans.append((group, plan))
        return max(plans, key=lambda each: (len(each[1].cell_ids), -len(each[1].evicted)), default=None)

    @staticmethod
    def _largest_plan(group: CellGroup, queue: ServiceQueue, idle: Sequence[Instance]) -> PlacementPlan | None:
        sizes = (size for size in reversed(queue.units) if size <= min(queue.best, group.idle))
        return next((plan for size in sizes if (plan := group.plan(queue.spec, size, idle)) is not None), None)

    def _bring_for(self, queue: ServiceQueue, group: CellGroup, plan: PlacementPlan, round_: Round) -> bool:
        """Bring an instance, and start an action of the queue on each of its places.

        Return False if a quota keeps the first action back.
        """
        if self._held(queue, group, round_):
            return False
        instance = self._bring(queue.waiting.pop(0), group, plan, round_.now)
        self._ageing.note_brought(queue, round_.now)
        while queue.waiting and instance.takes and group.node.memory_free >= queue.memory_mb and not self._held(queue, group, round_):
            self._start(queue.waiting.pop(0), group, instance, round_.now)
        round_.refresh()
        return True
