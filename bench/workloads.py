"""Synthetic rollouts in the shape of the paper's workloads, as `scheduler.sim.trace.Trace`.

What may live here: frozen descriptions of distributions, and pure functions that draw from them. Each trajectory has a
random stream of its own, made from workload, seed and number: the first N trajectories of a larger batch are the
batch of N. The figures of the dataclasses are the whole truth; this is what they say:

| workload     | a trajectory is                                                                                        |
|--------------|--------------------------------------------------------------------------------------------------------|
| `ai-coding`  | 12 to 40 turns (uniform) after thinking of 4.7 s (exponential); 80 % short serial commands of `SHELL`, |
|              | 20 % builds (lognormal, p = 0.9, up to 8 cores); at its end, a test run of about 80 core-seconds       |
|              | (p = 0.97, up to 32 cores), the reward. 1 to 4 GB of memory                                            |
| `deepsearch` | 8 to 24 turns (uniform) after thinking of 6 s (exponential), each one to three API calls at once; at   |
|              | its end, one generation by the judge. The quota grows with the number of trajectories                  |
| `mopd`       | one long generation, normal around 70 s, then log-probs of one, rarely two or three, of nine teachers  |
|              | (Zipf, exponent 0.8), 1 s of work each                                                                 |
| `mixed`      | half `ai-coding`, a quarter each `deepsearch` and `mopd`, as three jobs                                |

Arrivals are uniform over 60 s, in `mopd` over 5 s. What was published about AI coding fixes two sums of `AiCoding`:
sandboxes in use for 47 % of a trajectory's life, and a mean execution of 0.975 s where cores are granted per action.
With thinking at 4.7 s the first asks for 4.17 s of execution per action. Both can hold only for pods of one core: the
speed-up between four cores and the best amount is too small. So the calibration means pods of one core. `pod_use`
works out the first of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

from scheduler.model import QuotaSpec, ServiceSpec
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Amdahl, Elasticity, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A class of serial shell commands: its share, and a lognormal duration by median and sigma of the logarithm."""

    name: str
    weight: float
    median_s: float
    sigma: float


SHELL = (
    Command(name="cat", weight=0.25, median_s=0.03, sigma=0.6),
    Command(name="grep", weight=0.25, median_s=0.10, sigma=0.9),
    Command(name="sed", weight=0.15, median_s=0.05, sigma=0.5),
    Command(name="git", weight=0.10, median_s=0.20, sigma=0.7),
    Command(name="python", weight=0.25, median_s=1.95, sigma=1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AiCoding:
    """Coding agents in sandboxes. Lognormal work is given by its mean in core-seconds and sigma of the logarithm."""

    name: str = "ai-coding"
    spread_s: float = 60.0
    turns: tuple[int, int] = (12, 40)
    think_mean_s: float = 4.7
    build_share: float = 0.2
    commands: tuple[Command, ...] = SHELL
    build_mean_s: float = 2.75
    build_sigma: float = 0.8
    build_parallel: float = 0.9
    build_units: tuple[int, ...] = (1, 2, 4, 8)
    test_mean_s: float = 80.0
    test_sigma: float = 0.3
    test_parallel: float = 0.97
    test_units: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    memory_mb: tuple[int, ...] = (1024, 2048, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSearch:
    """Web search under a quota, then a judge. The quota's figures are per trajectory of the batch."""

    name: str = "deepsearch"
    spread_s: float = 60.0
    turns: tuple[int, int] = (8, 24)
    think_mean_s: float = 6.0
    calls: tuple[int, ...] = (1, 1, 2, 3)
    call_median_s: float = 0.6
    call_sigma: float = 0.7
    rate_per_s: float = 0.2
    concurrency: float = 0.25
    judge_mean_s: float = 1.5
    judge_sigma: float = 0.4
    judge_efficiency: tuple[tuple[int, float], ...] = ((1, 1.0), (2, 0.92), (4, 0.8))
    judge_memory_mb: int = 60_000
    judge_restore_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mopd:
    """Distillation from many teachers; how often each is asked follows Zipf's law."""

    name: str = "mopd"
    spread_s: float = 5.0
    think_mean_s: float = 70.0
    think_sd_s: float = 40.0
    teachers: int = 9
    zipf: float = 0.8
    asked: tuple[int, ...] = (*(1,) * 18, 2, 3)
    work_mean_s: float = 1.0
    work_sigma: float = 0.3
    efficiency: tuple[tuple[int, float], ...] = ((1, 1.0), (2, 0.92), (4, 0.8))
    memory_mb: int = 60_000
    restore_s: float = 0.5


def ai_coding(trajectories: int, seed: int) -> Trace:
    """Draw coding rollouts."""
    shape = AiCoding()
    return Trace(trajectories=tuple(_coding_rollout(shape, number, _stream(shape.name, seed, number)) for number in range(trajectories)))


def deepsearch(trajectories: int, seed: int) -> Trace:
    """Draw search rollouts, a judge, and a quota for that many of them."""
    shape = DeepSearch()
    drawn = tuple(_search_rollout(shape, number, _stream(shape.name, seed, number)) for number in range(trajectories))
    concurrency = max(1, math.ceil(shape.concurrency * trajectories))
    quota = QuotaSpec(name="search", rate_per_s=max(1.0, shape.rate_per_s * trajectories), concurrency=concurrency)
    cells = tuple(amount for amount, _ in shape.judge_efficiency)
    judge = ServiceSpec(name="judge", cells=cells, memory_mb=shape.judge_memory_mb, restore_s=shape.judge_restore_s)
    return Trace(trajectories=drawn, services={judge.name: judge}, quotas={quota.name: quota})


def mopd(trajectories: int, seed: int, shape: Mopd | None = None) -> Trace:
    """Draw rollouts that ask teachers for log-probs."""
    shape = shape or Mopd()
    cells = tuple(amount for amount, _ in shape.efficiency)
    teachers = [
        ServiceSpec(name=f"teacher-{number}", cells=cells, memory_mb=shape.memory_mb, restore_s=shape.restore_s)
        for number in range(shape.teachers)
    ]
    drawn = tuple(_teacher_rollout(shape, number, _stream(shape.name, seed, number)) for number in range(trajectories))
    return Trace(trajectories=drawn, services={teacher.name: teacher for teacher in teachers})


def mixed(trajectories: int, seed: int) -> Trace:
    """Draw half `ai-coding`, a quarter `deepsearch` and the rest `mopd`, as jobs of their own, in order of arrival."""
    coding, search = round(0.5 * trajectories), round(0.25 * trajectories)
    parts = [ai_coding(coding, seed), deepsearch(search, seed), mopd(trajectories - coding - search, seed)]
    return Trace(
        trajectories=tuple(sorted((each for part in parts for each in part.trajectories), key=lambda each: each.arrival_s)),
        services={name: spec for part in parts for name, spec in part.services.items()},
        quotas={name: spec for part in parts for name, spec in part.quotas.items()},
    )


WORKLOADS: dict[str, Callable[[int, int], Trace]] = {"ai-coding": ai_coding, "deepsearch": deepsearch, "mopd": mopd, "mixed": mixed}
"""The generators by name: a number of trajectories and a seed lead to a trace."""


def pod_use(trace: Trace, pod_cores: int) -> float:
    """Return the mean share of a trajectory's life in which a pod of `pod_cores` is in use, where nothing queues."""
    pod_s = [sum(_in_pod_s(action, pod_cores) for action in each.actions()) for each in trace.trajectories]
    think_s = [sum(step.think_s for step in each.steps) for each in trace.trajectories]
    return mean(busy / (busy + idle) for busy, idle in zip(pod_s, think_s, strict=True))


def _in_pod_s(action: TraceAction, cores: int) -> float:
    allowed = [amount for amount in action.elasticity.units if amount <= cores]
    return min((action.elasticity.duration_s(action.work_s, amount) for amount in allowed), default=math.inf)


def _stream(name: str, seed: int, number: int) -> Random:
    return Random(f"{name}/{seed}/{number}")


def _lognormal(draw: Random, mean_s: float, sigma: float) -> float:
    return draw.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)


def _thought(draw: Random, mean_s: float) -> float:
    return draw.expovariate(1.0 / mean_s)


def _coding_rollout(shape: AiCoding, number: int, draw: Random) -> Trajectory:
    build = Elasticity(units=shape.build_units, curve=Amdahl(shape.build_parallel))
    test = Elasticity(units=shape.test_units, curve=Amdahl(shape.test_parallel))
    arrival_s, memory_mb = draw.uniform(0.0, shape.spread_s), draw.choice(shape.memory_mb)
    steps = []
    for _ in range(draw.randint(*shape.turns)):
        think_s = _thought(draw, shape.think_mean_s)
        if draw.random() < shape.build_share:
            work_s = _lognormal(draw, shape.build_mean_s, shape.build_sigma)
            action = TraceAction(kind="cpu.exec", work_s=work_s, elasticity=build, action_class="build")
        else:
            (command,) = draw.choices(shape.commands, weights=[each.weight for each in shape.commands])
            work_s = draw.lognormvariate(math.log(command.median_s), command.sigma)
            action = TraceAction(kind="cpu.exec", work_s=work_s, action_class=command.name)
        steps.append(Step(think_s=think_s, actions=(action,)))
    work_s = _lognormal(draw, shape.test_mean_s, shape.test_sigma)
    reward = TraceAction(kind="cpu.exec", work_s=work_s, elasticity=test, action_class="pytest-full")
    steps.append(Step(think_s=_thought(draw, shape.think_mean_s), actions=(reward,)))
    return Trajectory(trajectory=f"c{number:05d}", job=shape.name, arrival_s=arrival_s, memory_mb=memory_mb, steps=tuple(steps))


def _search_rollout(shape: DeepSearch, number: int, draw: Random) -> Trajectory:
    arrival_s = draw.uniform(0.0, shape.spread_s)
    steps = []
    for _ in range(draw.randint(*shape.turns)):
        think_s = _thought(draw, shape.think_mean_s)
        waits = [draw.lognormvariate(math.log(shape.call_median_s), shape.call_sigma) for _ in range(draw.choice(shape.calls))]
        calls = [TraceAction(kind="api.call", quota="search", work_s=wait_s, action_class="search") for wait_s in waits]
        steps.append(Step(think_s=think_s, actions=tuple(calls)))
    verdict = TraceAction(
        kind="gpu.generate",
        service="judge",
        work_s=_lognormal(draw, shape.judge_mean_s, shape.judge_sigma),
        elasticity=_on_cells(shape.judge_efficiency),
        action_class="judge",
    )
    steps.append(Step(think_s=_thought(draw, shape.think_mean_s), actions=(verdict,)))
    return Trajectory(trajectory=f"s{number:05d}", job=shape.name, arrival_s=arrival_s, steps=tuple(steps))


def _teacher_rollout(shape: Mopd, number: int, draw: Random) -> Trajectory:
    arrival_s = draw.uniform(0.0, shape.spread_s)
    think_s = max(1.0, draw.gauss(shape.think_mean_s, shape.think_sd_s))
    asked = _distinct(draw, zipf_weights(shape.teachers, shape.zipf), draw.choice(shape.asked))
    actions = [
        TraceAction(
            kind="gpu.logprobs",
            service=f"teacher-{teacher}",
            work_s=_lognormal(draw, shape.work_mean_s, shape.work_sigma),
            elasticity=_on_cells(shape.efficiency),
            action_class="teacher",
        )
        for teacher in asked
    ]
    return Trajectory(
        trajectory=f"m{number:05d}", job=shape.name, arrival_s=arrival_s, steps=(Step(think_s=think_s, actions=tuple(actions)),)
    )


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return how often each of `count` things is asked for, relative to the first."""
    return [1.0 / (rank + 1) ** exponent for rank in range(count)]


def _distinct(draw: Random, weights: Sequence[float], count: int) -> list[int]:
    """Draw `count` different indices, each time among those left by their weights."""
    left = dict(enumerate(weights))
    drawn = []
    for _ in range(count):
        (index,) = draw.choices(list(left), weights=list(left.values()))
        del left[index]
        drawn.append(index)
    return drawn


def _on_cells(efficiency: tuple[tuple[int, float], ...]) -> Elasticity:
    return Elasticity(units=tuple(amount for amount, _ in efficiency), curve=Table(efficiency))
