"""Which waiting environment is opened next, and on which node.

1. The job that holds least of its entitlement goes first. The larger of two parts counts: of the memory that environments can have,
   and of the start slots (`Environments.shares`). Within a job, higher priorities go first, then earlier arrivals.
2. An open that fits on no node lets other opens pass, even of its own job.
3. A job whose first open has been the first for `KEPT_AFTER_S` gets a *position* for this open, at the end of the *front queue*. The
   position is withheld while other jobs have opens waiting and the open would take the job beyond its part of the memory. A job that
   holds nothing still gets it. While a position is withheld, no other open of the job begins.
4. The opens in the front queue go before all others. An open keeps a node if no open before it in this queue could stand on the same
   nodes, memory apart. Other opens may take the part of a kept node that will be left over once all its earlier environments are
   gone.
5. A node that could not open an environment *rests*: nothing opens on it for `SHORTEST_REST_S`. Each further failure doubles the
   rest, up to `LONGEST_REST_S`. An environment that it has opened ends the doubling. An open that fails for good on several nodes is
   itself at fault, and ends their rests. So one job's bad image keeps no other job waiting.
6. A node on which an environment has died by itself rests, too, while another node can open environments. Otherwise a sick node, which
   is soon the emptiest, would get one environment after the other. A rest is for all that die before it is over. Here an environment
   that ends well ends the doubling. A job whose environments die on several nodes is itself at fault, and ends their rests.

Under policies without shares all jobs count as one.

*Bound.* An environment holds its memory for at most H seconds: while it opens, lives and closes. A start slot falls free within S
seconds: while an environment opens, and 1 / `starts_per_s` if the rate is bounded. At most J jobs have opens that wait. An open
that finds n - 1 opens of its job waiting begins within n · (KEPT_AFTER_S + H + J · (H + S)) seconds. A later open that goes first
by priority counts twice. The bound holds for opens that an empty node could hold, while no node comes, goes, drains, rests or is silent.
Only environments may hold memory on the nodes, and also cores if environments hold cores.

*Proof.* It suffices that a job's first open begins within KEPT_AFTER_S + H + J · (H + S) after it became the first. The open is due
for a position after KEPT_AFTER_S. Until it has the position, no other open of its job begins. So after another H the job holds
nothing, and its first open has its position. At most J - 1 positions are before this one, since each job has one at a time, and no
open enters the front queue before them. It remains to show that the first open in the front queue begins within H + S. It keeps a
node at once, since no open before it could stand on the node. The earlier environments of the node are gone after H. Later
environments leave enough room by rule 4. Then the open fits, and gets the next start slot. The front queue is looked at before
anything begins, so events between two looks change nothing. ∎

*Between jobs.* An open overtakes a job that holds less of its entitlement in two cases: from the front queue, or if the other open does
not fit. In KEPT_AFTER_S at most one open of a job begins from the front queue. It keeps one node, for H + S at most. When the job got
the position, the open was within the job's part, or the job held nothing, or no other job waited.

A node is kept only from other environments. Actions that hold memory while they run give it back soon. A standing environment may
need them before it can end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from scheduler.core.memory_books import MemoryBooks, Room
from scheduler.core.open_queue import Needs, OpenQueue
from scheduler.cpu.pool import CpuPool
from scheduler.model import Environment, Waiting
from scheduler.model.shares import Shares
from scheduler.model.state import Node, State, memory_of
from tangram.action import MEMORY_MB

KEPT_AFTER_S: Final = 60.0
"""Seconds for which other opens may pass a job's first open. Environments live for minutes. A shorter time would empty nodes for
opens that soon find room by themselves. A longer time adds to the wait of a large environment: this time, and the time in which its
node empties."""

SHORTEST_REST_S: Final = 5.0
LONGEST_REST_S: Final = 60.0
"""The first and the longest rest of a node, in seconds. A full disk or a sick engine of containers takes minutes to mend. One failure in
many costs a node little."""


@dataclass(slots=True, eq=False)
class _QueuePosition:
    """A position in the front queue. `stood` are the environments that were on the node when the position first kept it."""

    waiting: Waiting
    job: str
    needs: Needs
    memory_mb: int
    node: Node | None = None
    stood: tuple[Environment, ...] = ()


class OpenOrder:
    """Chooses among the waiting opens.

    `_front` has the positions by job, in order. `_began` holds the last time at which a first open of a job began.

    The other attributes hold for one decision, at time `_now`. `_kept` has, for a kept node, its position and the memory and cores
    left for other opens. `_able` has the nodes that meet the needs of an open when empty, memory apart. `_most_mb` has the largest
    limit of memory that an open of a job without a position can have on these nodes now. `_rooms` has the room of the nodes.
    """

    def __init__(self, state: State, cpu: CpuPool, opens: OpenQueue, shares: Shares, memory: MemoryBooks) -> None:
        self._state = state
        self._memory = memory
        self._cpu = cpu
        self._opens = opens
        self._shares = shares
        self._front: dict[str, _QueuePosition] = {}
        self._began: dict[str, float] = {}
        self._kept: dict[str, tuple[_QueuePosition, int, int]] = {}
        self._now = 0.0
        self._able: dict[Needs, list[Node]] = {}
        self._most_mb: dict[tuple[Needs, str], int] = {}
        self._rooms: dict[str, Room] = {}

    def next(self, now: float) -> tuple[Waiting, Node] | None:
        """Return the next open and its node; None if nothing fits. The open must begin now."""
        self._able, self._most_mb, self._rooms, self._now = {}, {}, {}, now
        firsts = self._firsts()
        held_back = self._update_front(firsts, now)
        self._keep_nodes()
        chosen = self._from_front() or self._by_share(firsts, held_back)
        if chosen is None:
            return None
        job = self._job(chosen)
        if chosen is firsts[job] or (job in self._front and chosen is self._front[job].waiting):
            self._began[job] = now
        return chosen, self._node_for(chosen)

    def not_opened(self, node: Node, environment_id: str, now: float) -> None:
        """Have a node rest that could not open an environment."""
        self._rest(node, ("open", environment_id), now)

    def died(self, node: Node, environment: Environment, now: float) -> None:
        """Have a node rest on which an environment has died, while another node can open such environments.

        If environments of the job have died on others lately, the job is at fault, and their rests end.
        """
        others = [other for other in self._state.nodes.values() if other is not node and other.takes("cpu", environment.requires)]
        same = [other for other in others if other.rests_for == ("death", environment.job) and now < other.rests_until + LONGEST_REST_S]
        for other in same:
            other.rest_s = other.rests_until = 0.0
        if not same and node.rests_until <= now and any(other.rests_until <= now for other in others):
            self._rest(node, ("death", environment.job), now)

    def _rest(self, node: Node, why: tuple[str, str], now: float) -> None:
        node.rests_for = why
        node.rest_s = min(LONGEST_REST_S, max(SHORTEST_REST_S, 2 * node.rest_s))
        node.rests_until = now + node.rest_s

    def failed(self, environment_id: str, last_node: str) -> None:
        """End the rests of nodes for an open that has failed for good on several nodes, as one does whose image has no shell."""
        resting = [node for node in self._state.nodes.values() if node.rests_for == ("open", environment_id)]
        if any(node.spec.name != last_node for node in resting):
            for node in resting:
                node.rest_s = node.rests_until = 0.0

    def opened(self, node: Node) -> None:
        """Note that a node has opened an environment."""
        if node.rests_for[0] == "open":
            node.rest_s = 0.0

    def ended_well(self, node: Node) -> None:
        """Note that an environment of a node has been closed."""
        if node.rests_for[0] == "death":
            node.rest_s = 0.0

    def next_end_of_rest(self, now: float) -> float | None:
        """Return when the next node has rested; None if no node rests."""
        return min((node.rests_until for node in self._state.nodes.values() if node.rests_until > now), default=None)

    def _job(self, waiting: Waiting) -> str:
        return waiting.action.job if self._state.rules.shares else ""

    def _firsts(self) -> dict[str, Waiting]:
        firsts: dict[str, Waiting] = {}
        for head in self._opens.heads():
            job = self._job(head)
            if job not in firsts or head.key < firsts[job].key:
                firsts[job] = head
        return firsts

    def _update_front(self, firsts: dict[str, Waiting], now: float) -> list[str]:
        """Remove begun and withdrawn opens from the front queue, and add new ones. Return the jobs whose position is withheld."""
        self._front = {job: position for job, position in self._front.items() if position.waiting in self._opens}
        self._began = {job: at for job, at in self._began.items() if job in firsts}
        held_back: list[str] = []
        for job, first in firsts.items():
            since = max(first.received_at, self._began.get(job, -math.inf))
            if job in self._front or since > now - KEPT_AFTER_S:
                continue
            counted_mb = self._memory.counted_mb(first.action)
            if len(firsts) > 1 and self._shares.exceeds(job, MEMORY_MB, counted_mb):
                held_back.append(job)
            else:
                self._front[job] = _QueuePosition(first, first.action.job, self._opens.needs_of(first), memory_of(first.action))
        return held_back

    def _keep_nodes(self) -> None:
        """Keep a node for each open in the front queue that shares no possible node with an open before it."""
        self._kept = {}
        taken: dict[str, None] = {}
        looked_at: dict[Needs, None] = {}
        for position in self._front.values():
            if position.needs in looked_at:
                position.node = None
                continue
            looked_at[position.needs] = None
            names = [node.spec.name for node in self._nodes(position.needs)]
            if any(name in taken for name in names):
                position.node = None
            else:
                self._keep_node(position)
            taken |= dict.fromkeys(names)

    def _keep_node(self, position: _QueuePosition) -> None:
        """Keep the node with the least missing room, also in later rounds."""
        nodes = [node for node in self._nodes(position.needs) if node.spec.memory_mb >= position.memory_mb]
        if not nodes:
            position.node = None
            return
        environments, pod_cores = self._state.environments, position.needs.pod_cores
        if position.node not in nodes:
            memory_mb = position.memory_mb
            position.node = min(
                nodes, key=lambda node: (max(0, memory_mb - self._left(node).memory_mb), max(0, pod_cores - self._free_cores(node)))
            )
            position.stood = tuple(environments[name] for name in position.node.environments)
        position.stood = tuple(one for one in position.stood if environments.get(one.id) is one)
        over_mb = sum(self._memory.expected_of(one) for one in position.stood) - position.memory_mb
        cores_over = sum(len(one.pod_core_ids) for one in position.stood) - pod_cores
        room_mb, cores = self._left(position.node).memory_mb + min(0, over_mb), self._free_cores(position.node) + min(0, cores_over)
        self._kept[position.node.spec.name] = (position, max(0, room_mb), max(0, cores))

    def _from_front(self) -> Waiting | None:
        """Return the first in the front queue that fits."""
        for position in self._front.values():
            own_mb = self._room(position.node, position.needs, position.job, position.waiting) if position.node is not None else -1
            if position.memory_mb <= max(own_mb, self._most_memory(position.needs, position.job)):
                return position.waiting
        return None

    def _by_share(self, firsts: dict[str, Waiting], held_back: list[str]) -> Waiting | None:
        """Return the fitting open whose job holds least of its entitlement."""
        fitting = self._opens.fitting(self._most_memory)
        may = (one for one in fitting if self._job(one) not in held_back or one is firsts[self._job(one)])
        return min(may, key=self._rank, default=None)

    def _rank(self, waiting: Waiting) -> tuple[float, tuple[float, ...]]:
        job = waiting.action.job
        share = self._shares.dominant(job) / self._shares.entitlement(job) if self._state.rules.shares else 0.0
        return share, waiting.key

    def _nodes(self, needs: Needs) -> list[Node]:
        """Return the nodes that take environments and, when empty, meet the needs apart from memory."""
        if needs not in self._able:
            able = (node for node in self._state.nodes.values() if node.spec.cores >= needs.cores and node.takes("cpu", needs.requires))
            self._able[needs] = [node for node in able if node.rests_until <= self._now]
        return self._able[needs]

    def _left(self, node: Node) -> Room:
        if node.spec.name not in self._rooms:
            self._rooms[node.spec.name] = self._memory.room(node)
        return self._rooms[node.spec.name]

    def _room(self, node: Node, needs: Needs, job: str, waiting: Waiting | None = None) -> int:
        """Return the largest limit of memory that an open of a job can have on a node now; -1 if the node is full or cores are missing."""
        if len(node.environments) >= node.spec.environments_max:
            return -1
        room, cores = self._left(node), self._free_cores(node)
        if node.spec.name in self._kept:
            position, memory_over_mb, cores_over = self._kept[node.spec.name]
            if position.waiting is not waiting:
                room, cores = Room(memory_over_mb, room.reserve_mb), cores_over
        return self._memory.most_limit_mb(node, room, job, elastic=needs.elastic) if cores >= needs.pod_cores else -1

    def _most_memory(self, needs: Needs, job: str) -> int:
        """Return the largest limit that an open without a kept node can have on a node; -1 if no node has cores for it."""
        if (needs, job) not in self._most_mb:
            self._most_mb[needs, job] = max((self._room(node, needs, job) for node in self._nodes(needs)), default=-1)
        return self._most_mb[needs, job]

    def _node_for(self, waiting: Waiting) -> Node:
        """Return the node with fewest environments for each core, among the nodes with room now. There must be such a node."""
        needs, memory_mb = self._opens.needs_of(waiting), memory_of(waiting.action)
        able = [(node, self._room(node, needs, waiting.action.job, waiting)) for node in self._nodes(needs)]
        fitting = [(node, room_mb) for node, room_mb in able if room_mb >= memory_mb]
        return min(fitting, key=lambda entry: (len(entry[0].environments) / entry[0].spec.cores, -entry[1]))[0]

    def _free_cores(self, node: Node) -> int:
        return self._cpu.groups[node.spec.name].free
