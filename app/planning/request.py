"""What is asked of a plan, and what it must meet.

What may live here: the words of the question as values, checked against each other, and the comparison of an outcome with a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from app.planning.cases import Case, Outcome
from app.planning.prices import Prices
from app.replay.replay_command import ReplayOptions
from tangram.errors import InvalidAction, TangramError

ROUNDING = 1e-9
"""The part by which two figures of the same simulation may differ."""


class Unreachable(TangramError, ValueError):
    """Raised when no number of machines meets a target; the message says what is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Seconds that mean ACT and step duration may not exceed; None where they do not matter."""

    mean_act: float | None = None
    step_duration: float | None = None

    def ratio(self, outcome: Outcome) -> float:
        """Return the larger ratio of a figure to its limit: 1 and less meets the target. Infinite where an action failed."""
        if outcome.failed:
            return math.inf
        return max(self.ratios(outcome).values(), default=0.0)

    def ratios(self, outcome: Outcome) -> dict[str, float]:
        """Return the ratio of each figure to its limit. A limit of 0, as of actions that take no time, is met by 0 alone."""
        values = {key: float(getattr(outcome, key)) for key in self.document()}
        return {key: values[key] / limit if limit else 1.0 if not values[key] else math.inf for key, limit in self.document().items()}

    def met_by(self, outcome: Outcome) -> bool:
        """Say whether an outcome meets the target."""
        return self.ratio(outcome) <= 1.0 + ROUNDING

    def document(self) -> dict[str, float]:
        """Return the limits that there are."""
        pairs = {"mean_act": self.mean_act, "step_duration": self.step_duration}
        return {key: value for key, value in pairs.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The question. `base` has the words that every simulation shares, apart from cluster, policy and seed.

    Of `nodes` and `cores_per_node` at most one is given: so many nodes of cores to be found, or nodes of so many cores, to be counted.
    `within` is the part by which a target of `no_worse_than` may be missed.
    """

    base: ReplayOptions
    policy: str = "elastic"
    target_act_s: float | None = None
    target_step_s: float | None = None
    no_worse_than: str | None = None
    than_cores: int | None = None
    within: float = 0.0
    seeds: tuple[int, ...] = (0, 1, 2)
    nodes: int | None = None
    cores_per_node: int | None = None
    gpus: int | None = None
    prices: Prices | None = None
    extras: bool = field(default=True)

    def check(self) -> None:
        """Raise `InvalidAction` or `TangramError` where the words do not go together."""
        targets = (self.target_act_s, self.target_step_s, self.no_worse_than)
        if sum(target is not None for target in targets) != 1:
            raise TangramError("say one target: --target-act, --target-step, or --no-worse-than with --than-cores")
        if (self.no_worse_than is None) != (self.than_cores is None):
            raise TangramError("--no-worse-than POLICY and --than-cores N go together")
        if self.nodes is not None and self.cores_per_node is not None:
            raise TangramError("say --nodes or --cores-per-node: what the other one comes to is the answer")
        for name, seconds in (("--target-act", self.target_act_s), ("--target-step", self.target_step_s)):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise InvalidAction(name, f"must be a number of seconds above 0, not {seconds}")
        if not 0 <= self.within < float("inf"):
            raise InvalidAction("--within", f"must be a percentage, 0 or more, not {self.within * 100:g}")

    def cluster(self, size: int) -> tuple[int, int]:
        """Return nodes and cores of each for a size of the search."""
        if self.cores_per_node is not None:
            return size, self.cores_per_node
        return self.nodes or 1, size

    def size_of(self, cores: int) -> int:
        """Return the least size with so many cores."""
        return max(1, -(-cores // (self.cores_per_node or self.nodes or 1)))

    def case(self, size: int, gpus: int | None, seed: int, rates: tuple[tuple[str, float], ...] = (), memory_mb: int | None = None) -> Case:
        """Return the case of a size of the search, with so many GPUs per node, and so many MB where a number is given."""
        nodes, cores = self.cluster(size)
        base = replace(self.base, memory_mb=memory_mb or self.base.memory_mb)
        return Case(options=replace(base, policy=self.policy, nodes=nodes, cores=cores, gpus=gpus, seed=seed), rates=rates)

    def compared(self, seed: int) -> Case:
        """Return the case of the policy that the plan may not be worse than, on one node."""
        assert self.no_worse_than is not None
        # With --memory-mb, it is compared with what books the limit of each environment, as every policy but elastic does anyway.
        base = replace(self.base, without=("memory",) if self.no_worse_than == "elastic" else ())
        return Case(options=replace(base, policy=self.no_worse_than, nodes=1, cores=self.than_cores, gpus=self.gpus, seed=seed))
