"""Cores given and taken by the rung: what `elastic` does on the cores of one node.

One look at a group, when something in it has changed:

1. What has turned out to need more than its share of a core gets a whole one.
2. Waiting actions start on their smallest amounts, in order, as far as there is room. Room is, in this order: free
   cores; the extra units of those that run, the least missed first; a place on a shared core; a core that falls free
   when two actions that need little of one are put together. A job beyond its share leaves free what the others want,
   or have used at peak (claims.py).
3. What is left goes up the ladder (resources/ladder.py): to whom it is worth most, whether it starts now or runs.
   Units are taken from a running action for another one only if they are worth `WORTH_MORE` times as much there, and
   nothing grows that would not save `LEAST_GAIN_S`: so that nothing flaps.
4. Between jobs shares come before worth: claims.py says what is kept for whom, and who may take from whom.

All of it is worked out first and then put into commands: smaller grants before larger ones before new ones, so that
carried out in order no core is ever granted twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from scheduler.commands import Resize
from scheduler.durations import speed_on
from scheduler.holds import Holds
from scheduler.lanes.claims import Claims
from scheduler.lanes.cores import could_run, unqueue
from scheduler.lanes.look import Look
from scheduler.model import Grant, Running, Waiting
from scheduler.policies.elastic import Elastic
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.ladder import Climber, Entry, Rung, rungs_within
from scheduler.resources.queue import Walk
from scheduler.state import Node, State, own_memory
from tangram.action import CORES

LEAST_GAIN_S: Final = 0.05
"""Seconds that growing a running action must be expected to save: some hundred times what a resize costs."""

WORTH_MORE: Final = 1.25
"""How many times as much a unit must be worth to another action for it to be taken away from one."""

REST_S: Final = 0.5
"""Seconds until an action that is not worth growing is looked at again: it may run on longer than expected."""

KEPT_BACK_S: Final = 10.0
"""Seconds until a job that was kept back is looked at again, should nothing else come: peaks are forgotten in time."""

TRIES: Final = 8
"""Rungs that are passed over for want of units before a look is over."""


class ElasticCores:
    """Starts, grows, shrinks and puts together."""

    def __init__(self, state: State, holds: Holds, policy: Elastic) -> None:
        self._state = state
        self._holds = holds
        self._policy = policy
        self._claims = Claims(state, policy)

    def look(self, group: CoreGroup, node: Node, now: float) -> None:
        """Give out the cores of a group anew."""
        shares = self._state.shares
        look = Look(group, node, now, group.free, shares, self._policy.shares and shares.contended)
        self._feed_hungry(look)
        blocked = self._admit(look)
        if self._policy.resizes or look.starting:
            self._spread(look)
        if not blocked:
            self._part(look)
        self._carry_out(look)
        if blocked and look.whole:
            self._state.touch(group)  # the shares that they gave back are room that this look has not offered

    def _feed_hungry(self, look: Look) -> None:
        for running in look.group.sharing.values():
            if running.hungry and (look.free or self._shrink_for(look, 1)):
                look.whole.append(running)
                look.free -= 1

    # Who starts

    def _admit(self, look: Look) -> bool:
        """Find room for waiting actions in order; return whether one is left without."""
        group, memory, blocked = look.group, look.node.memory_free, False
        walk = self._walk(look)
        for waiting in walk:
            if waiting.action.environment is None and not could_run(waiting, look.node, "cpu", group):
                continue
            own = own_memory(waiting.action)
            if own > memory:
                memory = 0  # those behind that need none of it go on; only closing environments may ever free it
                continue
            if waiting.action.cost.quotas and self._holds.held(waiting, group, look.now):
                continue
            over = self._state.comes_last(waiting, look.now)
            if self._find_room(look, waiting, over):
                self._holds.take(waiting, look.now)
                memory -= own
                continue
            blocked = True
            # For a while a job that waits for more room than there is holds up itself and nobody else.
            if not isinstance(walk, Walk) or not (over or look.now - waiting.received_at < self._state.limits.window_s):
                break
            if over:
                self._state.keep_back(waiting.action.job, group, look.now + KEPT_BACK_S)
            walk.skip(waiting.action.job)
        return blocked

    def _walk(self, look: Look) -> Iterator[Waiting]:
        queues = [look.group.queue]
        if look.group is look.node.cores:
            queues.append(self._state.floating_cores)
        return self._state.in_order(queues, look.now)

    def _find_room(self, look: Look, waiting: Waiting, over: bool) -> bool:
        """Take what an action needs at least; False, and nothing taken, where there is no room for it."""
        group = look.group
        if over:
            if not self._shrink_for(look, waiting.least + self._claims.kept(look, waiting, waiting.least), over_only=True):
                return False
            self._enter(look, waiting)
            return True
        if look.free >= waiting.least or self._shrink_for(look, waiting.least):
            self._enter(look, waiting)
            return True
        if waiting.share < 1.0:
            core_id = group.take_share(waiting.share)
            if core_id is None and self._open_share(look, waiting.share):
                core_id = group.take_share(waiting.share)
            if core_id is not None:
                look.on_shares.append((waiting, core_id))
                self._state.shares.hold(waiting.action.job, CORES, waiting.share)
                return True
        while look.free < waiting.least and self._squeeze(look):
            pass
        if look.free < waiting.least:
            return False
        self._enter(look, waiting)
        return True

    def _enter(self, look: Look, waiting: Waiting) -> None:
        look.enter(Climber(waiting, rungs_within(waiting, look.group.capacity)))

    def _shrink_for(self, look: Look, units: int, *, over_only: bool = False) -> bool:
        """Take extra units back until `units` are free; False, and nothing taken, where there are not enough.

        With `over_only`, those of jobs beyond their share alone.
        """
        if look.free >= units:
            return True
        ladder, shares = look.group.ladder, self._state.shares
        spared = [job for job in ladder.extra_by_job if not shares.over(job)] if over_only else ()
        extra = ladder.extra - sum(ladder.extra_by_job[job] for job in spared)
        if look.free + extra < units or not self._policy.shrinks:
            return False
        while look.free < units:
            climber = ladder.best_down(spared)
            if climber is None:  # those that are being stopped gave nothing back
                break
            look.descend(climber)
        return look.free >= units

    # Sharing cores

    def _open_share(self, look: Look, share: float) -> bool:
        """Have an action that needs little of its core share it; False where none can spare that much."""
        for running in look.group.light.values():
            if running.waiting.share + share <= 1.0 and not running.stopping:
                look.group.open_share(running.grant.core_ids[0], running.waiting.share)
                self._regrant(look, running, running.grant.core_ids, running.waiting.share)
                return True
        return False

    def _squeeze(self, look: Look) -> bool:
        """Free a core by putting an action that needs little of it onto another one's; False where there is none."""
        group = look.group
        for running in group.light.values():
            if running.stopping:
                continue
            share = running.waiting.share
            core_id = group.take_share(share)
            if core_id is None:
                others = (other for other in group.light.values() if other is not running and other.waiting.share + share <= 1.0)
                host = next((other for other in others if not other.stopping), None)
                if host is None:
                    continue
                group.open_share(host.grant.core_ids[0], host.waiting.share)
                self._regrant(look, host, host.grant.core_ids, host.waiting.share)
                core_id = group.take_share(share)
                assert core_id is not None, "it was opened for this"
            freed = running.grant.core_ids
            self._regrant(look, running, (core_id,), share)
            group.give_back(freed)
            look.free += 1
            return True
        return False

    def _part(self, look: Look) -> None:
        """Give actions on shared cores their own ones again while cores lie idle in number."""
        spare = look.free - 1 - look.group.capacity // 8
        if spare > 0 and look.group.sharing:
            parting = [running for running in look.group.sharing.values() if not running.stopping and running not in look.whole][:spare]
            look.whole += parting
            look.free -= len(parting)

    # Who grows

    def _spread(self, look: Look) -> None:
        """Give what is free to whom it is worth most."""
        ladder = look.group.ladder
        ladder.wake(look.now)
        aside = list[Entry]()
        while len(aside) < TRIES:
            climber = ladder.best_up(look.kept_back)
            if climber is None:
                break
            rung = climber.rungs[climber.at]
            last = look.contended and self._state.comes_last(climber.waiting, look.now)
            if last and look.free - self._claims.kept(look, climber.waiting, rung.price) < rung.price:
                self._keep_back(look, {climber.waiting.action.job} if look.kept_back else self._claims.kept_back(look, climber))
            elif not (last or self._could_afford(look, climber, rung)):
                if look.contended and self._claims.takes_from_few(look, climber, rung):
                    look.kept_back.add(climber.waiting.action.job)
                    continue
                if not look.free and not self._claims.claimable(look):
                    break
                aside.append(ladder.set_aside(climber))
            elif not self._saves(climber, rung, look.now):
                ladder.rest(climber, look.now + REST_S)
            elif last or self._affords(look, climber, rung):
                look.climb(climber)
            else:
                aside.append(ladder.set_aside(climber))
        for entry in aside:
            ladder.put_back(entry)

    def _keep_back(self, look: Look, jobs: set[str]) -> None:
        """Have actions of jobs beyond their share grow no more in this look; what is free is offered anew when that may have changed."""
        look.kept_back |= jobs
        if look.free:
            for job in sorted(jobs):
                self._state.keep_back(job, look.group, look.now + KEPT_BACK_S)

    def _could_afford(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Say whether there may be the units for a rung: a look that costs nothing, before those that do."""
        if look.free >= rung.price or (look.contended and self._claims.may_claim(look, climber, rung)):
            return True
        spared = self._claims.spared(look, climber, rung) if look.contended else ()
        other = look.group.ladder.best_down(spared) if self._policy.shrinks else None
        return other is not None and other.rungs[other.at - 1].worth * WORTH_MORE <= rung.worth

    def _affords(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Say whether there are the units for a rung, of a job within its share; they may be taken from others."""
        if look.free >= rung.price:
            return True
        claimed = self._claims.may_claim(look, climber, rung) and self._shrink_for(look, rung.price, over_only=True)
        return claimed or self._take_for(look, climber, rung)

    def _saves(self, climber: Climber, rung: Rung, now: float) -> bool:
        running, estimate = climber.running, climber.waiting.estimate
        if running is None:
            return True  # what starts is granted something anyway
        left_s = running.left_s(now)
        after = speed_on(estimate.curve, rung.units)
        return left_s / climber.speed - left_s / after >= LEAST_GAIN_S

    def _take_for(self, look: Look, climber: Climber, rung: Rung) -> bool:
        """Take units for a rung from those to whom they are worth clearly less; False, and nothing taken, otherwise.

        A rung down may free more than is needed. What is left over counts for what it is worth to those next in line.
        """
        if not self._policy.shrinks:
            return False
        ladder, taken, lost = look.group.ladder, list[Climber](), 0.0
        while look.free < rung.price:
            other = ladder.best_down(self._claims.spared(look, climber, rung))
            if other is None or other.rungs[other.at - 1].worth * WORTH_MORE > rung.worth:
                break
            taken.append(other)
            lost += other.rungs[other.at - 1].worth * other.rungs[other.at - 1].price
            look.descend(other)
        gain, enough = rung.worth * rung.price, look.free >= rung.price
        if enough and gain < WORTH_MORE * lost:
            gain += self._worth_of(look, look.free - rung.price)
        if enough and gain >= WORTH_MORE * lost:
            return True
        for undone in reversed(taken):
            look.climb(undone)
        return False

    def _worth_of(self, look: Look, units: int) -> float:
        """Return what some units are worth to those who come after the best."""
        ladder, worth = look.group.ladder, 0.0
        first = ladder.best_up(look.kept_back) if units else None
        if first is None:
            return 0.0
        aside = [ladder.set_aside(first)]
        while units and len(aside) <= TRIES and (climber := ladder.best_up(look.kept_back)) is not None:
            rung = climber.rungs[climber.at]
            if rung.price <= units:
                units -= rung.price
                worth += rung.worth * rung.price
            aside.append(ladder.set_aside(climber))
        for entry in aside:
            ladder.put_back(entry)
        return worth

    # Commands

    def _carry_out(self, look: Look) -> None:
        group = look.group
        look.settle()
        growing = []
        for climber, before in look.moved.values():
            running = climber.running
            assert running is not None, "only what runs is noted"
            if climber.units > before:
                growing.append((climber, running))
            elif climber.units < before:
                self._regrant(look, running, group.shrink(running.grant.core_ids, climber.units))
        for running in look.whole:
            core_id, share = running.grant.core_ids[0], running.grant.share
            self._regrant(look, running, group.take(1, near=(core_id,)))
            group.give_back_share(core_id, share)
        for climber, running in growing:
            held = running.grant.core_ids
            self._regrant(look, running, held + group.take(climber.units - running.units, near=held))
        for climber in look.starting:
            self._start(look, climber)
        for waiting, core_id in look.on_shares:
            self._state.shares.hold(waiting.action.job, CORES, -waiting.share)
            unqueue(self._state, waiting, group)
            grant = Grant(node=look.node.spec.name, attempt=waiting.attempt + 1, units=1, core_ids=(core_id,), share=waiting.share)
            group.enter(self._state.start(waiting, grant, look.now, waiting.durations_s[0]), look.now)

    def _start(self, look: Look, climber: Climber) -> None:
        waiting, group = climber.waiting, look.group
        unqueue(self._state, waiting, group)
        core_ids = group.take(climber.units)
        grant = Grant(node=look.node.spec.name, attempt=waiting.attempt + 1, units=climber.units, core_ids=core_ids)
        running = self._state.start(waiting, grant, look.now, waiting.duration_s(climber.units))
        if climber.rungs and self._policy.resizes:
            group.enter(running, look.now, climber)
        else:
            group.ladder.leave(climber)
            group.enter(running, look.now)

    def _regrant(self, look: Look, running: Running, core_ids: tuple[int, ...], share: float = 1.0) -> None:
        held = running.grant.units * running.grant.share
        grant = replace(running.grant, units=len(core_ids), core_ids=core_ids, share=share)
        running.regrant(grant, look.now)
        look.group.regranted(running, grant.units * grant.share - held, look.now)
        self._state.shares.hold(running.waiting.action.job, CORES, grant.units * grant.share - held)
        self._state.out.append(Resize(id=running.waiting.id, node=grant.node, attempt=grant.attempt, core_ids=core_ids, share=share))
