"""How `elastic` gives the cores of one node to actions, and takes them back.

A *contender* is an action that wants cores and has none: it waits, or runs in the background. An *occupant* is an action that may
lose its cores. A round is held over a group when the group or an expectation has changed:

1. **Rank by expected work left.** Jobs beyond their share come last. The next criteria are the priority, the expected work left, which
   is the same for all short actions (`scheduler/learning/work_left.py`), and the order of arrival.
2. **Hand cores over.** Each contender in turn gets its least amount. It gets free cores, extra units, or the cores of the occupant
   with most expected work left. The occupant must have 1.2 times the contender's, and goes to the background. An action that has
   contended for 20 s comes first and keeps its cores for 2 s, its *turn*.
3. **Give what is left by marginal gain** (`marginal.py`). Units move from one action to another only if they gain 1.25 times as
   much there. An action grows only if that saves 50 ms.

Contenders that still have no cores then start in the background. A job beyond its share loses units to any other job first
(`fairness.py`). The constants are in `tuning.py`.

A round is worked out first (`round.py`) and then put into commands. Actions lose cores before other actions get them. So no core is
granted twice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice

from scheduler.cpu.cores import CoreGroup
from scheduler.cpu.fairness import Fairness
from scheduler.cpu.marginal import Candidate
from scheduler.cpu.occupants import Occupant
from scheduler.cpu.pool import CpuPool, could_run
from scheduler.cpu.round import Round
from scheduler.cpu.tuning import TUNING
from scheduler.learning.durations import speed_on
from scheduler.model import Grant, Running, Waiting
from scheduler.model.queue import Walk
from scheduler.model.state import own_memory


class ElasticCores:
    """Hands over, grows and shrinks; with `shrinks` False, no action gives extra units back."""

    def __init__(self, pool: CpuPool, *, shrinks: bool = True) -> None:
        self._pool = pool
        self._state = pool.state
        self._ranking = pool.ranking
        self._rules = pool.state.rules
        self._shrinks = shrinks

    def run(self, group: CoreGroup, now: float) -> None:
        """Give out the cores of a group anew. There is nothing to do where no action contends and none may grow."""
        queues = self._pool.queues_of(group)
        contended = any(queues)
        if not contended and not group.marginal.wake(now):
            return
        fairness = Fairness(self._state.shares, counts=self._rules.shares)
        round_ = Round(group, queues, now, self._state.shares, fairness, shrinks=self._shrinks)
        if contended:
            self._refresh(group, now)
            self._rank_again(round_)
            self._hand_over(round_, reserved=self._give_turns(round_))
        if self._rules.resizes or round_.entering:
            self._give_what_is_left(round_)
        self._carry_out(round_)
        if contended:
            self._start_in_background(round_)
            self._wake_later(round_)

    # 1. Rank

    def _refresh(self, group: CoreGroup, now: float) -> None:
        """Update the expected work left of the occupants for which it may have changed."""
        for running in group.occupants.take_due(now):
            self._ranking.note(running, now)
            group.occupants.offer(running, self._ranking.rank(running.waiting), now + self._ranking.changes_in_s(running))

    def _rank_again(self, round_: Round) -> None:
        for queue in round_.queues:
            if round_.now >= queue.rank_again_at:
                queue.rank_again_at = round_.now + TUNING.rank_again_s
                for waiting in [*queue]:
                    self._ranking.renew(waiting, queue)

    # 2. Hand cores over

    def _give_turns(self, round_: Round) -> bool:
        """Give turns; say whether the remaining cores are reserved for an action that needs more of them."""
        group = round_.group
        most_turns = max(1, group.capacity // TUNING.cores_per_turn)
        for waiting in self._starving(round_):
            if group.occupants.turns + len(round_.turns) >= most_turns:
                break
            running = group.running.get(waiting.id)
            if running is not None and not running.grant.background:
                if waiting.id not in round_.preempted:
                    group.occupants.protect(running, running.on_cores_since + TUNING.turn_s)
            elif self._may_start(round_, waiting):
                if round_.shrink_others(waiting.least, _anyone) or round_.preempt(waiting.least, _anyone):
                    self._begin(round_, waiting)
                    round_.turns[waiting.id] = None
                elif self._reserves(round_, waiting):
                    return True
        return False

    def _starving(self, round_: Round) -> Iterator[Waiting]:
        """Walk the actions that have contended for long enough for a turn, the longest first.

        The walk includes actions that have had cores for less than a turn. Such an action only has to keep its cores.
        """
        now, after_s = round_.now, TUNING.turn_after_s
        starving = [queue.starving(now, after_s) for queue in round_.queues if queue]
        recent = [running.waiting for running in round_.group.occupants.recent(now, TUNING.turn_s)]
        starving.append(iter(sorted((one for one in recent if now >= one.contends_since + after_s), key=_contends_since)))
        return heapq.merge(*starving, key=_contends_since)

    def _reserves(self, round_: Round, waiting: Waiting) -> bool:
        """Say whether a group is reserved for an action. An action that can run on any node has one node reserved at a time."""
        if waiting.action.environment is not None:
            return True
        node = self._state.nodes.get(waiting.reserved_on)
        if node is None or not could_run(waiting, node, self._pool.groups[waiting.reserved_on].capacity):
            waiting.reserved_on = round_.node.spec.name
        return waiting.reserved_on == round_.node.spec.name

    def _hand_over(self, round_: Round, *, reserved: bool) -> None:
        """Give each contender in turn its least amount. While cores are `reserved`, only preemptible contenders get any."""
        too_much = dict[str, int]()
        contenders = self._state.in_order(round_.queues, round_.now)
        for waiting in contenders:
            job, least = waiting.action.job, waiting.least
            if (reserved and not waiting.preemptible) or waiting.id in round_.turns or least >= too_much.get(job, least + 1):
                continue
            if not self._may_start(round_, waiting):
                continue
            if self._find_cores(round_, waiting):
                self._begin(round_, waiting)
                continue
            # Later actions of the job may take no more than this one, so only actions that need fewer cores may find any.
            too_much[job] = least
            if least > 1:
                continue
            if not isinstance(contenders, Walk):
                break
            contenders.skip(job)

    def _may_start(self, round_: Round, waiting: Waiting) -> bool:
        group = round_.group
        if waiting.id in group.background:
            return not group.background[waiting.id].stopping
        if len(group.running) + len(round_.entering) >= TUNING.most_started:
            return False
        if waiting.action.environment is None and not could_run(waiting, round_.node, group.capacity):
            return False
        if own_memory(waiting.action) > round_.memory_free:
            return False
        return not (waiting.action.cost.quotas and self._pool.quotas.keeps_back(waiting, group, round_.now))

    def _begin(self, round_: Round, waiting: Waiting) -> None:
        """Give an action its least amount, which is free."""
        round_.enter(Candidate.of(waiting, round_.group.capacity))
        if waiting.id not in round_.group.background:
            self._pool.quotas.take(waiting, round_.now)
            round_.memory_free -= own_memory(waiting.action)

    def _find_cores(self, round_: Round, waiting: Waiting) -> bool:
        """Free a contender's least amount. If it may not have the cores, take nothing and return False."""
        job, least, rank = waiting.action.job, waiting.least, waiting.key[1]
        fair = round_.fairness.may_take

        def may_lose(occupant: Occupant, loss: int) -> bool:
            if not fair(job, least, occupant.job, loss):
                return False
            if waiting.action.priority != occupant.priority:
                return waiting.action.priority > occupant.priority
            return rank * TUNING.better < occupant.rank

        if round_.free >= least or self._take_back(round_, job, least):
            return True
        return round_.shrink_others(least, lambda other, loss: fair(job, least, other, loss)) or round_.preempt(least, may_lose)

    def _take_back(self, round_: Round, job: str, units: int) -> bool:
        """Take units from jobs beyond their share for a job within its share: first extra units, then those of occupants."""
        fairness = round_.fairness
        if not fairness.contended or fairness.deprioritised(job):
            return False

        def may_take(other: str, loss: int) -> bool:
            return fairness.deprioritised(other) and fairness.may_take(job, units, other, loss)

        return round_.shrink_others(units, may_take) or round_.preempt(units, lambda occupant, loss: may_take(occupant.job, loss))

    # 3. Give what is left by marginal gain

    def _give_what_is_left(self, round_: Round) -> None:
        marginal = round_.group.marginal
        if not marginal.wake(round_.now):
            return
        done = set[str]()
        while (candidate := marginal.best_to_grow(done)) is not None:
            if not self._saves_enough(candidate, round_.now):
                marginal.rest(candidate, round_.now + TUNING.rest_s)
            elif self._find_units(round_, candidate):
                round_.grow(candidate)
            else:
                done.add(candidate.waiting.action.job)

    def _saves_enough(self, candidate: Candidate, now: float) -> bool:
        if candidate.running is None:
            return True  # an action that starts is granted cores anyway
        left_s = candidate.running.left_s(now)
        after = speed_on(candidate.waiting.estimate.curve, candidate.next_step.units)
        return left_s / candidate.speed - left_s / after >= TUNING.least_saving_s

    def _find_units(self, round_: Round, candidate: Candidate) -> bool:
        """Free the units for a step. If they gain too little, take nothing and return False."""
        step, job = candidate.next_step, candidate.waiting.action.job
        if round_.free >= step.extra_units:
            return True
        if not self._shrinks:
            return False
        if round_.fairness.entitled(job, step.extra_units) and self._take_back(round_, job, step.extra_units):
            return True
        return round_.shrink_others(
            step.extra_units, lambda other, loss: round_.fairness.may_take(job, step.extra_units, other, loss), to_gain=step
        )

    # Commands

    def _carry_out(self, round_: Round) -> None:
        group = round_.group
        round_.settle()
        growing = []
        for running in round_.preempted.values():
            self._send_to_background(round_, running)
        for candidate, before in round_.moved.values():
            resized = candidate.running
            assert resized is not None, "only what runs is noted"
            if candidate.units > before:
                growing.append((candidate, resized))
            elif candidate.units < before:
                self._pool.regrant(resized, group.shrink(resized.grant.core_ids, candidate.units), round_.now)
        for candidate, running in growing:
            held = running.grant.core_ids
            self._pool.regrant(running, held + group.take(candidate.units - running.units, near=held), round_.now)
        for candidate in round_.entering:
            self._enter(round_, candidate)

    def _send_to_background(self, round_: Round, running: Running) -> None:
        group, now, waiting, core_ids = round_.group, round_.now, running.waiting, running.grant.core_ids
        self._ranking.note(running, now)
        self._pool.regrant(running, (), now)
        group.give_back(core_ids)
        group.to_background(running)
        had_enough = now >= running.on_cores_since + TUNING.turn_s  # the same sum as in `_give_turns`: a difference may round otherwise
        self._ranking.enter(waiting, group.queue, now if had_enough else waiting.contends_since)
        if now >= waiting.contends_since + TUNING.turn_after_s:
            self._pool.hold_round_at(group, now + TUNING.soonest_s)  # its own turn may have come

    def _enter(self, round_: Round, candidate: Candidate) -> None:
        """Give an action its first cores, or its first cores after a time in the background."""
        waiting, group, now = candidate.waiting, round_.group, round_.now
        running: Running
        if waiting.id in group.background:
            running = group.background[waiting.id]
            group.to_foreground(running)
            self._pool.regrant(running, group.take(candidate.units), now)
        else:
            self._pool.unqueue(waiting, group)
            core_ids = group.take(candidate.units)
            grant = Grant(node=round_.node.spec.name, attempt=waiting.attempt + 1, units=candidate.units, core_ids=core_ids)
            running = self._pool.start(waiting, grant, now, waiting.duration_s(candidate.units))
        elastic = bool(candidate.steps) and self._rules.resizes and waiting.action.preemptible
        if not elastic:
            group.marginal.leave(candidate)
        running.on_cores_since = now
        group.enter(running, candidate if elastic else None)
        if waiting.id in round_.turns:
            group.occupants.protect(running, now + TUNING.turn_s if waiting.preemptible else math.inf)

    def _start_in_background(self, round_: Round) -> None:
        """Start contenders without a core, so that they use idle time."""
        group = round_.group
        most = min(TUNING.background_per_core * group.capacity, len(group.queue))
        room = min(most - len(group.background), TUNING.most_started // 2 - len(group.running))
        if not self._rules.preempts or room <= 0:
            return
        contenders = self._state.in_order([group.queue], round_.now)
        for waiting in list(islice((one for one in contenders if _may_start_in_background(group, one)), room)):
            grant = Grant(node=round_.node.spec.name, attempt=waiting.attempt + 1, units=waiting.least, background=True)
            group.to_background(self._pool.start(waiting, grant, round_.now, math.inf))

    def _wake_later(self, round_: Round) -> None:
        """Ask for a round when an expectation changes, or the next turn is due."""
        group, now = round_.group, round_.now
        self._refresh(group, now)  # includes the actions that have just got their cores
        if not any(round_.queues):
            return
        # An action whose turn is due waits for the end of another turn. The occupants know when.
        times = [group.occupants.next_due(), *(queue.next_starving(now, TUNING.turn_after_s) for queue in round_.queues)]
        at = min((at for at in times if at is not None), default=None)
        if at is not None:
            self._pool.hold_round_at(group, max(at, now + TUNING.soonest_s))


def _may_start_in_background(group: CoreGroup, waiting: Waiting) -> bool:
    action = waiting.action
    for_cores = action.queue_timeout_s is not None  # its deadline counts until it has cores; in the background it would count as started
    return waiting.preemptible and not for_cores and not action.cost.quotas and waiting.id not in group.background


def _contends_since(waiting: Waiting) -> float:
    return waiting.contends_since


def _anyone(loser: object, loss: int) -> bool:
    return True
