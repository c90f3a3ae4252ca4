"""Cores given and taken back: what `elastic` does on the cores of one node.

A *contender* is an action that wants cores and has none: it waits, or it runs in the background. A *holder* has cores of its own.
One round over a group, when something in it has changed or an expectation has:

1. **Rank.** Contenders stand in order: jobs beyond their share last, then by priority, then by the work that is expected to be
   left of the action and of its trajectory (`scheduler/learning/work_left.py`).
2. **Hand cores over.** Each contender in turn gets its least amount, out of free cores, then out of extra units, then from the
   holder with most expected work left, if that is 1.2 times the contender's (`fairness.py`). That holder goes to the background.
   Who has contended for `TURN_AFTER_S` comes before all others, and keeps its core for `TURN_S`; less than that on cores in
   between does not count.
3. **Give what is left by marginal gain** (`resources/ladder.py`). Units are taken from a running action for another one only if
   they are worth `WORTH_MORE` times as much there, and nothing grows that would not save `LEAST_GAIN_S`.
4. Contenders that have not begun start in the background, as far as there is room.

All of it is worked out first and then put into commands: who loses cores before who gets them, so that carried out in order no core is
ever granted twice.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from scheduler.commands import Resize
from scheduler.durations import speed_on
from scheduler.holds import Holds
from scheduler.lanes.cores import could_run, unqueue
from scheduler.lanes.fairness import Fairness
from scheduler.lanes.look import Look
from scheduler.lanes.room import Room
from scheduler.model import Grant, Running, Waiting
from scheduler.policies.elastic import Elastic
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.foreground import Holder
from scheduler.resources.ladder import Climber, Entry, Rung, rungs_within
from scheduler.resources.queue import Contenders, Walk
from scheduler.state import Node, State, own_memory
from tangram.action import CORES

LEAST_GAIN_S: Final = 0.05
"""Seconds that growing a running action must be expected to save: some hundred times what a resize costs."""

WORTH_MORE: Final = 1.25
"""How many times as much a unit must be worth to another action for it to be taken away from one."""

REST_S: Final = 0.5
"""Seconds until an action that is not worth growing is looked at again: it may run on longer than expected."""

TRIES: Final = 8
"""Rungs of a job that are passed over for want of units before a round is done with that job."""

TURN_AFTER_S: Final = 20.0
"""Seconds without a core after which an action gets a turn."""

TURN_S: Final = 2.0
"""Seconds for which a turn lasts."""

TURN_PART: Final = 8
"""Turns take one core in so many at a time, and at least one."""

MOST_STARTED: Final = 1000
"""Actions that may be under way on a node, on cores or in the background, for another one to start: each is a thread of the worker.
With half as many none starts in the background, so that there is room for those that are to start on cores."""

STARTS_PER_CORE: Final = 8
"""Actions that may be in the background, for each core, for another one to start there."""

RANK_AGAIN_S: Final = 10.0
"""Seconds after which contenders are ranked anew: what is expected of them changes with every action that ends."""

SOONEST_S: Final = 0.02
"""Least seconds between two rounds that only an expectation has brought about."""


class ElasticCores:
    """Hands over, grows and shrinks."""

    def __init__(self, state: State, holds: Holds, policy: Elastic) -> None:
        self._state = state
        self._holds = holds
        self._policy = policy
        self._room = Room(state, policy)

    def look(self, group: CoreGroup, node: Node, now: float) -> None:
        """Give out the cores of a group anew."""
        fairness = Fairness(self._state.shares, counts=self._policy.shares)
        look = Look(group, node, now, group.free, node.memory_free, self._state.shares, fairness)
        contended = any(len(queue) for queue in self._queues(look))
        if contended:
            self._read_again(look)
            self._hand_over(look, reserved=self._give_turns(look))
        if self._policy.resizes or look.entering:
            self._spread(look)
        self._carry_out(look)
        if contended:
            self._start_in_background(look)
            self._look_again(look)

    # Ranking

    def _read_again(self, look: Look) -> None:
        """Offer anew the holders whose expectation may have changed, and now and then rank the contenders anew."""
        group, now = look.group, look.now
        for running in group.foreground.take_due(now):
            self._room.offer(group, running, now)
        for queue in self._queues(look):
            if now >= queue.rank_again_at:
                queue.rank_again_at = now + RANK_AGAIN_S
                for waiting in [*queue]:
                    self._state.rank_again(waiting, queue)

    def _contenders(self, look: Look) -> Iterator[Waiting]:
        """Walk the contenders in order; nothing may be taken out of their queues meanwhile."""
        return self._state.in_order(self._queues(look), look.now)

    def _queues(self, look: Look) -> list[Contenders]:
        floating = [self._state.floating_cores] if look.group is look.node.cores else []
        return [look.group.queue, *floating]

    # Handing over

    def _hand_over(self, look: Look, *, reserved: bool) -> None:
        narrower = dict[str, int]()
        walk = self._contenders(look)
        for waiting in walk:
            if reserved and not waiting.preemptible:
                continue  # what can be taken back at any moment may use the cores until the wide action has its turn
            if waiting.id in look.turns or waiting.least >= narrower.get(waiting.action.job, waiting.least + 1):
                continue
            if not self._may_start(look, waiting):
                continue
            if self._find_room(look, waiting):
                self._begin(look, waiting)
                continue
            # Whoever comes later has no better claim, so only those that need less may have room.
            narrower[waiting.action.job] = waiting.least
            if waiting.least > 1:
                continue
            if not isinstance(walk, Walk):
                break
            walk.skip(waiting.action.job)

    def _may_start(self, look: Look, waiting: Waiting) -> bool:
        if waiting.id in look.group.background:
            return not look.group.background[waiting.id].stopping
        if len(look.group.running) + len(look.entering) >= MOST_STARTED:
            return False
        if waiting.action.environment is None and not could_run(waiting, look.node, "cpu", look.group):
            return False
        if own_memory(waiting.action) > look.memory_free:
            return False
        return not (waiting.action.cost.quotas and self._holds.held(waiting, look.group, look.now))

    def _begin(self, look: Look, waiting: Waiting) -> None:
        """Give an action its least amount, for which there is room."""
        look.enter(Climber(waiting, rungs_within(waiting, look.group.capacity)))
        if waiting.id not in look.group.background:
            self._holds.take(waiting, look.now)
            look.memory_free -= own_memory(waiting.action)

    def _find_room(self, look: Look, waiting: Waiting) -> bool:
        """Have an action's least amount free, as far as its claim goes; False, and nothing taken, where there is not enough."""
        least, job, left_s = waiting.least, waiting.action.job, waiting.key[1]
        if look.free < least and self._room.take_back(look, job, least):
            return True
        if self._room.shrink_for(look, least, lambda: self._room.spared(look, job, least)):
            return True
        return self._room.preempt(look, least, lambda holder, lost: look.fairness.may_take(waiting, left_s, holder, lost))

    def _give_turns(self, look: Look) -> bool:
        """Give cores to those that have contended for long; say whether what is left is reserved for one that needs more than is left."""
        group, foreground, most = look.group, look.group.foreground, max(1, look.group.capacity // TURN_PART)
        overdue = [queue.overdue(look.now, TURN_AFTER_S) for queue in self._queues(look)]
        # Who has got cores, but not for long enough yet, stands in the same line and only has to keep them.
        unsettled = [running.waiting for running in foreground.unsettled(look.now, TURN_S)]
        holders = sorted((one for one in unsettled if look.now >= one.contends_since + TURN_AFTER_S), key=_contends_since)
        for waiting in heapq.merge(*overdue, holders, key=_contends_since):
            if foreground.turns + len(look.turns) >= most:
                break
            running = group.running.get(waiting.id)
            if running is not None and not running.grant.background:
                if waiting.id not in look.leaving:
                    foreground.protect(running, running.on_cores_since + TURN_S)
            elif self._may_start(look, waiting):
                if self._find_room_for_turn(look, waiting):
                    self._begin(look, waiting)
                    look.turns[waiting.id] = None
                elif self._reserves(look, waiting):
                    return True
        return False

    def _reserves(self, look: Look, waiting: Waiting) -> bool:
        """Say whether an action has this group reserved for it; one that can run on any node has one of them at a time."""
        if waiting.action.environment is not None:
            return True
        node = self._state.nodes.get(waiting.reserved_on)
        if node is None or not could_run(waiting, node, "cpu", node.cores):
            waiting.reserved_on = look.node.spec.name
        return waiting.reserved_on == look.node.spec.name

    def _find_room_for_turn(self, look: Look, waiting: Waiting) -> bool:
        """Have an action's least amount free, whoever has it: as for any other action if that will do, else from all."""
        least, job = waiting.least, waiting.action.job
        found = self._room.shrink_for(look, least, lambda: self._room.spared(look, job, least)) or self._room.preempt(look, least, _whoever)
        return found or self._room.shrink_for(look, least, tuple)

    # Who grows

    def _spread(self, look: Look) -> None:
        """Give what is free to whom it is worth most."""
        ladder = look.group.ladder
        ladder.wake(look.now)
        aside, tries, passed = list[Entry](), Counter[str](), set[str]()
        while (climber := ladder.best_up(passed)) is not None:
            rung, job = climber.rungs[climber.at], climber.waiting.action.job
            if not self._saves(climber, rung, look.now):
                ladder.rest(climber, look.now + REST_S)
            elif self._affords(look, climber, rung):
                look.climb(climber)
            elif not look.free and look.fairness.comes_last(job):
                passed.add(job)  # none of its actions may take anything
            else:
                aside.append(ladder.set_aside(climber))
                tries[job] += 1
                if tries[job] == TRIES:
                    passed.add(job)
        for entry in aside:
            ladder.put_back(entry)

    def _affords(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Have the units for a rung free; False, and nothing taken, where it is not worth what they are taken from."""
        if look.free >= rung.price:
            return True
        job = climber.waiting.action.job
        if look.fairness.comes_last(job) or not self._policy.shrinks:
            return False
        return self._claim(look, job, rung.price) or self._take_for(look, climber, rung)

    def _claim(self, look: Look, job: str, units: int) -> bool:
        """Take units from jobs beyond their share, for one that is entitled to them."""
        return look.fairness.may_claim(job, units) and self._room.take_back(look, job, units)

    def _saves(self, climber: Climber, rung: Rung, now: float) -> bool:
        running, estimate = climber.running, climber.waiting.estimate
        if running is None:
            return True  # what starts is granted something anyway
        left_s = running.left_s(now)
        after = speed_on(estimate.curve, rung.units)
        return left_s / climber.speed - left_s / after >= LEAST_GAIN_S

    def _take_for(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Take units for a rung from those to whom they are worth clearly less; False, and nothing taken, otherwise."""
        ladder, taken, lost = look.group.ladder, list[Climber](), 0.0
        while look.free < rung.price:
            other = ladder.best_down(self._room.spared(look, climber.waiting.action.job, rung.price))
            if other is None or other.rungs[other.at - 1].worth * WORTH_MORE > rung.worth:
                break
            taken.append(other)
            lost += other.rungs[other.at - 1].worth * other.rungs[other.at - 1].price
            look.descend(other)
        if look.free >= rung.price and rung.worth * rung.price >= WORTH_MORE * lost:
            return True
        for undone in reversed(taken):
            look.climb(undone)
        return False

    # Commands

    def _carry_out(self, look: Look) -> None:
        group = look.group
        look.settle()
        growing = []
        for running in look.leaving.values():
            self._send_to_background(look, running)
        for climber, before in look.moved.values():
            resized = climber.running
            assert resized is not None, "only what runs is noted"
            if climber.units > before:
                growing.append((climber, resized))
            elif climber.units < before:
                self._regrant(look, resized, group.shrink(resized.grant.core_ids, climber.units))
        for climber, running in growing:
            held = running.grant.core_ids
            self._regrant(look, running, held + group.take(climber.units - running.units, near=held))
        for climber in look.entering:
            self._enter(look, climber)

    def _send_to_background(self, look: Look, running: Running) -> None:
        group, waiting, core_ids = look.group, running.waiting, running.grant.core_ids
        self._state.note_work(running, look.now)
        self._regrant(look, running, ())
        group.give_back(core_ids)
        group.to_background(running)
        had_enough = look.now >= running.on_cores_since + TURN_S  # the very sum at which a turn ends: a difference may round otherwise
        self._state.contend(waiting, group.queue, look.now if had_enough else waiting.contends_since)
        if look.now >= waiting.contends_since + TURN_AFTER_S:
            self._state.look_at(group, look.now + SOONEST_S)  # its own turn may have come

    def _enter(self, look: Look, climber: Climber) -> None:
        """Give an action its first cores, or its first after a time in the background."""
        waiting, group = climber.waiting, look.group
        running: Running
        if waiting.id in group.background:
            running = group.background[waiting.id]
            group.to_foreground(running, None)
            self._regrant(look, running, group.take(climber.units))
        else:
            unqueue(self._state, waiting, group)
            core_ids = group.take(climber.units)
            grant = Grant(node=look.node.spec.name, attempt=waiting.attempt + 1, units=climber.units, core_ids=core_ids)
            running = self._state.start(waiting, grant, look.now, waiting.duration_s(climber.units))
        elastic = bool(climber.rungs) and self._policy.resizes and waiting.action.preemptible
        if not elastic:
            group.ladder.leave(climber)
        running.on_cores_since = look.now
        group.enter(running, climber if elastic else None)
        if waiting.id in look.turns:
            group.foreground.protect(running, look.now + TURN_S if waiting.preemptible else math.inf)

    def _regrant(self, look: Look, running: Running, core_ids: tuple[int, ...]) -> None:
        before, background = running.grant, not core_ids
        grant = replace(before, units=len(core_ids) or before.units, core_ids=core_ids, background=background)
        running.regrant(grant, look.now)
        self._state.shares.hold(running.waiting.action.job, CORES, len(core_ids) - len(before.core_ids))
        action_id = running.waiting.id
        self._state.out.append(
            Resize(id=action_id, node=grant.node, attempt=grant.attempt, core_ids=core_ids, units=grant.units, background=background)
        )

    def _start_in_background(self, look: Look) -> None:
        """Start contenders without a core, so that they use what others leave idle."""
        group = look.group
        room = min(min(STARTS_PER_CORE * group.capacity, len(group.queue)) - len(group.background), MOST_STARTED // 2 - len(group.running))
        if not self._policy.preempts or room <= 0:
            return
        contenders = self._state.in_order([group.queue], look.now)
        starting = list(islice((one for one in contenders if self._may_start_in_background(group, one)), room))
        for waiting in starting:
            grant = Grant(node=look.node.spec.name, attempt=waiting.attempt + 1, units=waiting.least, background=True)
            group.to_background(self._state.start(waiting, grant, look.now, math.inf))

    def _may_start_in_background(self, group: CoreGroup, waiting: Waiting) -> bool:
        action = waiting.action
        waits = action.queue_timeout_s is not None  # for cores: in the background it would count as started
        return waiting.preemptible and not waits and not action.cost.quotas and waiting.id not in group.background

    def _look_again(self, look: Look) -> None:
        """Have the group looked at when an expectation changes, or somebody's turn comes."""
        for running in look.group.foreground.take_due(look.now):  # those that have just got theirs
            self._room.offer(look.group, running, look.now)
        times = [look.group.foreground.next_due()]
        for queue in self._queues(look):
            # Whose turn is overdue waits for the end of another one's, which the holders know.
            times.append(queue.next_overdue(look.now, TURN_AFTER_S))
        at = min((at for at in times if at is not None), default=None)
        if at is not None and any(len(queue) for queue in self._queues(look)):
            self._state.look_at(look.group, max(at, look.now + SOONEST_S))


def _contends_since(waiting: Waiting) -> float:
    return waiting.contends_since


def _whoever(holder: Holder, lost: int) -> bool:
    return True
