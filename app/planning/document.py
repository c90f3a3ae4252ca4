"""The answer as one JSON document: `cores, gpus, memory_mb, target, mean_act, step_duration, tried` and what stands beside them.

Only pure functions on a plan and on what was simulated for it live here. Seconds, MB and numbers are over all nodes, unless a key says
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isinf
from typing import Any

from app.planning.cases import Case, Outcome, account_of
from app.planning.planner import Plan
from app.planning.request import Target
from app.planning.search import knee
from scheduler.sim.trace import Trace

Done = Mapping[Case, Outcome]


def plan_document(plan: Plan, trace: Trace, done: Done) -> dict[str, Any]:
    """Return the document of a plan, where `done` is what was simulated."""
    seed = max(plan.seeds, key=lambda each: plan.targets[each].ratio(done[plan.case(each)]))
    case = plan.case(seed)
    outcome = done[case]
    outcomes = [done[plan.case(each)] for each in plan.seeds]
    limits_mb = max(outcome.limits_mb for outcome in outcomes)
    # With --memory-mb, limits granted by action may add up to more than a node has.
    memory_mb = plan.memory_mb or min(limits_mb, case.options.memory_mb or limits_mb)
    known = any(trajectory.memory_mb for trajectory in trace.trajectories)
    curve = _curve(plan, done)
    return {
        "cores": case.cores,
        "gpus": case.gpus,
        "memory_mb": memory_mb * case.options.nodes if known else None,
        "target": _target(plan, plan.targets[seed]),
        "mean_act": outcome.mean_act,
        "step_duration": outcome.step_duration,
        "seed": seed,
        "policy": plan.request.policy,
        "trajectories": plan.trajectories,
        "nodes": case.options.nodes,
        "cores_per_node": case.options.cores,
        "gpus_per_node": case.options.gpus,
        "memory_mb_per_node": memory_mb if known else None,
        "memory_mb_by_limit": limits_mb * case.options.nodes if known else None,
        "quotas": _quotas(plan, trace),
        "cost": _cost(plan, case, outcome, memory_mb),
        "floor_act": plan.floor_act,
        "limited_by": _limited_by(plan.targets[seed], outcome),
        "by_seed": [{"seed": each, **_figures(done[plan.case(each)]), "target": plan.targets[each].document()} for each in plan.seeds],
        "curve": curve,
        "knee_cores": knee([(point["cores"], point["mean_act"]) for point in curve]),
        "monotone": _monotone(plan, done),
        "sensitivity": [
            {
                "change": variant.change,
                "tile": variant.case.options.tile,
                "spread": variant.case.options.spread_s,
                "speed": variant.case.options.speed,
                **_figures(done[variant.case]),
                "meets_act": _meets_act(plan.targets[plan.seeds[0]], done[variant.case]),
            }
            for variant in plan.variants
        ],
        "simulations": len(done),
        "cpu_s": sum(outcome.cpu_s for outcome in done.values()),
        "tried": [_tried(plan, case, outcome) for case, outcome in done.items()],
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in ("mean_act", "p95_act", "step_duration", "failed")}


def _target(plan: Plan, target: Target) -> dict[str, Any]:
    request = plan.request
    if request.no_worse_than is None:
        return target.document()
    return {**target.document(), "no_worse_than": request.no_worse_than, "than_cores": request.than_cores, "within": request.within}


def _limited_by(target: Target, outcome: Outcome) -> str:
    """Return the figure that comes closest to its limit."""
    ratios = target.ratios(outcome)
    return max(ratios, key=ratios.__getitem__)


def _meets_act(target: Target, outcome: Outcome) -> bool | None:
    """Say whether the target's ACT is met; None where it has none. Steps are as long as the changed thinking makes them."""
    return None if target.mean_act is None else Target(mean_act=target.mean_act).met_by(outcome)


def _quotas(plan: Plan, trace: Trace) -> dict[str, Any]:
    rates = dict(plan.rates)
    return {
        name: {"declared_per_s": quota.rate_per_s, "suffices_per_s": quota.rate_per_s * rates[account_of(quota)]}
        for name, quota in trace.quotas.items()
        if quota.rate_per_s is not None and account_of(quota) in rates
    }


def _cost(plan: Plan, case: Case, outcome: Outcome, memory_mb: int) -> dict[str, float] | None:
    prices = plan.request.prices
    if prices is None:
        return None
    hourly = prices.hourly(case.cores, case.gpus, memory_mb * case.options.nodes)
    return {"per_hour": hourly, "per_step": hourly * outcome.step_duration / 3600}


def _of_search(plan: Plan, case: Case) -> bool:
    """Say whether a case is a size of the search at the first seed, with as many GPUs as the sizes were compared with."""
    return case == plan.request.case(plan.request.size_of(case.cores), plan.searched_gpus, plan.seeds[0])


def _curve(plan: Plan, done: Done) -> list[dict[str, Any]]:
    found = sorted(((case.cores, outcome) for case, outcome in done.items() if _of_search(plan, case)), key=lambda pair: pair[0])
    target = plan.targets[plan.seeds[0]]
    ratios = [(cores, outcome, target.ratio(outcome)) for cores, outcome in found]
    return [{"cores": cores, **_figures(outcome), "of_target": None if isinf(ratio) else ratio} for cores, outcome, ratio in ratios]


def _monotone(plan: Plan, done: Done) -> bool:
    """Say whether, among the sizes simulated at the first seed, none that misses the target is larger than one that meets it."""
    target = plan.targets[plan.seeds[0]]
    found = [(case.cores, target.met_by(outcome)) for case, outcome in done.items() if _of_search(plan, case)]
    least = min((cores for cores, met in found if met), default=0)
    return all(met for cores, met in found if cores >= least)


def _tried(plan: Plan, case: Case, outcome: Outcome) -> dict[str, Any]:
    options = case.options
    target = plan.targets.get(options.seed)
    return {
        "policy": options.policy,
        "nodes": options.nodes,
        "cores": case.cores,
        "gpus": case.gpus,
        "seed": options.seed,
        "tile": options.tile,
        "spread": options.spread_s,
        "speed": options.speed,
        **({"rates": dict(case.rates)} if case.rates else {}),
        **({"memory_mb": options.memory_mb} if options.memory_mb else {}),
        **_figures(outcome),
        "meets": target is not None and target.met_by(outcome),
        "cpu_s": outcome.cpu_s,
    }
