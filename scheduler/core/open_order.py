"""Which waiting environment is opened next, and on which node.

1. The job that holds least of its entitlement goes first. What counts is its part of the memory that environments can have, or its part of
   the start slots where that is larger (`Environments.places`). Within a job it is first come, first served, and a higher priority goes
   before.
2. An open that fits nowhere lets others pass, of its own job too.
3. A job whose first open has been the first for `KEPT_AFTER_S` gets a *turn* for it: a place at the end of one line. While other jobs have
   opens waiting, it gets none for an open that would take it beyond its part of the memory, unless it holds nothing. As long as that is
   so, no other open of the job begins.
4. The opens in the line go before all others. One keeps a node where none before it in the line could stand on the same nodes, whatever
   their memory. Others may take as much of a kept node as will be left over when all that stood there is gone.

Under policies without shares all jobs count as one.

*Claim.* An environment holds its memory for at most H seconds: while it opens, lives and closes. A start slot that is taken falls free
within S seconds: while an environment opens, and 1 / `starts_per_s` where that is bounded. At most J jobs have opens that wait. An open
that finds n - 1 of its job waiting begins within n · (KEPT_AFTER_S + H + J · (H + S)) seconds. One that goes before it by priority, though
it came later, counts twice. All of this is for opens that an empty node could hold, while no node comes or goes and nothing but
environments holds memory on the nodes, or cores where environments do.

*Proof.* It is enough that a job's first open begins within KEPT_AFTER_S + H + J · (H + S) after it became the first. It is to have a turn
after KEPT_AFTER_S. Until it has one no other open of its job begins. So after another H the job holds nothing, and its first open has its
turn. At most J - 1 turns are before that, since a job has one at a time, and nobody gets in before them. It remains to show that whoever is
the first in the line begins within H + S. It keeps a node at once, since nobody before it could stand there. What stood there is gone after
H. What came since leaves enough room by rule 4. So it fits then, and the next start slot is its own. The line is looked at before anything
begins, so what happens between two looks changes nothing. ∎

*Between jobs.* An open goes before one of a job that holds less of its entitlement only by a turn, or where the other does not fit. In
KEPT_AFTER_S a job has at most one open begin by a turn. That keeps one node, for H + S at most. When the job got the turn, the open was
within its part, or all that it had, or nobody else waited.

A node is kept from other environments alone. Actions that hold memory while they run give it back soon, and an environment that stands may
need them to come to its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from scheduler.core.open_queue import Needs, OpenQueue
from scheduler.cpu.pool import CpuPool
from scheduler.model import Environment, Waiting
from scheduler.model.shares import Shares
from scheduler.model.state import Node, State, memory_of
from tangram.action import MEMORY_MB

KEPT_AFTER_S: Final = 60.0
"""Seconds for which others may pass a job's first open. Environments live for minutes. A shorter time would empty nodes for opens that are
about to find room by themselves; a longer one adds to the wait of a large environment, which is this time and that in which its node
empties."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A place in the line. `stood` are the environments that were on its node when that was kept."""

    waiting: Waiting
    needs: Needs
    memory_mb: int
    node: Node | None = None
    stood: tuple[Environment, ...] = ()


class OpenOrder:
    """Chooses among the waiting opens. `_line` has the turns by job, in order; `_began` says when a job's first open began last.

    The rest is true for one decision: for a kept node its turn, and the memory and cores that others may have there; for what opens
    need the nodes that have that when empty, memory apart, and the most memory that one without a turn can have there now.
    """

    def __init__(self, state: State, cpu: CpuPool, opens: OpenQueue, places: Shares) -> None:
        self._state = state
        self._cpu = cpu
        self._opens = opens
        self._places = places
        self._line: dict[str, _Turn] = {}
        self._began: dict[str, float] = {}
        self._kept: dict[str, tuple[_Turn, int, int]] = {}
        self._able: dict[Needs, list[Node]] = {}
        self._most_mb: dict[Needs, int] = {}

    def next(self, now: float) -> tuple[Waiting, Node] | None:
        """Return the open that is next, and its node; None where nothing fits. It must begin now."""
        self._able, self._most_mb = {}, {}
        firsts = self._firsts()
        held_back = self._line_up(firsts, now)
        self._keep_nodes()
        chosen = self._by_turn() or self._by_share(firsts, held_back)
        if chosen is None:
            return None
        job = self._job(chosen)
        if chosen is firsts[job] or (job in self._line and chosen is self._line[job].waiting):
            self._began[job] = now
        return chosen, self._node_for(chosen)

    def _job(self, waiting: Waiting) -> str:
        return waiting.action.job if self._state.rules.shares else ""

    def _firsts(self) -> dict[str, Waiting]:
        """Return the first open of each job."""
        firsts: dict[str, Waiting] = {}
        for head in self._opens.heads():
            job = self._job(head)
            if job not in firsts or head.key < firsts[job].key:
                firsts[job] = head
        return firsts

    def _line_up(self, firsts: dict[str, Waiting], now: float) -> list[str]:
        """Take those that have begun or were given up out of the line, and new ones in; return the jobs that are to have no turn yet."""
        self._line = {job: turn for job, turn in self._line.items() if turn.waiting in self._opens}
        self._began = {job: at for job, at in self._began.items() if job in firsts}
        held_back: list[str] = []
        for job, first in firsts.items():
            since = max(first.received_at, self._began.get(job, -math.inf))
            if job in self._line or since > now - KEPT_AFTER_S:
                continue
            if len(firsts) > 1 and self._places.exceeds(job, MEMORY_MB, memory_of(first.action)):
                held_back.append(job)
            else:
                self._line[job] = _Turn(first, self._opens.needs_of(first), memory_of(first.action))
        return held_back

    def _keep_nodes(self) -> None:
        """Keep a node for each in the line that could stand on no node on which one before it could."""
        self._kept = {}
        taken: dict[str, None] = {}
        looked_at: dict[Needs, None] = {}
        for turn in self._line.values():
            if turn.needs in looked_at:
                turn.node = None
                continue
            looked_at[turn.needs] = None
            names = [node.spec.name for node in self._nodes(turn.needs)]
            if any(name in taken for name in names):
                turn.node = None
            else:
                self._keep_node(turn)
            taken |= dict.fromkeys(names)

    def _keep_node(self, turn: _Turn) -> None:
        """Keep the node on which least is missing, and go on keeping it."""
        nodes = [node for node in self._nodes(turn.needs) if node.spec.memory_mb >= turn.memory_mb]
        if not nodes:
            turn.node = None
            return
        environments, pod_cores = self._state.environments, turn.needs.pod_cores
        if turn.node not in nodes:
            turn.node = min(nodes, key=lambda node: (max(0, turn.memory_mb - node.memory_free), max(0, pod_cores - self._free_cores(node))))
            turn.stood = tuple(environments[name] for name in turn.node.environments)
        turn.stood = tuple(one for one in turn.stood if environments.get(one.id) is one)
        over_mb = sum(one.memory_mb for one in turn.stood) - turn.memory_mb
        cores_over = sum(len(one.pod_core_ids) for one in turn.stood) - pod_cores
        memory_mb, cores = turn.node.memory_free + min(0, over_mb), self._free_cores(turn.node) + min(0, cores_over)
        self._kept[turn.node.spec.name] = (turn, max(0, memory_mb), max(0, cores))

    def _by_turn(self) -> Waiting | None:
        """Return the first in the line that fits."""
        for turn in self._line.values():
            own_mb = self._room(turn.node, turn.needs, turn.waiting) if turn.node is not None else -1
            if turn.memory_mb <= max(own_mb, self._most_memory(turn.needs)):
                return turn.waiting
        return None

    def _by_share(self, firsts: dict[str, Waiting], held_back: list[str]) -> Waiting | None:
        """Return the open of the job with least of its entitlement among those that fit."""
        fitting = self._opens.fitting(self._most_memory)
        may = (one for one in fitting if self._job(one) not in held_back or one is firsts[self._job(one)])
        return min(may, key=self._rank, default=None)

    def _rank(self, waiting: Waiting) -> tuple[float, tuple[float, ...]]:
        job = waiting.action.job
        share = self._places.dominant(job) / self._places.entitlement(job) if self._state.rules.shares else 0.0
        return share, waiting.key

    def _nodes(self, needs: Needs) -> list[Node]:
        """Return the nodes that have what is needed when they are empty, memory apart."""
        if needs not in self._able:
            nodes = self._state.nodes.values()
            self._able[needs] = [node for node in nodes if node.spec.cores >= needs.cores and node.offers("cpu", needs.requires)]
        return self._able[needs]

    def _room(self, node: Node, needs: Needs, waiting: Waiting | None = None) -> int:
        """Return the memory that an open can have on a node now; -1 where cores are missing."""
        memory_mb, cores = node.memory_free, self._free_cores(node)
        if node.spec.name in self._kept:
            turn, memory_over_mb, cores_over = self._kept[node.spec.name]
            if turn.waiting is not waiting:
                memory_mb, cores = memory_over_mb, cores_over
        return memory_mb if cores >= needs.pod_cores else -1

    def _most_memory(self, needs: Needs) -> int:
        """Return the most memory that an open without a kept node can have on one; -1 where there is none for it."""
        if needs not in self._most_mb:
            self._most_mb[needs] = max((self._room(node, needs) for node in self._nodes(needs)), default=-1)
        return self._most_mb[needs]

    def _node_for(self, waiting: Waiting) -> Node:
        """Return the node with fewest environments for each core among those that have room now, of which there is one."""
        needs, memory_mb = self._opens.needs_of(waiting), memory_of(waiting.action)
        able = [(node, self._room(node, needs, waiting)) for node in self._nodes(needs)]
        fitting = [(node, room_mb) for node, room_mb in able if room_mb >= memory_mb]
        return min(fitting, key=lambda entry: (len(entry[0].environments) / entry[0].spec.cores, -entry[1]))[0]

    def _free_cores(self, node: Node) -> int:
        return self._cpu.groups[node.spec.name].free
