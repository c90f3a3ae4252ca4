"""The plan: which simulations are run, in which order, and what follows from them.

1. The target. A figure in seconds is compared with the *floor* at once, what the trace takes with every action on its best units and
   no queue: below it no machine helps. A policy to be no worse than is simulated at every seed.
2. The *ceiling*: as many cores and GPUs as the trace could ever use at a time. Where they do not meet the target, nothing does.
3. Fewest cores, with as many GPUs as were in use at a time; then fewest GPUs with these cores; then, for each quota, the lowest rate;
   then, where the policy grants memory by action and the trace says what actions use, the least memory.
   With prices, the cheapest of those pairs of cores and GPUs of which none has fewer of both.
4. Around the answer: more sizes for the curve, and other loads and think times on the machines of the answer.

The target must be met at every seed (seeds draw the arrivals of `--tile`). Figures are those of the seed that comes closest to missing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, fsum

from app.planning.cases import Case, Outcome, account_of
from app.planning.pool import Simulations
from app.planning.request import Request, Target, Unreachable
from app.planning.search import bracket, settle
from app.replay.replay_command import default_gpus
from scheduler.policies import make_policy
from scheduler.sim.memory import says_memory
from scheduler.sim.trace import Trace, TraceAction, Trajectory
from tangram.errors import TangramError

MOST_GPUS = 512
RATE_STEPS = 20
"""A quota's rate is searched in so many equal steps up to what is declared."""

MEMORY_STEPS = 20
"""Memory is searched in equal steps, of which so many are what was booked where nothing bounded it."""

CURVE = (0.5, 0.75, 1.25, 1.5, 2.0)
"""Multiples of the answer that the curve has at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another load or think time on the machines of the answer."""

    change: str
    case: Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `size` is that of `Request.cluster`; `searched_gpus` how many GPUs per node the sizes were compared with.

    `memory_mb` is the least of a node that suffices by action; None where limits are booked.
    """

    request: Request
    size: int
    gpus: int
    searched_gpus: int
    seeds: tuple[int, ...]
    targets: dict[int, Target]
    floor_act: float
    trajectories: int
    rates: tuple[tuple[str, float], ...] = ()
    memory_mb: int | None = None
    variants: tuple[Variant, ...] = ()

    def case(self, seed: int) -> Case:
        """Return the answer's simulation at a seed."""
        return self.request.case(self.size, self.gpus, seed)


class Planner:
    """Makes one plan."""

    def __init__(self, request: Request, simulations: Simulations) -> None:
        request.check()
        self._request = request
        self._simulations = simulations
        self._trace = simulations.trace
        # Without --tile nothing is drawn, and all seeds give the same.
        self._seeds = request.seeds if request.base.tile is not None else request.seeds[:1]
        self._prepared = {seed: replace(request.base, seed=seed).prepare(self._trace) for seed in self._seeds}
        self._targets: dict[int, Target] = {}

    def plan(self) -> Plan:
        """Find the answer. Raises `Unreachable` where there is none."""
        self._above_floor()
        self._targets = self._find_targets()
        most, plenty = self._ceiling()
        size = self._fewest_cores(most, plenty)
        gpus = self._fewest_gpus(size, plenty)
        if self._request.prices is not None and self._request.gpus is None:
            size, gpus = self._cheapest(size, gpus, most)
        plan = Plan(
            request=self._request,
            size=size,
            gpus=gpus,
            searched_gpus=plenty,
            seeds=self._seeds,
            targets=self._targets,
            floor_act=max(floor_act(trace) for trace in self._prepared.values()),
            trajectories=len(self._prepared[self._seeds[0]].trajectories),
            rates=self._lowest_rates(size, gpus),
            memory_mb=self._least_memory(size, gpus),
        )
        return replace(plan, variants=self._around(plan, most)) if self._request.extras else plan

    # The target

    def _above_floor(self) -> None:
        request = self._request
        for trace in self._prepared.values():
            floors = (
                (request.target_act_s, floor_act(trace), "act"),
                (request.target_step_s, floor_step(trace, request.base.speed), "step"),
            )
            for seconds, floor_s, name in floors:
                if seconds is not None and seconds < floor_s * (1 - 1e-9):
                    raise Unreachable(
                        f"--target-{name} {seconds:g}: below the floor of this trace, {floor_s:.4g} s with every action on its best units "
                        "and no queue; no number of cores reaches it"
                    )

    def _find_targets(self) -> dict[int, Target]:
        request = self._request
        if request.no_worse_than is None:
            return {seed: Target(mean_act=request.target_act_s, step_duration=request.target_step_s) for seed in self._seeds}
        cases = [request.compared(seed) for seed in self._seeds]
        outcomes = self._simulations.outcomes(cases)
        failed = max(outcome.failed for outcome in outcomes)
        if failed:
            raise TangramError(
                f"--no-worse-than {request.no_worse_than}: on {request.than_cores} cores {failed} actions of the trace never run, "
                "so there is nothing to compare with"
            )
        more = 1.0 + request.within
        return {
            seed: Target(mean_act=outcome.mean_act * more, step_duration=outcome.step_duration * more)
            for seed, outcome in zip(self._seeds, outcomes, strict=True)
        }

    # The search

    def _meets(self, cases: Callable[[int, int], Case], seeds: Sequence[int]) -> Callable[[Sequence[int]], list[bool]]:
        """Return the question whether sizes meet the target at these seeds, where `cases(size, seed)` is simulated."""

        def meets(sizes: Sequence[int]) -> list[bool]:
            self._simulations.outcomes([cases(size, seed) for size in sizes for seed in seeds])
            return [all(self._met(cases(size, seed), seed) for seed in seeds) for size in sizes]

        return meets

    def _met(self, case: Case, seed: int) -> bool:
        return self._targets[seed].met_by(self._simulations.outcomes([case])[0])

    def _ceiling(self) -> tuple[int, int]:
        """Return a size that meets the target at the first seed, and the GPUs per node with which it does."""
        request, seed = self._request, self._seeds[0]
        most = request.size_of(most_units(self._prepared[seed], "cpu.", request.policy))
        nodes, cores = request.cluster(most)
        bound = max(default_gpus(self._trace), min(MOST_GPUS, most_units(self._prepared[seed], "gpu.", request.policy)))
        gpus = request.gpus if request.gpus is not None else -(-bound // nodes) if self._trace.services else 0
        case = request.case(most, gpus, seed)
        (outcome,) = self._simulations.outcomes([case])
        if not self._targets[seed].met_by(outcome):
            raise Unreachable(self._why_not(outcome, self._targets[seed], nodes * cores, nodes * gpus))
        if request.gpus is None and self._trace.services:
            used = max(-(-outcome.peak_cells // nodes), default_gpus(self._trace))
            gpus = used if used < gpus and self._met(request.case(most, used, seed), seed) else gpus
        return most, gpus

    def _why_not(self, outcome: Outcome, target: Target, cores: int, gpus: int) -> str:
        had = f"{cores} cores and {gpus} GPU{'s'[: gpus != 1]}" if self._trace.services else f"{cores} cores"
        if outcome.failed:
            return f"no number of cores meets the target: even with {had}, {outcome.failed} actions can never run ({self._request.policy})"
        quotas = "; what the quotas of the trace let through may be what limits it" if self._trace.quotas else ""
        limits = " and ".join(f"{key.replace('_', ' ')} {value:.4g} s" for key, value in target.document().items())
        return (
            f"no number of cores meets the target of {limits}: under {self._request.policy}, with as many as the trace can ever use "
            f"({had}), mean ACT is {outcome.mean_act:.4g} s and the step takes {outcome.step_duration:.4g} s{quotas}"
        )

    def _fewest_cores(self, most: int, gpus: int) -> int:
        request, seed = self._request, self._seeds[0]
        (ceiling,) = self._simulations.outcomes([request.case(most, gpus, seed)])
        # As many cores as are in use on average are too few as a rule, and twice as many enough.
        first = (request.size_of(ceil(ceiling.mean_cores)), request.size_of(ceil(2 * ceiling.mean_cores)))
        return self._fewest(lambda size, seed: request.case(size, gpus, seed), most, "cores", first)

    def _fewest(self, cases: Callable[[int, int], Case], most: int, what: str, first: Sequence[int] = ()) -> int:
        found = 0
        for seed in self._seeds:
            meets = self._meets(cases, (seed,))
            if found and meets([found]) == [True]:
                continue
            found = bracket(meets, found, most, self._simulations.at_once, first)
            first = (round(found * 1.1), round(found * 1.2))
        settled = settle(self._meets(cases, self._seeds), found, most)
        if settled is None:
            raise Unreachable(f"no number of {what} up to {most} meets the target at all of the seeds {', '.join(map(str, self._seeds))}")
        return settled

    def _fewest_gpus(self, size: int, plenty: int) -> int:
        request = self._request
        if request.gpus is not None or not plenty:
            return plenty
        return self._fewest(lambda gpus, seed: request.case(size, gpus, seed), plenty, "GPUs")

    def _cheapest(self, size: int, gpus: int, most: int) -> tuple[int, int]:
        """Return the cheapest of the pairs of which none has fewer of both, from the one with the fewest cores on."""
        best, best_price = (size, gpus), self._price(size, gpus)
        for fewer in range(gpus - 1, 0, -1):
            if not self._met(self._request.case(most, fewer, self._seeds[0]), self._seeds[0]):
                break
            try:
                more = self._fewest(lambda size, seed, fewer=fewer: self._request.case(size, fewer, seed), most, "cores", (size,))  # type: ignore[misc]
            except Unreachable:
                break
            if (price := self._price(more, fewer)) < best_price:
                best, best_price = (more, fewer), price
        return best

    def _price(self, size: int, gpus: int) -> float:
        assert self._request.prices is not None
        case = self._request.case(size, gpus, self._seeds[0])
        outcome = self._simulations.outcomes([case])[0]
        memory_mb = outcome.booked_mb if self._by_action else outcome.limits_mb
        return self._request.prices.hourly(case.cores, case.gpus, memory_mb * case.options.nodes)

    @property
    def _by_action(self) -> bool:
        return make_policy(self._request.policy).rules.grants_memory and any(map(says_memory, self._trace.trajectories))

    def _least_memory(self, size: int, gpus: int) -> int | None:
        """Return the least memory of a node, MB, with which the target is still met, to a twentieth of what was booked without a bound.

        The limits of all environments at a time always suffice: nothing ever waits for memory then. With `--memory-mb` there is no search.
        """
        request = self._request
        if not self._by_action or request.base.memory_mb is not None:
            return None
        outcomes = self._simulations.outcomes([request.case(size, gpus, seed) for seed in self._seeds])
        step_mb = ceil(max(outcome.booked_mb for outcome in outcomes) / MEMORY_STEPS)
        if not step_mb:  # no environment opens
            return None
        most = max(MEMORY_STEPS, ceil(max(outcome.limits_mb for outcome in outcomes) / step_mb))

        def case(steps: int, seed: int) -> Case:
            return request.case(size, gpus, seed, memory_mb=steps * step_mb)

        return step_mb * self._fewest(case, most, f"steps of {step_mb} MB", (MEMORY_STEPS // 2, MEMORY_STEPS))

    def _lowest_rates(self, size: int, gpus: int) -> tuple[tuple[str, float], ...]:
        """Return for each account the lowest fraction of its declared rate that suffices, with the rates before it lowered, too."""
        used = {action.quota for action in self._trace.actions()}
        found = [quota for name, quota in self._trace.quotas.items() if name in used and quota.rate_per_s is not None]
        rates: tuple[tuple[str, float], ...] = ()
        for account in dict.fromkeys(account_of(quota) for quota in found):
            steps = self._fewest(self._at_rate(size, gpus, account, rates), RATE_STEPS, f"{RATE_STEPS}ths of the rate of {account!r}")
            rates = (*rates, (account, steps / RATE_STEPS))
        return rates

    def _at_rate(self, size: int, gpus: int, account: str, lowered: tuple[tuple[str, float], ...]) -> Callable[[int, int], Case]:
        """Return the case of a number of steps of an account's declared rate, with the rates of others that are lowered already."""

        def case(steps: int, seed: int) -> Case:
            rates = lowered if steps == RATE_STEPS else (*lowered, (account, steps / RATE_STEPS))
            return self._request.case(size, gpus, seed, rates)

        return case

    # Around the answer

    def _around(self, plan: Plan, most: int) -> tuple[Variant, ...]:
        """Simulate more sizes for the curve, and other loads; return these."""
        seed, request = self._seeds[0], self._request
        asked = {case.options.nodes * (case.options.cores or 0) for case in self._simulations.done if case.options.policy == request.policy}
        sizes = {max(1, round(plan.size * factor)) for factor in CURVE}
        near = {size for size in sizes if any(abs(cores / plan.case(seed).cores - size / plan.size) < 0.1 for cores in asked)}
        more = [request.case(size, plan.searched_gpus, seed) for size in sorted(sizes - near) if size <= most]
        variants = self._variants(plan.case(seed))
        self._simulations.outcomes([*(variant.case for variant in variants), *more])
        return tuple(variants)

    def _variants(self, answer: Case) -> list[Variant]:
        options = answer.options
        count = options.tile or len(self._trace.trajectories)
        # A trace with arrivals of its own is repeated over the time in which they came.
        spread_s = options.spread_s if options.tile else max(trajectory.arrival_s for trajectory in self._trace.trajectories)
        # Of few trajectories both are the same number.
        tiles = sorted({ceil(count * factor) for factor in (1.25, 1.5)})
        changes = [(f"{tile / count:.3g} × the trajectories ({tile})", replace(options, tile=tile, spread_s=spread_s)) for tile in tiles]
        if options.tile and spread_s:
            changes.append(("arrivals in half the time", replace(options, spread_s=spread_s / 2)))
        changes += [(f"thinking {factor:g} × as fast", replace(options, speed=options.speed * factor)) for factor in (1.5, 0.67)]
        return [Variant(change=change, case=replace(answer, options=changed)) for change, changed in changes]


def floor_act(trace: Trace) -> float:
    """Return the mean ACT with every action on its best units and no queue."""
    floors = [action.floor_s for action in trace.actions()]
    return fsum(floors) / max(1, len(floors))


def floor_step(trace: Trace, speed: float) -> float:
    """Return the time from the first arrival to the last result with every action on its best units and no queue."""
    first = min(trajectory.arrival_s for trajectory in trace.trajectories)
    return max(trajectory.arrival_s + _alone_s(trajectory, speed) for trajectory in trace.trajectories) - first


def _alone_s(trajectory: Trajectory, speed: float) -> float:
    return fsum(step.think_s / speed + max(action.floor_s for action in step.actions) for step in trajectory.steps)


def most_units(trace: Trace, prefix: str, policy: str) -> int:
    """Return the most units of a kind that the trajectories can use at a time, 1 at least: in pods, as many as the pods have."""
    name, _, number = policy.partition(":")
    pod = int(number) if name == "static" and prefix == "cpu." else 0
    return max(1, sum(max(pod, *(_units(step.actions, prefix) for step in each.steps)) for each in trace.trajectories))


def _units(actions: Sequence[TraceAction], prefix: str) -> int:
    return sum(max(action.elasticity.units) for action in actions if action.kind.startswith(prefix))
