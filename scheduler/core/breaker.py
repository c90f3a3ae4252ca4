"""The circuit breaker: a job whose actions keep failing by our fault is held back, so that a sick node or service does not eat a step.

Each job has a breaker of its own.

| state | actions of the job | the state ends |
|---|---|---|
| closed | start as ever | when too many of the latest ends were our fault |
| open | are held back; after each pause one is let in, as a *trial* | when a trial ends well or by its program's fault, or none is left |

Too many are more than `Limits.breaker_share` of all that ended within `WINDOW_S`, if these are at least `breaker_least`.

A trial that fails by our fault doubles the pause, from `SHORTEST_PAUSE_S` up to `LONGEST_PAUSE_S`. So does a breaker that opens again
within `LONGEST_PAUSE_S`. A trial that its caller gives up says nothing. A trial may wait or run for long. So the next one is let in
after the same pause. The trial is the first action of the same kind and service as the one whose end opened the breaker. If no such
action is held back, it is the first of all. Actions that no node could run now, however free it were, come after all others.

Held back are opens, and actions outside of environments. Commands in environments that are open go on, since their rollouts hold what they
need. So do closes. Requests to outside APIs are neither held back nor counted: their quotas have brakes of their own, and a model may have
chosen the host.

Whose fault an end is says `tangram/ends.py`. Only actions that have run count. The actions of a job that are lost within `TOGETHER_S` count
as one. They have one cause, such as the loss of a node or the restart of its engine. That is over. While the breaker is open, nothing is
counted.

The counts are not in the journal: after a restart all breakers are closed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from scheduler.core.open_queue import OpenQueue
from scheduler.core.pools import Pools
from scheduler.model import Waiting
from scheduler.model.lifecycle import End
from scheduler.model.queue import JobQueue
from scheduler.model.state import State
from scheduler.quotas.answers import only_calls
from tangram.action import Action
from tangram.ends import fault_of_end

WINDOW_S: Final = 60
"""Seconds for which an end counts."""

TOGETHER_S: Final = 1.0
"""Losses within this many seconds count as one: they seldom have more causes. What goes on to lose actions still counts once a second."""

SHORTEST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 60.0
"""The first and the longest pause between two trials, in seconds; the same as the rests of nodes."""

SHOWN_TRIALS: Final = 20
"""Most trials of a job whose ids are shown."""

MOST_RECORDS: Final = 1000
"""Jobs with a record. Beyond it, the records are dropped of jobs of which nothing has ended lately."""


@dataclass(slots=True)
class _Second:
    at: int
    ended: int = 0
    ours: int = 0


@dataclass(slots=True)
class _Record:
    """The latest ends of a job, by second; when the job last lost actions; the last pause, and when the breaker closed."""

    seconds: deque[_Second] = field(default_factory=lambda: deque(maxlen=WINDOW_S))
    lost_at: float = -math.inf
    pause_s: float = 0.0
    closed_at: float = -math.inf

    @property
    def latest(self) -> float:
        """When something of it changed last."""
        return max(self.closed_at, self.seconds[-1].at) if self.seconds else self.closed_at


@dataclass(slots=True, eq=False)
class _Open:
    """An open breaker, with the actions that are `held` back and the `trials`.

    It is open `since` then. Of the `ended` actions of the last minute, so many were `ours`. The last of these was `like` that: its kind and
    service. The next trial begins at `next_at`. The last trial failed at `failed_at`.
    """

    since: float
    ended: int
    ours: int
    like: tuple[str, str | None]
    pause_s: float
    next_at: float
    failed_at: float = -math.inf
    held: JobQueue = field(default_factory=JobQueue)
    trials: dict[str, None] = field(default_factory=dict)


class Breaker:
    """The breakers of all jobs. `opens` has the waiting opens, and `queue_open` adds one."""

    opens: OpenQueue
    queue_open: Callable[[Waiting], None]

    def __init__(self, state: State, pools: Pools) -> None:
        self._state = state
        self._pools = pools
        self._records: dict[str, _Record] = {}
        self._open: dict[str, _Open] = {}
        self._opened: list[str] = []
        self._released: list[Waiting] = []

    def ended(self, waiting: Waiting, status: End, cause: str, now: float) -> None:
        """Count an action that has run and ended."""
        limits, action = self._state.limits, waiting.action
        if limits.breaker_share >= 1.0 or only_calls(action):
            return
        fault = fault_of_end(action.kind, cause)
        if action.job in self._open:
            self._tried(self._open[action.job], waiting, fault, now)
            return
        record = self._record(action.job, now)
        ours = fault == "infrastructure"
        if ours and status == "lost":
            if now - record.lost_at < TOGETHER_S:
                return
            record.lost_at = now
        second = int(now)
        if not record.seconds or record.seconds[-1].at != second:
            record.seconds.append(_Second(second))
        record.seconds[-1].ended += 1
        if not ours:
            return
        record.seconds[-1].ours += 1
        counted = [one for one in record.seconds if one.at > now - WINDOW_S]
        all_ended, all_ours = sum(one.ended for one in counted), sum(one.ours for one in counted)
        if all_ended >= limits.breaker_least and all_ours > limits.breaker_share * all_ended:
            again = now - record.closed_at < LONGEST_PAUSE_S
            pause_s = min(LONGEST_PAUSE_S, 2 * record.pause_s) if again else SHORTEST_PAUSE_S
            self._open[action.job] = _Open(now, all_ended, all_ours, _kind_and_service(action), pause_s, now + pause_s)
            self._opened.append(action.job)

    def _tried(self, breaker: _Open, waiting: Waiting, fault: str, now: float) -> None:
        if waiting.id not in breaker.trials:
            return
        del breaker.trials[waiting.id]
        if fault == "infrastructure":
            if now - breaker.failed_at >= TOGETHER_S:  # else the trials were lost together, and have failed once
                breaker.pause_s = min(LONGEST_PAUSE_S, 2 * breaker.pause_s)
            breaker.failed_at, breaker.next_at = now, now + breaker.pause_s
        elif fault != "caller":
            self._close(waiting.action.job, now)

    def _close(self, job: str, now: float) -> None:
        breaker = self._open.pop(job)
        self._records[job] = _Record(pause_s=breaker.pause_s, closed_at=now)
        self._released += breaker.held.items

    def _record(self, job: str, now: float) -> _Record:
        record = self._records.get(job)
        if record is None:
            if len(self._records) >= MOST_RECORDS:
                since = now - max(WINDOW_S, LONGEST_PAUSE_S)
                self._records = {job: one for job, one in self._records.items() if one.latest > since}
            record = self._records[job] = _Record()
        return record

    def holds_back(self, waiting: Waiting) -> bool:
        """Keep an action that is about to wait in its queue, if its job is held back. Return whether it is kept."""
        breaker = self._open.get(waiting.action.job)
        if breaker is None or waiting.id in breaker.trials or only_calls(waiting.action):
            return False
        breaker.held.add(waiting)
        return True

    def forget(self, waiting: Waiting) -> None:
        """Forget a waiting action that has ended."""
        breaker = self._open.get(waiting.action.job)
        if breaker is not None:
            breaker.held.remove(waiting)
            breaker.trials.pop(waiting.id, None)

    def settle(self, now: float) -> None:
        """Hold back the queues of breakers that have opened, let in what is released, and let in the next trials."""
        if not (self._open or self._released):
            return
        released, self._released = self._released, []
        for waiting in released:
            if waiting.id in self._state.waiting and not self.holds_back(waiting):
                self._put_back(waiting, now)
        for job in self._opened:
            breaker = self._open[job]
            for waiting in [one for one in self._state.waiting.values() if one.action.job == job and _stands_alone(one.action)]:
                if waiting not in breaker.held:
                    self._take_out(waiting)
                    breaker.held.add(waiting)
        self._opened.clear()
        for job, breaker in [(job, breaker) for job, breaker in self._open.items() if breaker.next_at <= now]:
            if breaker.held.items:
                trial = min(breaker.held.items, key=lambda one: self._rank(one, breaker.like))
                breaker.held.remove(trial)
                breaker.trials[trial.id] = None
                breaker.next_at = now + breaker.pause_s
                self._put_back(trial, now)
            elif not breaker.trials:
                self._close(job, now)

    def _rank(self, waiting: Waiting, like: tuple[str, str | None]) -> tuple[bool, bool]:
        """Return the place of an action among the next trials, the least first."""
        return not self._pools.could_run(waiting), _kind_and_service(waiting.action) != like

    def _put_back(self, waiting: Waiting, now: float) -> None:
        if waiting.action.kind == "cpu.open":
            self.queue_open(waiting)
        else:
            self._pools.of(waiting.action).enqueue(waiting, now)

    def _take_out(self, waiting: Waiting) -> None:
        if waiting.action.kind == "cpu.open":
            self.opens.remove(waiting)
        else:
            self._pools.of(waiting.action).withdraw(waiting)

    def next_wake(self) -> float | None:
        """Return when the next trial is let in; None if nothing is held back."""
        return min((one.next_at for one in self._open.values() if one.held.items), default=None)

    def shown(self, now: float) -> dict[str, dict[str, Any]]:
        """Return for each job that is held back what the table in `scheduler/live/document.py` says."""
        return {
            job: {
                "waiting": len(breaker.held.items),
                "ours": breaker.ours,
                "ended": breaker.ended,
                "held_s": max(0.0, now - breaker.since),
                "next_in_s": max(0.0, breaker.next_at - now),
                "trials": list(islice(breaker.trials, SHOWN_TRIALS)),
            }
            for job, breaker in self._open.items()
            if breaker.held.items
        }


def _kind_and_service(action: Action) -> tuple[str, str | None]:
    return action.kind, action.service


def _stands_alone(action: Action) -> bool:
    """Return whether an action is an open, or is in no environment and no request to an outside API."""
    return action.kind == "cpu.open" or (action.environment is None and not only_calls(action))
