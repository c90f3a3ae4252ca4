"""Memory that is granted to environments as they use it, on nodes that can change allowances (`NodeSpec.grants_memory`).

An environment has a *limit*, the memory that its open declares, and a *holding*, which is measured. The scheduler books its
*allowance*: the memory that the kernel lets it use at present.

| an environment | its allowance |
|---|---|
| is opening, or an action starts in it | grows by the headroom that is learned for such actions, as far as memory is free |
| has used up its allowance (`MemoryWanted`) | grows by a step: as much as its growth so far, at least `STEP_MB`, as far as memory is free |
| has used it up, and no memory is free | stays: it is *paused*. The kernel stops its programs, and its actions leave their cores |
| has the turn | grows up to its limit, by use of the reserve |
| has ended its last running action | becomes its holding and `HEADROOM_MB`. The worker lowers it by itself. If an allowance was under way \
then, which may raise it again, a beat decides (`beat`) |

No allowance passes its environment's limit. Environments that are `fixed` or declare no memory, and actions with memory of their own, are
booked by limit. The books of a node add up as follows; the sum of all allowances and limits never exceeds the node's memory:

    free = memory - limits of the others - allowances - reserve
    reserve = the largest (limit - allowance) on the node

*Turn.* Free memory goes to paused environments in the order in which cores are given. When nothing is free, the environment that has
been paused longest, and fits into the reserve, has the turn until its last action has ended. There is one turn per node. So one growing
environment can always end its actions. In an environment without actions, a turn is one step. docs/scheduling.md has the proof.

*Short.* Environments may hold memory for good, so that no environment has room for a turn. Then nothing opens on the node. After
`SHORT_S` in which nobody can give memory back, the environment with least work invested is ended by the cause `memory_short`.

*Opening.* A node needs room for what its environments will come to hold, and for the reserve. What they will come to hold is learned
(`scheduler/learning/holdings.py`). Before anything is known of a job, its limits count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from scheduler.core.memory_books import Book, MemoryBooks, NodeMemory
from scheduler.core.pools import Pools
from scheduler.cpu.tuning import TUNING
from scheduler.learning.holdings import Stage
from scheduler.model import Environment, Grant, Running
from scheduler.model.commands import Allow, Command, Start
from scheduler.model.events import Allowed, Finished, MemoryWanted
from scheduler.model.state import Node, State
from tangram.wire import CUSHION_MB, HEADROOM_MB

STEP_MB: Final = 64
"""Least growth in one step, where so much is free."""

LEAST_MB: Final = 16
"""Growth that is worth going on for. An environment that needs more pauses again."""

SHORT_S: Final = 60.0
"""Seconds after which an environment ends for want of memory."""


class Memory:
    """Grants memory to environments. Puts its commands into `out`. `close` is `Environments.close_unasked`."""

    def __init__(self, state: State, pools: Pools, out: list[Command]) -> None:
        self._state = state
        self._pools = pools
        self._out = out
        self.books = MemoryBooks(state)
        self.close: Callable[[Environment, str, str, float], None]

    # The life of an environment

    def occupy(self, environment: Environment, node: Node, *, standing: bool) -> None:
        """Book an environment that is placed on a node. If it is `standing` by the journal, its limit counts until a beat says more."""
        if standing or not self.books.grants(environment, node):
            node.memory_free -= environment.memory_mb
            environment.counted_mb = environment.memory_mb
            return
        environment.counted_mb = self.books.expected_mb(environment.job, environment.memory_mb)
        self._book(environment, node, min(environment.memory_mb, HEADROOM_MB))

    def _book(self, environment: Environment, node: Node, allowance_mb: int) -> tuple[NodeMemory, Book]:
        memory = self.books.nodes.get(node.spec.name)
        if memory is None:
            memory = self.books.nodes[node.spec.name] = NodeMemory(node)
        book = memory.books[environment.id] = Book(environment)
        memory.allow(book, allowance_mb)
        return memory, book

    def vacate(self, environment: Environment, node: Node, now: float) -> None:
        """Give the memory of an environment back."""
        found = self.books.nodes.get(node.spec.name)
        book = found.books.pop(environment.id, None) if found is not None else None
        if found is None or book is None:
            self.give_back(node, environment.memory_mb, now)
            return
        if book.peak_mb is not None:
            self.books.holdings.ended(environment.job, book.peak_mb, counts=not environment.cut_short)
        found.paused.pop(environment.id, None)
        self._end_turn(found, book)
        found.allow(book, 0)
        self._given_back(node, now)

    def begin(self, now: float) -> bool:
        """Put allowances into the grants of the actions that start. Return whether one has to leave its cores at once."""
        left_cores = False
        for index, command in enumerate(self._out):
            if not isinstance(command, Start) or (running := self._state.running.get(command.id)) is None:
                continue
            found = self.books.of(running.waiting.action.environment or "")
            if found is None or command.id in found[1].running or running.waiting.action.kind == "cpu.close":
                continue
            memory, book = found
            book.running[command.id] = None
            if book.is_unheard:
                continue  # the action has what its environment has
            if book.paused_at is None:
                memory.short_since = None
                learned_mb = self.books.holdings.headroom_mb(book.environment.job, stage_of(running, book))
                wanted_mb = max(HEADROOM_MB, learned_mb + CUSHION_MB)
                if len(book.running) == 1:
                    wanted_mb -= book.allowance_mb - book.holding_mb
                wanted_mb = min(wanted_mb, book.gap_mb, memory.node.memory_free)
                if wanted_mb > 0:
                    memory.allow(book, book.allowance_mb + wanted_mb)
                elif book.is_settled:
                    continue  # most actions need no more than their environment has
            else:
                self._pools.cpu.pause(running, now)
                left_cores = True
            book.serial, book.is_settled = self.books.number(), False
            running.grant = _allowing(running.grant, book)
            self._out[index] = replace(command, grant=_allowing(command.grant, book))
        return left_cores

    def ended(self, running: Running, finished: Finished | None, now: float) -> None:
        """Note the end of an action. After the last one of an environment, what the environment does not hold is free."""
        found = self.books.of(running.waiting.action.environment or "")
        if found is None or found[1].running.pop(running.waiting.id, self) is self:
            return
        memory, book = found
        if finished is not None and finished.memory_mb is not None and not book.is_unheard:
            growth_mb = max(0, finished.memory_mb - book.holding_mb)
            self.books.holdings.grew(book.environment.job, stage_of(running, book), growth_mb)
        before = (book.allowance_mb, book.peak_mb, memory.turn)
        resident_mb = finished.resident_mb if finished is not None else None
        if resident_mb is not None:
            book.holding_mb = resident_mb
            if running.waiting.action.kind != "cpu.open":
                self._note_peak(book, resident_mb)
        if book.running:
            return
        book.paused_at = None
        memory.paused.pop(book.environment.id, None)
        self._end_turn(memory, book)
        if finished is not None and resident_mb is not None and _has_all(finished, book):
            memory.allow(book, min(book.allowance_mb, resident_mb + HEADROOM_MB))
            book.is_unheard, book.is_settled = False, book.serial > 0
        if memory.paused or before != (book.allowance_mb, book.peak_mb, memory.turn):
            self._given_back(memory.node, now)

    # What beats say

    def beat(self, node: Node, allowed: Iterable[Allowed], now: float) -> None:
        """Book what a node says that its environments may use.

        A beat counts if the last allowance that was sent had come to the node before: since then the node can only have lowered it. Else
        another one may be under way. If no report would tell of its loss, one that raises nothing is sent, and the next beat counts.
        """
        for said in allowed:
            environment = self._state.environments.get(said.environment)
            if environment is None or environment.node != node.spec.name or environment.state == "opening":
                continue
            found = self.books.of(said.environment) or self._adopt(environment, node)
            if found is None:
                continue
            memory, book = found
            book.is_settled &= said.serial == book.serial
            if said.serial and said.serial == book.serial:
                self._heard(memory, book, min(said.allowance_mb, environment.memory_mb), now)
            elif book.is_unheard or not book.running:
                self._send(memory, book, min(said.allowance_mb, book.allowance_mb))

    def _adopt(self, environment: Environment, node: Node) -> tuple[NodeMemory, Book] | None:
        """Return the books of an environment that an earlier scheduler has granted memory; None if this one grants none."""
        if not self.books.grants_on(node):
            return None
        environment.elastic = True
        node.memory_free += environment.memory_mb
        memory, book = self._book(environment, node, environment.memory_mb)
        book.is_unheard = True
        book.running.update((action_id, None) for action_id in environment.actions if action_id in self._state.running)
        return memory, book

    def _heard(self, memory: NodeMemory, book: Book, allowance_mb: int, now: float) -> None:
        before_mb = book.allowance_mb
        if book.is_unheard:
            book.is_unheard, book.holding_mb = False, max(0, allowance_mb - HEADROOM_MB)
            if book.environment.ended_work_s and not book.running:
                self._note_peak(book, book.holding_mb)
        if allowance_mb != before_mb:
            memory.allow(book, allowance_mb)
        if allowance_mb < before_mb:
            self._given_back(memory.node, now)

    def _note_peak(self, book: Book, held_mb: int) -> None:
        if held_mb > (-1 if book.peak_mb is None else book.peak_mb):
            self.books.holdings.peaked(book.environment.job, book.peak_mb, held_mb)
            book.peak_mb = held_mb

    # Growing, pausing, going on

    def wanted(self, event: MemoryWanted, now: float) -> None:
        """Let an environment grow that has used up its allowance, or pause it."""
        found = self.books.of(event.environment)
        if found is None or found[1].is_unheard:
            self._let_go(event.environment)
            return
        memory, book = found
        if event.allowance_mb < book.allowance_mb:
            self._allow(memory, book, book.allowance_mb)
        elif book.paused_at is None and book.gap_mb > 0 and not self._grow(memory, book) and not self._take_turn(memory, book):
            self._end_turn(memory, book)
            book.paused_at = now
            memory.paused[event.environment] = book
            for running in self._running(book):
                self._pools.cpu.pause(running, now)
            self._note_short(memory, now)

    def _let_go(self, environment_id: str) -> None:
        """Let an environment use its limit if an earlier scheduler granted memory, and this one books limits on its node."""
        environment = self._state.environments.get(environment_id)
        node = self._state.nodes.get(environment.node or "") if environment is not None else None
        if environment is not None and node is not None and not self.books.grants_on(node):
            limit_mb, serial = environment.memory_mb, self.books.number()
            self._out.append(Allow(environment=environment.id, node=node.spec.name, allowance_mb=limit_mb, serial=serial))

    def _take_turn(self, memory: NodeMemory, book: Book) -> bool:
        """Let an environment use the reserve from now on. Return False if another one does, or the reserve is too small.

        Without actions, the turn is over after one step: no end of an action would end it.
        """
        if memory.turn or book.gap_mb > memory.available_mb:
            return False
        memory.turn = book.environment.id
        has_grown = self._grow(memory, book)
        if not book.running:
            self._end_turn(memory, book)
        return has_grown

    def _grow(self, memory: NodeMemory, book: Book) -> bool:
        """Give an environment a step of what is free, or of the reserve if it has the turn. Return False if that is too little."""
        free_mb = memory.available_mb if memory.turn == book.environment.id else memory.node.memory_free
        step_mb = min(max(STEP_MB, book.allowance_mb - CUSHION_MB - book.holding_mb), book.gap_mb)
        if free_mb < min(LEAST_MB, step_mb):
            return False
        self._allow(memory, book, book.allowance_mb + min(step_mb, free_mb))
        return True

    def _allow(self, memory: NodeMemory, book: Book, allowance_mb: int) -> None:
        memory.allow(book, allowance_mb)
        self._send(memory, book, allowance_mb)

    def _send(self, memory: NodeMemory, book: Book, allowance_mb: int) -> None:
        book.serial, book.is_settled = self.books.number(), False
        name = memory.node.spec.name
        self._out.append(Allow(environment=book.environment.id, node=name, allowance_mb=allowance_mb, serial=book.serial))

    def give_back(self, node: Node, memory_mb: int, now: float) -> None:
        """Give memory back that was booked by limit: that of an environment, or an action's own."""
        if memory_mb:
            node.memory_free += memory_mb
            self._given_back(node, now)

    def _given_back(self, node: Node, now: float) -> None:
        memory = self.books.nodes.get(node.spec.name)
        if memory is not None and memory.paused:
            self._serve(memory, now)
        self._pools.look_again(node)

    def _serve(self, memory: NodeMemory, now: float) -> None:
        """Let paused environments go on, in order, while memory is free. Then let one have the turn."""
        for book in sorted(memory.paused.values(), key=lambda book: self._rank(book, now)):
            if memory.node.memory_free < min(LEAST_MB, book.gap_mb):
                break
            self._grow(memory, book)
            self._go_on(memory, book)
        for book in list(memory.paused.values()):
            if self._take_turn(memory, book):
                self._go_on(memory, book)
        self._note_short(memory, now)

    def _note_short(self, memory: NodeMemory, now: float) -> None:
        if memory.turn or not memory.paused or self._may_give_back(memory):
            memory.short_since = None
        elif memory.short_since is None:
            memory.short_since = now

    def _go_on(self, memory: NodeMemory, book: Book) -> None:
        book.paused_at = None
        del memory.paused[book.environment.id]
        for running in self._running(book):
            self._pools.cpu.go_on(running)

    def _end_turn(self, memory: NodeMemory, book: Book) -> None:
        if memory.turn == book.environment.id:
            memory.turn = ""

    def _rank(self, book: Book, now: float) -> tuple[float, ...]:
        """Return the place of a paused environment: that of its first action among contenders for cores."""
        assert book.paused_at is not None, "only paused environments wait"
        since = book.paused_at
        if now >= since + TUNING.turn_after_s:
            return (0.0, since)
        actions = [running.waiting for running in self._running(book)]
        last = all(self._state.deprioritised(waiting, now) for waiting in actions)
        priority = max((waiting.action.priority for waiting in actions), default=0)
        rank = min((self._pools.cpu.ranking.rank(waiting) for waiting in actions), default=math.inf)
        return (1.0, last, -priority, rank, since)

    def _running(self, book: Book) -> Iterator[Running]:
        return (self._state.running[action_id] for action_id in book.running)

    # Short of memory

    def _may_give_back(self, memory: NodeMemory) -> bool:
        """Say whether something that is not paused runs on the node, or an environment is closing there."""
        paused = {action_id for book in memory.paused.values() for action_id in book.running}
        environments = (self._state.environments[name] for name in memory.node.environments)
        return any(one not in paused for one in memory.node.running) or any(one.state == "closing" for one in environments)

    def next_end(self) -> float | None:
        """Return when the next environment ends for want of memory; None if there is no want."""
        return min((memory.short_since + SHORT_S for memory in self.books.nodes.values() if memory.short_since is not None), default=None)

    def wake(self, now: float) -> None:
        """End an environment on each node that has been short of memory for long enough."""
        for memory in self.books.nodes.values():
            if memory.short_since is None or now < memory.short_since + SHORT_S:
                continue
            memory.short_since = now
            standing = [book.environment for book in memory.books.values() if book.environment.state == "open"]
            if standing and not self._may_give_back(memory):
                least = min(standing, key=lambda environment: environment.life.work_s)
                least.lost = True
                why = f"node {memory.node.spec.name} has no memory left that an environment could give back"
                self.close(least, why, "memory_short", now)

    def forget(self, name: str) -> None:
        """Forget a node that is gone. Its environments do not count as ended."""
        memory = self.books.nodes.pop(name, None)
        for book in memory.books.values() if memory is not None else ():
            if book.peak_mb is not None:
                self.books.holdings.ended(book.environment.job, book.peak_mb, counts=False)


def _has_all(finished: Finished, book: Book) -> bool:
    """Say whether the worker had taken in all that was allowed when it lowered the allowance."""
    return finished.allowance_serial is None or 0 < finished.allowance_serial == book.serial


def _allowing(grant: Grant, book: Book) -> Grant:
    return replace(grant, allowance_mb=book.allowance_mb, allowance_serial=book.serial)


def stage_of(running: Running, book: Book) -> Stage:
    """Return the kind of growth of an action."""
    if running.waiting.action.kind == "cpu.open":
        return "open"
    return "first" if book.peak_mb is None else "later"
