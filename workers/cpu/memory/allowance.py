"""How much memory an environment may hold now, what becomes of one that wants more, and what its actions have used.

| state   | meaning                                                    | next                                                     |
|---------|------------------------------------------------------------|----------------------------------------------------------|
| at its  | nothing is bounded but by the environment's limit          | an action is granted less: bounded                       |
| limit   |                                                            |                                                          |
| bounded | the watcher looks at what is used                          | what is held comes near it: paused; raised to the limit  |
| paused  | everything is frozen, and the scheduler is asked for more  | more is allowed: bounded; something is to end: awake     |
| awake   | something is started or ended, so all runs at the bound    | that is over: bounded, or paused again                   |
| closed  | the environment closes: all runs, nothing is watched       |                                                          |

Pages of files that no program has mapped are not held. The kernel drops them first where its bound is met, or where the node is full. So
that files need not be read again, the bound leaves room for those that were read, and follows them.

Most actions change nothing: they are granted what their environment may use already, and leave it as it was. So what is held is measured
again only if the use has changed by `SLACK_BYTES`, if the bound has been met since, or after `STALE_S`, since as much cache may have gone
as programs have taken. A bound that stands is not written again.

A pause comes `CUSHION_MB` before the allowance, and the kernel's own bound is `ROOM_MB` beyond that, besides cache. The room between them
is for what programs take until the watcher looks again. Programs that take `BYTES_PER_S` do not fill it before. If the watcher is late,
they sleep in the kernel (version 1, where system calls then fail) or are slowed down (version 2).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tangram import clock
from tangram.wire import CUSHION_MB, HEADROOM_MB
from workers.cpu.memory.controls import Controls, Use
from workers.memory import MIB

if TYPE_CHECKING:
    from workers.cpu.memory.watcher import Watcher

log = logging.getLogger(__name__)

ROOM_MB, SLACK_BYTES = 64, MIB
BYTES_PER_S = 2 << 30
"""The fastest that programs take memory: how soon the allowance could be near follows from it."""
FOLLOWS_BYTES = 32 * MIB
"""By how much the cache differs before the kernel's bound follows."""
SOONEST_S, LATEST_S, IDLE_S, SAMPLE_S, SHIFTED_S, STALE_S = 0.02, 0.04, 0.32, 0.1, 1.0, 5.0
"""While an action runs, its environment is looked at within `LATEST_S`: in that time, what has its headroom left does not meet the kernel's
bound. Between actions only what was left running can grow. So as long as the use stays as it is, each look comes twice as late as the one
before, up to `IDLE_S`. What begins to grow later than that waits at the kernel's bound until it is seen. Where much is cache, it is
measured after `SHIFTED_S` even if the use is the same: the kernel may have dropped as much cache as programs have taken."""

Stamp = tuple[int, int]
"""The age of an allowance: the scheduler's epoch, and its number."""


@dataclass(eq=False, slots=True)
class ActionMemory:
    """What an environment held while an action ran, at most, and what it holds after the last of its actions; MiB, None if unknown.

    `allowed` is the age of the allowance at that end.
    """

    memory_mb: int | None = None
    resident_mb: int | None = None
    allowed: Stamp | None = None


class Allowance:
    """The memory of one environment. Any thread may use it.

    `limit_mb` is the environment's own limit, which the kernel holds it to. `controls` are its control files.
    """

    def __init__(self, environment: str, limit_mb: int, controls: Controls, watcher: Watcher) -> None:
        self.environment, self.limit_mb = environment, limit_mb
        self._controls, self._watcher = controls, watcher
        self._lock = clock.lock()
        self._allowed_mb = limit_mb
        self._bound_mb: int | None = limit_mb
        """The allowance to which the kernel holds the environment; None if that is not sure."""
        self._kernels_bound = limit_mb * MIB
        """How many bytes the kernel lets be used, cache included."""
        self._is_watched = self._is_closed = False
        self._paused_at: float | None = None
        self._paused_before_s = 0.0
        self._awake, self._is_roused = 0, False
        self._actions: set[ActionMemory] = set()
        self._cache_most, self._unseen_most, self._sampled_at = 0, 0, 0.0
        self._seen, self._measured_at, self._used, self._meets = Use(0, 0), -math.inf, 0, b""
        self._still_s = LATEST_S
        """After how many seconds it is looked at again while no action runs."""
        self._is_granted = False
        self._stamp: Stamp = (0, 0)

    @property
    def allowed_mb(self) -> int:
        """The allowance, MiB."""
        return self._allowed_mb

    @property
    def is_paused(self) -> bool:
        """Whether its programs are frozen until more is allowed."""
        return self._paused_at is not None

    @property
    def is_short(self) -> bool:
        """Whether it is paused, or was paused before it was awake and has not been looked at since."""
        with self._lock:  # between the two, a look or a start could change both
            return self.is_paused or (self._is_roused and not self._is_closed)

    def paused_s(self) -> float:
        """Return for how many seconds it has been paused so far."""
        paused_at = self._paused_at
        return self._paused_before_s + (time.monotonic() - paused_at if paused_at is not None else 0.0)

    def wanted(self) -> dict[str, Any] | None:
        """Return the report by which the scheduler is asked for more; None where nothing is wanted."""
        with self._lock:
            if not self.is_paused:
                return None
            try:
                used_mb = _mb(self._controls.use().held)
            except OSError:  # it is about to close
                return None
            return {
                "type": "memory_wanted",
                "environment": self.environment,
                "used_mb": used_mb,
                "allowance_mb": self._allowed_mb,
            }

    def now(self) -> tuple[int, int, int] | None:
        """Return what a beat says of it (`tangram.wire.WireNode`); None if the scheduler has granted it nothing."""
        with self._lock:
            return (self._allowed_mb, *self._stamp) if self._is_granted else None

    # -- actions -------------------------------------------------------------------------------------------------

    @contextmanager
    def action(self, allowance_mb: int, stamp: Stamp) -> Iterator[ActionMemory]:
        """Measure while an action runs, under a grant of `allowance_mb`, 0 for one that says nothing of memory.

        A grant that a newer allowance has overtaken changes nothing. After the last action, what is allowed is lowered to what is held and
        `HEADROOM_MB`.
        """
        mine = ActionMemory()
        with self._lock:
            if self._actions:
                self._note_peak()
            self._restart_peak()
            self._actions.add(mine)
            if allowance_mb and stamp > self._stamp:
                self._stamp, self._is_granted = stamp, True
                self._set(allowance_mb)  # what the others were granted is in it
            self._look_soon()
        try:
            yield mine
        finally:
            with self._lock:
                use = self._note_peak()
                self._actions.remove(mine)
                if use is not None and not self._actions:
                    self._end_last(mine, use)

    def allow(self, allowance_mb: int, stamp: Stamp) -> None:
        """Raise the allowance, as the scheduler's message of this age says. One that is out of date is dropped.

        So is one that comes when the action is over for which it was meant.
        """
        with self._lock:
            if stamp <= self._stamp:
                log.debug("an allowance of environment %s is out of date: %s, the last was %s", self.environment, stamp, self._stamp)
                return
            self._stamp = stamp
            if allowance_mb > self._allowed_mb and (self._actions or self.is_paused):
                self._is_granted = True
                self._set(allowance_mb)
                self._look_soon()

    def sample(self) -> None:
        """Take note of what is held now, unless that was done a moment ago."""
        with self._lock, contextlib.suppress(OSError):
            if self._actions and not self._is_closed and time.monotonic() - self._sampled_at >= SAMPLE_S:
                self._use()

    def _note_peak(self) -> Use | None:
        """Take note of the most that was held since the last time, and return what is now; None where the group is gone.

        The kernel's figure has the cache in it. So the most cache that was seen is taken off, and the bound was not passed unseen.
        """
        with contextlib.suppress(OSError):
            use, peak = self._use(), self._controls.peak()
            self._note_held(min((peak or 0) - self._cache_most, self._unseen_most))
            return use
        return None

    def _restart_peak(self) -> None:
        self._cache_most, self._unseen_most = 0, self._most_unseen
        with contextlib.suppress(OSError):
            self._controls.restart_peak()

    def _use(self) -> Use:
        """Take note of what is held now, and return it; it is measured only where it may have changed."""
        used, self._sampled_at = self._controls.used(), time.monotonic()
        has_changed = abs(used - self._seen.held - self._seen.cache) >= SLACK_BYTES or self._sampled_at - self._measured_at >= STALE_S
        return self._measure() if self._has_met(used) or has_changed else self._note(self._seen, used)

    def _measure(self) -> Use:
        use, self._measured_at = self._controls.use(), time.monotonic()
        return self._note(use, use.held + use.cache)

    def _note(self, use: Use, used: int) -> Use:
        self._seen, self._used = use, used
        self._cache_most, self._unseen_most = max(self._cache_most, use.cache), max(self._unseen_most, self._most_unseen)
        self._note_held(use.held)
        return use

    def _note_held(self, held: int) -> None:
        for action in self._actions:
            action.memory_mb = max(action.memory_mb or 0, _mb(held))

    @property
    def _most_unseen(self) -> int:
        """How many bytes can be held at most between two looks."""
        return self.limit_mb * MIB if self._allowed_mb >= self.limit_mb else self._near + ROOM_MB * MIB

    def _end_last(self, action: ActionMemory, use: Use) -> None:
        """Say what stays, and lower the allowance to it. What is reported is what the scheduler is to book."""
        try:
            held_mb = _mb(use.held)
            if self._is_granted and held_mb + HEADROOM_MB < self._allowed_mb:
                before_mb, self._allowed_mb = self._allowed_mb, held_mb + HEADROOM_MB
                if not self._bound():
                    self._allowed_mb = before_mb
                    held_mb = before_mb - HEADROOM_MB
            action.resident_mb, action.allowed = held_mb, self._stamp
        except OSError:
            return  # it is closed, or lost

    # -- the bound -----------------------------------------------------------------------------------------------

    def _set(self, allowance_mb: int) -> None:
        """Change the allowance, and let go on what may."""
        self._allowed_mb = min(allowance_mb, self.limit_mb)
        if self._allowed_mb == self._bound_mb:
            return
        try:
            use = self._use()
            if not self.is_paused or self._has_room(use):
                self._bound()
                self._go_on()
        except OSError as error:
            if not self._is_closed:  # it may be about to close
                log.warning("environment %s cannot be held to %d MB: %s", self.environment, self._allowed_mb, error)

    def _has_room(self, use: Use) -> bool:
        return self._allowed_mb >= self.limit_mb or use.held <= self._near

    @property
    def _near(self) -> int:
        """How many bytes may be held until all is paused."""
        return (self._allowed_mb - CUSHION_MB) * MIB

    @property
    def _bound_wanted(self) -> int:
        """How many bytes the kernel is to let be used, with room for what is cached."""
        return min(self._near + ROOM_MB * MIB + self._seen.cache, self.limit_mb * MIB)

    def _follow(self) -> None:
        """Have the kernel's bound follow the cache."""
        if abs((wanted := self._bound_wanted) - self._kernels_bound) >= FOLLOWS_BYTES:
            self._controls.bound(wanted)
            self._kernels_bound = wanted

    def _bound(self) -> bool:
        """Have the kernel hold the environment to the allowance. Return whether it could."""
        if self._is_closed or self._allowed_mb == self._bound_mb:
            return True
        self._bound_mb = None
        with contextlib.suppress(OSError):  # not every kernel can; then a successor knows of no bound
            self._controls.remember(self._allowed_mb)
        if self._allowed_mb >= self.limit_mb:
            self._controls.unbound(self.limit_mb * MIB)
            self._kernels_bound = self.limit_mb * MIB
        else:
            if not self._is_watched:
                self._is_watched = True
                self._watcher.watch(self)
            self._kernels_bound = self._bound_wanted
            try:
                self._controls.bound(self._kernels_bound)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                return False  # pages that wait to be written cannot be dropped
        self._bound_mb = self._allowed_mb
        return True

    def look(self) -> float:
        """Pause where the allowance is near; return after how many seconds it could be again.

        As long as the use is about the same, and the bound has not been met, memory is not measured again.
        """
        with self._lock:
            try:
                if self._is_closed or self._awake or self.is_paused or self._allowed_mb >= self.limit_mb:
                    return LATEST_S if self._actions else IDLE_S
                used = self._controls.used()
                is_still = not self._actions and abs(used - self._used) < SLACK_BYTES
                self._used, self._still_s = used, min(2 * self._still_s, IDLE_S) if is_still else LATEST_S
                if self._has_met(used) or self._may_have_shifted(used):
                    if self._has_room(self._measure()):
                        self._follow()
                    else:
                        self._pause()
            except OSError as error:
                log.debug("the memory of environment %s cannot be looked at: %s", self.environment, error)
                return LATEST_S
            finally:
                self._is_roused = self._is_roused and self._awake > 0
            return self._patience_s()

    def _look_soon(self) -> None:
        """Have it looked at as what may grow from now on."""
        self._still_s = LATEST_S
        self._watcher.look_within(self, self._patience_s())

    def _patience_s(self) -> float:
        """Return after how many seconds the allowance could be near."""
        if not self._actions:
            return self._still_s
        return min(max((self._near - max(self._seen.held, self._used - self._seen.cache)) / BYTES_PER_S, SOONEST_S), LATEST_S)

    def _may_have_shifted(self, used: int) -> bool:
        """Return whether so much may be held that the allowance is near, though it was not when memory was last measured."""
        if used > self._near + self._seen.cache or used < self._seen.held + self._seen.cache - SLACK_BYTES:
            return True
        is_large = self._seen.cache > ROOM_MB * MIB
        return is_large and bool(self._actions) and time.monotonic() - self._measured_at >= SHIFTED_S

    def _has_met(self, used: int) -> bool:
        """Return whether the kernel's bound has been met since the last time, so that cache may have made room for what is held."""
        if used < self._kernels_bound - SLACK_BYTES:
            return False
        before, self._meets = self._meets, self._controls.meets()
        return before != self._meets

    def _pause(self) -> None:
        self._controls.freeze()
        self._paused_at, self._bound_mb = time.monotonic(), None
        # What sleeps in the kernel, since the watcher was late, wakes up to be frozen.
        self._controls.bound(min(self._kernels_bound + CUSHION_MB * MIB, self.limit_mb * MIB))
        if (report := self.wanted()) is not None:
            self._watcher.on_wanted(report)

    def _go_on(self) -> None:
        if self._paused_at is not None:
            self._paused_before_s, self._paused_at = self.paused_s(), None
            self._controls.thaw()

    # -- starts and ends -----------------------------------------------------------------------------------------

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have nothing paused while something is started or ended: what is frozen can do neither."""
        with self._lock, contextlib.suppress(OSError):
            self._awake += 1
            self._is_roused = self.is_short
            self._go_on()
        try:
            yield
        finally:
            with self._lock:
                self._awake -= 1
                self._watcher.look_within(self, 0.0)

    def close(self) -> None:
        """Let everything run from now on, so that it can end. Again: nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._go_on()
            if self._is_watched:
                self._watcher.forget(self)
            self._controls.close()

    def adopt(self) -> None:
        """Go on with what the worker before this one has left; what was paused is paused again at the next look."""
        with self._lock, contextlib.suppress(OSError):
            self._controls.thaw()
            try:
                allowed_mb = self._controls.remembered_mb()
            except OSError:
                allowed_mb = self.limit_mb
            self._is_granted, self._bound_mb = allowed_mb < self.limit_mb, None
            self._set(allowed_mb)
            self._look_soon()


def _mb(held: int) -> int:
    return math.ceil(held / MIB)
