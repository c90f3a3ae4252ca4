"""What a seed means: some nodes, trainers with their rollouts, and faults with their times.

A scenario is plain data, so it can be made shorter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from scheduler.policies import PARTS
from tests.virtual.trainer import Rollout, Step

FAULTS = (
    "kill scheduler",
    "kill scheduler",
    "freeze scheduler",
    "freeze scheduler",
    "kill node",
    "freeze node",
    "cut node",
    "stop node",
    "kill trainer",
    "freeze trainer",
    "cut trainer",
    "cut scheduler",
    "broker away",
    "broker restarts",
    "broker comes back empty",
    "journal away",
    "messages doubled",
    "messages late",
    "messages lost",
    "answers lost",
    "slow network",
    "clock steps",
)
BROKER_FAULTS = ("error replies", "submissions lost")
CHAINS = (
    ("cut trainer", "kill scheduler", "broker comes back empty"),
    ("freeze trainer", "kill scheduler", "broker comes back empty"),
    ("freeze scheduler", "freeze node"),
    ("freeze scheduler", "freeze node"),
    ("freeze scheduler", "messages lost"),
)
"""Faults that follow one another while the first one lasts."""

POLICIES = ("paper", "fcfs", "fixed:1", "fixed:2")
"""What a quarter of all scenarios have instead of `elastic`. Under `static`, actions would wait for ever for what environments hold."""

SHARDS = 3
"""How many a third of all scenarios have."""

BEGIN_S, END_S = 1.0, 40.0
"""When faults begin."""


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to whom, when, for how long, and how much of it."""

    at_s: float
    kind: str
    target: int = 0
    lasts_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A whole run. `seed` also draws what calls take."""

    seed: int
    cores: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    faults: tuple[Fault, ...]
    cells: tuple[int, ...] = ()
    """The GPU cells of each GPU node."""
    apis: int = 0
    """API nodes."""
    memory_mb: int = 0
    """The memory of each node that grants it as environments use it; 0 for nodes that book limits, of which they have plenty."""
    outage_s: float = 60.0
    """Outage that clients bridge: no fault lasts for longer than this, but some do than the other one that is drawn."""
    breaker_least: int = 20
    """Ends of a job after which it may be held back for our faults; in half of all runs the first one counts."""
    shards: int = 1
    """Shards; CPU nodes are dealt to them in turn."""
    starting_limit: int = 64
    """Environments that may be opening at once, over all shards."""
    policy: str = "elastic"
    standby: str = ""
    """The policy of the standby, where that has another one: an operator changes it by a restart."""
    without: tuple[str, ...] = ()
    """Parts of the policy `elastic` that are switched off."""
    drains: tuple[tuple[int, float, float], ...] = ()
    """Nodes that an operator drains, from when, and for how long."""
    queue_limit: int = 100_000
    """Waiting actions of a job after which further ones are rejected."""
    starts_per_s: float = 200.0
    """Environments that may begin to open per second, over all shards."""
    environments_max: int | None = None
    """Environments of each node."""
    starved: float = 0.0
    """With which probability a thread loses its turn where it may."""

    @property
    def calm_from_s(self) -> float:
        """When the last fault is over."""
        return max((fault.at_s + fault.lasts_s for fault in self.faults), default=0.0)


def scenario(seed: int, *, memory: bool = True) -> Scenario:
    """Return the scenario of a seed. Without `memory`, nodes have plenty of it."""
    draw = random.Random(f"scenario {seed}")
    cores = tuple(draw.choice((1, 2, 4)) for _ in range(draw.choice((1, 2, 2, 3))))
    rollouts = tuple(_rollout(draw, number) for number in range(draw.randint(2, 7)))
    faults = [_fault(draw, draw.choice(FAULTS)) for _ in range(draw.choice((0, 1, 2, 3, 5)))]
    if draw.random() < 0.25:
        first, *others = draw.choice(CHAINS)
        faults.append(replace(_fault(draw, first), lasts_s=20.0))
        begin_s = faults[-1].at_s
        for kind in others:
            begin_s = round(begin_s + draw.choice((0.5, 3.0, 6.0)), 3)
            faults.append(replace(_fault(draw, kind), at_s=begin_s, lasts_s=8.0))
    faults += _of_the_broker(random.Random(f"broker {seed}"))
    faults = _with_adoption(faults, "kill node", "restart node", random.Random(f"restarts {seed}"))
    faults = _with_adoption(faults, "stop node", "replace node", random.Random(f"replacements {seed}"))
    sick = random.Random(f"sick {seed}")
    faults += [_fault(sick, "sicken node") for _ in range(sick.choice((0, 0, 0, 0, 1, 2)))]
    outage_s = random.Random(f"outage {seed}").choice((60.0, 60.0, 10.0))
    least = random.Random(f"breaker {seed}").choice((20, 1))
    in_order = tuple(sorted(faults, key=lambda fault: fault.at_s))
    starved = random.Random(f"starved {seed}").choice((0.0, 0.0, 0.003, 0.03))
    drawn = Scenario(seed, cores, rollouts, in_order, outage_s=outage_s, breaker_least=least, starved=starved)
    drawn = _with_memory(drawn, random.Random(f"memory {seed}")) if memory else drawn
    drawn = _with_services(drawn, random.Random(f"services {seed}"))
    drawn = _with_shards(drawn, random.Random(f"shards {seed}")) if seed % 3 == 2 else drawn
    drawn = _with_calls(drawn, random.Random(f"calls {seed}"))
    drawn = _with_a_clock_set_back(drawn, random.Random(f"set back {seed}"))
    drawn = _with_another_order(drawn, random.Random(f"order {seed}"))
    return _with_limits(drawn, random.Random(f"limits {seed}"))


def _of_the_broker(draw: random.Random) -> list[Fault]:
    """Return faults of a third of all scenarios, in which the broker is there and does not do what it is asked for."""
    return [_fault(draw, draw.choice(BROKER_FAULTS)) for _ in range(draw.choice((0, 0, 0, 0, 1, 2)))]


def _with_adoption(faults: list[Fault], kind: str, adopting: str, draw: random.Random) -> list[Fault]:
    """Let half of the faults of a kind be ones after which the next worker adopts environments, and add one to a quarter of all runs."""
    more = [_fault(draw, adopting)] if draw.random() < 0.25 else []
    adopts = [fault.kind == kind and draw.random() < 0.5 for fault in faults]
    return [*(replace(fault, kind=adopting) if one else fault for fault, one in zip(faults, adopts, strict=True)), *more]


def _with_memory(drawn: Scenario, draw: random.Random) -> Scenario:
    """Have half of all scenarios grant memory, which is short in most. Their commands take some, and leave programs that hold some."""
    if draw.random() < 0.5:
        return drawn

    def thirsty(step: Step, limit_mb: int) -> Step:
        if step.does != "exec":
            return step
        commands = []
        for command in step.commands:
            resident_mb = draw.choice((0, 0, 10, 10, 40, limit_mb // 2))
            memory_mb = draw.choice((0, 10, 30, 80, limit_mb)) // len(step.commands)
            takes = {"memory_mb": min(memory_mb, limit_mb - 20), "resident_mb": resident_mb, "later_mb": draw.choice((0, 0, 0, 0, 60))}
            commands.append({**command, **takes})
        return replace(step, commands=tuple(commands))

    rollouts = []
    for rollout in drawn.rollouts:
        limit_mb = draw.choice((100, 150, 200, 300))
        rollouts.append(replace(rollout, memory_mb=limit_mb, steps=tuple(thirsty(step, limit_mb) for step in rollout.steps)))
    return replace(drawn, rollouts=tuple(rollouts), memory_mb=draw.choice((320, 320, 450, 700, 1500)))


def _with_shards(drawn: Scenario, draw: random.Random) -> Scenario:
    """Return the scenario with three shards, and a node for each at least. Half have faults of one shard alone, half have many opens."""
    more = tuple(draw.choice((1, 2, 4)) for _ in range(draw.choice((3, 3, 4, 6)) - len(drawn.cores)))
    drawn = replace(drawn, cores=(*drawn.cores, *more), shards=SHARDS)
    if draw.random() < 0.5:
        shard = draw.randrange(SHARDS)
        kinds = [draw.choice(("kill scheduler", "freeze scheduler", "cut scheduler")) for _ in range(draw.choice((1, 2, 3)))]
        kinds += [draw.choice(("kill node", "freeze node", "cut node")) for _ in range(draw.choice((0, 0, 1)))]
        faults = [replace(_fault(draw, kind), target=shard) for kind in kinds]  # the first ones of each are one of each shard
        drawn = replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))
    if draw.random() < 0.5:
        steps = Step(0.0, "open"), Step(draw.choice((0.0, 3.0)), "close")
        opens = tuple(Rollout(f"o{number}", draw.choice(("a", "b")), 2.0, steps) for number in range(draw.choice((6, 12))))
        drawn = replace(drawn, rollouts=(*drawn.rollouts, *opens), starting_limit=SHARDS)
    if len(drawn.cores) > SHARDS and draw.random() < 0.5:  # each shard keeps one of the first nodes
        moves = replace(_fault(draw, "move node"), target=draw.randrange(SHARDS, len(drawn.cores)))
        drawn = replace(drawn, faults=tuple(sorted((*drawn.faults, moves), key=lambda fault: fault.at_s)))
    return drawn


def _with_services(drawn: Scenario, draw: random.Random) -> Scenario:
    """Add GPU nodes and calls of services to a quarter of all scenarios."""
    if draw.random() >= 0.25:
        return drawn
    cells = tuple(draw.choice((1, 2, 2, 4)) for _ in range(draw.choice((1, 1, 2))))
    return replace(drawn, rollouts=(*drawn.rollouts, *_asking(draw, "g", "score", _score, (2, 8), (1, 2, 4))), cells=cells)


Asked = Callable[[random.Random], dict[str, Any]]


def _asking(draw: random.Random, prefix: str, does: str, asked: Asked, steps: tuple[int, int], at_once: tuple[int, ...]) -> list[Rollout]:
    """Draw rollouts without an environment, named by a prefix and a number.

    `steps` are the fewest and the most of each, and `at_once` how many things a step may ask for, each of which `asked` draws.
    """
    return [
        Rollout(
            f"{prefix}{number}",
            draw.choice(("a", "b")),
            draw.choice((0.0, 2.0, 10.0)),
            tuple(
                Step(draw.choice((0.0, 0.1, 1.0, 3.0)), does, tuple(asked(draw) for _ in range(draw.choice(at_once))))
                for _ in range(draw.randint(*steps))
            ),
        )
        for number in range(draw.randint(1, 3))
    ]


def _score(draw: random.Random) -> dict[str, Any]:
    call: dict[str, Any] = {
        "service": draw.choice(("small", "small", "middle", "large")),
        "work_s": draw.choice((0.05, 0.5, 2.0, 8.0)),
        "idempotent": draw.random() < 0.5,
        "dies": draw.random() < 0.1,
    }
    if draw.random() < 0.1:
        call["work_s"], call["cancel_s"] = 200.0, draw.choice((0.0, 0.5, 3.0))
    return call


def _with_calls(drawn: Scenario, draw: random.Random) -> Scenario:
    """Add API nodes and calls of an outside API to a quarter of all scenarios. Most of these have a fault more, mostly of an API node."""
    if draw.random() >= 0.25:
        return drawn
    apis = draw.choice((1, 2, 2))
    calls = _asking(draw, "c", "call", _call, (1, 5), (1, 2, 4, 8))
    kinds = ("freeze node", "cut node", "cut node", "kill node", "stop node", "messages late", "freeze scheduler", "kill scheduler")
    faults = [_fault(draw, draw.choice(kinds)) for _ in range(draw.choice((0, 1, 1, 2)))]
    node = len(drawn.cores) + len(drawn.cells)
    faults = [
        replace(one, at_s=draw.uniform(BEGIN_S, 15.0), lasts_s=draw.choice((1.0, 6.0, 8.0, 20.0)), target=node + one.target % apis)
        if one.kind.endswith("node")
        else one
        for one in faults
    ]
    in_order = tuple(sorted((*drawn.faults, *faults), key=lambda fault: fault.at_s))
    return replace(drawn, rollouts=(*drawn.rollouts, *calls), faults=in_order, apis=apis)


def _with_a_clock_set_back(drawn: Scenario, draw: random.Random) -> Scenario:
    """Set the clock of a scheduler, a node or a trainer back in an eighth of all scenarios."""
    if draw.random() >= 0.125:
        return drawn
    amount = -draw.choice((0.5, 2.0, 8.0, 20.0))
    back = replace(_fault(draw, "clock steps"), target=draw.randrange(12), amount=amount)
    return replace(drawn, faults=tuple(sorted((*drawn.faults, back), key=lambda fault: fault.at_s)))


def _with_another_order(drawn: Scenario, draw: random.Random) -> Scenario:
    """Have half of all scenarios under another policy or with a part less, a third with priorities, and a third drain a node.

    In an eighth of those with one shard, the standby has a policy of its own.
    """
    policy = draw.choice((*POLICIES, *["elastic"] * 12))
    without = (draw.choice(PARTS),) if policy == "elastic" and draw.random() < 0.33 else ()
    rollouts = drawn.rollouts
    if draw.random() < 0.33:
        rollouts = tuple(
            replace(one, steps=tuple(replace(step, priority=draw.choice((0, 3, 3, 9))) for step in one.steps)) for one in rollouts
        )
    if draw.random() < 0.33:
        node = draw.randrange(len(drawn.cores) + len(drawn.cells) + drawn.apis)
        drawn = replace(drawn, drains=((node, round(draw.uniform(0.0, 20.0), 3), draw.choice((0.5, 4.0, 20.0))),))
    if drawn.shards == 1 and draw.random() < 0.125:
        drawn = replace(drawn, standby=draw.choice((*POLICIES, "elastic")))
    return replace(drawn, policy=policy, without=without, rollouts=rollouts)


def _with_limits(drawn: Scenario, draw: random.Random) -> Scenario:
    """Bound what jobs, nodes and the fleet may have, each in an eighth of all scenarios.

    In a quarter each, rollouts choose a node, the commands of a step share a session, and commands give up their wait for cores.
    """
    limits = {"queue_limit": draw.choice((2, 5)), "starts_per_s": draw.choice((1.0, 3.0)), "environments_max": draw.choice((1, 2))}
    drawn = replace(drawn, **{limit: value for limit, value in limits.items() if draw.random() < 0.125})
    chooses, shares, gives_up = (draw.random() < 0.25 for _ in range(3))

    def limited(step: Step) -> Step:
        commands = [*step.commands, *([_command(draw)] if shares else [])]
        for command in commands:
            if shares:
                command["session"] = "shared"
            if gives_up and draw.random() < 0.5:
                command["queue_timeout_s"] = draw.choice((0.3, 2.0, 8.0))
        return replace(step, commands=tuple(commands))

    rollouts = []
    for rollout in drawn.rollouts:
        node = f"n{draw.randrange(len(drawn.cores))}" if chooses and draw.random() < 0.5 else ""
        steps = (limited(step) if step.does == "exec" else step for step in rollout.steps)
        rollouts.append(replace(rollout, node=node, steps=tuple(steps)))
    return replace(drawn, rollouts=tuple(rollouts))


def _call(draw: random.Random) -> dict[str, Any]:
    call: dict[str, Any] = {
        "work_s": draw.choice((0.0, 0.05, 0.3, 1.0, 3.0, 8.0)),
        "idempotent": draw.random() < 0.7,
        "answers": draw.choice(((200,), (200,), (200,), (200,), (429, 200), (502, 200), (0, 200), (0,))),
    }
    if draw.random() < 0.1:
        call["timeout_s"] = 2.0
    if draw.random() < 0.1:
        call["work_s"], call["cancel_s"] = 60.0, draw.choice((0.0, 0.5, 3.0))
    return call


def _fault(draw: random.Random, kind: str) -> Fault:
    lasts_s = draw.choice((0.2, 1.0, 2.5, 4.0, 8.0, 20.0))
    amount = draw.choice((1, 2, 3, 5, 10, 30, 100)) if kind == "kill scheduler" else draw.choice((-20.0, 0.2, 0.5, 5.0))
    if kind == "freeze scheduler" and amount != 0.2:  # about until the next one has asked for what the frozen one has not sent
        lasts_s = round(draw.uniform(5.0, 8.0), 3)
    return Fault(round(draw.uniform(BEGIN_S, END_S), 3), kind, draw.randrange(6), lasts_s, amount)


def _rollout(draw: random.Random, number: int) -> Rollout:
    steps = [Step(0.0, "open")]
    for _ in range(draw.randint(1, 6)):
        does = draw.choice(("exec", "exec", "exec", "exec", "file", "work", draw.choice(("cancel", "cancel job", "renew", "exec", "exec"))))
        commands: tuple[dict[str, Any], ...] = ()
        if does == "exec":
            commands = tuple(_command(draw) for _ in range(draw.choice((1, 1, 1, 2))))
        if does == "work":
            commands = tuple(
                {"work_s": draw.choice((0.1, 1.0, 4.0)), "number": draw.randrange(1000), "quota": draw.random() < 0.5}
                for _ in range(draw.choice((1, 2, 3)))
            )
        steps.append(Step(draw.choice((0.0, 0.1, 1.0, 3.0)), does, commands))
    if draw.random() < 0.7:
        steps.append(Step(0.1, "close"))
    lease_s = draw.choice((None, None, None, 4.0, 15.0))
    return Rollout(f"t{number}", draw.choice(("a", "a", "b")), draw.choice((0.0, 0.0, 2.0, 10.0)), tuple(steps), lease_s=lease_s)


def _command(draw: random.Random) -> dict[str, Any]:
    command: dict[str, Any] = {
        "work_s": draw.choice((0.0, 0.05, 0.5, 2.0, 8.0, 20.0)),
        "parallel": draw.choice((0.0, 0.9)),
        "exit": draw.choice((0, 0, 0, 1, 137)),
        "print": draw.randrange(1_000_000),
        "units": draw.choice(((1,), (1, 2), (1, 2, 4))),
    }
    if draw.random() < 0.2:
        command["timeout_s"] = draw.choice((0.2, 3.0))
    if draw.random() < 0.2:
        command["idempotent"] = True
    if draw.random() < 0.15:
        command["work_s"], command["cancel_s"] = 200.0, draw.choice((0.0, 0.5, 3.0, 8.0))
    return command
