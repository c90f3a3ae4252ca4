"""What the core expects of durations, and how it learns them.

An action's *work* is `T_ori`, its seconds on one unit. What is expected of it, in this order:

1. what earlier actions of its class took (job, kind, class or service, largest amount), once there are some;
2. what was declared, times what this class's declarations have been wrong by, where that has been nearer;
3. what the same class took in other jobs; what the kind has taken, whatever the class; what it usually takes.

Few observations are pulled towards the level above them, as if it were `PRIOR` observations more. Three things are
robust by construction: an observation counts at most `OUTLIER` medians, older ones fade, and expectations of what is
left of a running action come from the distribution, not from the mean: what has run for long is expected to run on.

Also learned, from core-seconds: how many units a class really uses. A program that burns one core on eight is given one.

Who goes first on cores is not decided by these durations, but by the work that is left (`learning/`).

What may live here: numbers and the tables of them. No clock; time only passes by observations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from tangram.action import Action
from tangram.elasticity import Amdahl, Curve, Table

USUAL_S: Final[dict[str, float]] = {
    "cpu.open": 0.05,
    "cpu.exec": 1.0,
    "cpu.read_file": 0.005,
    "cpu.write_file": 0.005,
    "cpu.snapshot": 1.0,
    "cpu.close": 0.02,
    "gpu.score": 0.6,
    "gpu.logprobs": 0.6,
    "gpu.generate": 3.0,
    "api.call": 0.8,
}
"""Seconds on one unit by kind, for actions of which nothing is known."""

USUAL_OTHER_S: Final = 1.0

PRIOR: Final = 2.0
"""Observations that the level above a class counts for."""

FADING: Final = 0.998
"""Weight that an observation keeps for each one after it: some five hundred of them count."""

OUTLIER: Final = 8.0
"""Medians of its class that one observation counts for at most, once `SETTLED` of them are known."""

SETTLED: Final = 8
BINS_PER_OCTAVE: Final = 2
SMALLEST_S: Final = 1e-3
BINS: Final = 56
EDGES: Final = tuple(SMALLEST_S * 2.0 ** (index / BINS_PER_OCTAVE) for index in range(BINS - 1))
"""Upper edges of the histogram's bins: 1 ms to some 37 hours; the last bin has none."""

LEAST_LEFT: Final = 0.05
"""Share of its work that an action which has run longer than expected is still taken to need, where nothing is learned."""

USED: Final = 0.4
"""Part of the declared speed-up that a class must show in core-seconds for its curve to be believed."""

BUSY_UNITS: Final = 1.5
"""Units from which on core-seconds say something about parallelism."""

MEASURED: Final = "cpu.exec"
"""The kind whose core-seconds are measured; of all others nobody knows them."""

MOST_CLASSES: Final = 20_000
"""Classes that are remembered, some 2 kB each; beyond them, those that nobody has asked for longest are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One action that succeeded: what it declared, the units it held on average, its seconds and its core-seconds.

    `cpu_s` is None where nobody measured it (`MEASURED`). `environment` is the one that it ran in.
    """

    job: str
    kind: str
    action_class: str | None
    service: str | None
    units: tuple[int, ...]
    curve: Curve
    held_units: float
    execution_s: float
    cpu_s: float | None
    environment: str | None = None


@dataclass(slots=True)
class Distribution:
    """The work of one class: a histogram of fading weights over logarithmic bins, with the sum of each."""

    weights: list[float] = field(default_factory=lambda: [0.0] * BINS)
    sums: list[float] = field(default_factory=lambda: [0.0] * BINS)
    count: float = 0.0
    total: float = 0.0
    scale: float = 1.0
    most_s: float = math.inf
    until_looked: int = SETTLED

    def add(self, work_s: float) -> None:
        """Take in an observation; what lies far out counts as less."""
        work_s = min(work_s, self.most_s)
        # Instead of fading everything that is there, what comes later weighs more; sums are rescaled now and then.
        self.scale /= FADING
        index = bisect_right(EDGES, work_s)
        self.weights[index] += self.scale
        self.sums[index] += self.scale * work_s
        self.total += self.scale * work_s
        self.count = self.count * FADING + 1.0
        self.until_looked -= 1
        if self.until_looked <= 0:
            self.most_s, self.until_looked = OUTLIER * self.quantile(0.5), SETTLED
        if self.scale > 1e12:
            self._rescale()

    def _rescale(self) -> None:
        factor = 1.0 / self.scale
        self.weights = [weight * factor for weight in self.weights]
        self.sums = [amount * factor for amount in self.sums]
        self.total *= factor
        self.scale = 1.0

    def mean_s(self) -> float:
        """Return the mean work; there must be an observation."""
        return self.total / (self.scale * self.count)

    def quantile(self, part: float) -> float:
        """Return the mean of the bin in which the quantile lies."""
        wanted, seen = part * self.scale * self.count, 0.0
        last = 0.0
        for weight, amount in zip(self.weights, self.sums, strict=True):
            if weight:
                seen += weight
                last = amount / weight
                if seen >= wanted:
                    break
        return last

    def left_s(self, done_s: float) -> float | None:
        """Return the mean work beyond `done_s` of those that had more than that; None where none had."""
        weight = amount = 0.0
        for index in range(bisect_right(EDGES, done_s) + 1, BINS):
            weight += self.weights[index]
            amount += self.sums[index]
        return amount / weight - done_s if weight > 1e-9 * self.scale else None


@dataclass(slots=True)
class ClassRecord:
    """All that is known of one class of actions."""

    work: Distribution = field(default_factory=Distribution)
    log_ratio: float = 0.0
    ratios: float = 0.0
    error_declared: float = 0.0
    error_learned: float = 0.0
    parallels: float = 0.0
    parallel_units: float = 0.0
    parallel_speed: float = 0.0
    declared_speed: float = 0.0

    def declared_nearer(self) -> bool:
        """Say whether declarations, corrected by their usual ratio, have been nearer than the class's mean."""
        return self.error_declared <= self.error_learned

    def used_fraction(self) -> float | None:
        """Return Amdahl's fraction that core-seconds speak of, where they contradict what was declared."""
        if self.parallels < 2.0 or self.parallel_speed >= USED * self.declared_speed:
            return None
        speed, units = max(1.0, self.parallel_speed / self.parallels), self.parallel_units / self.parallels
        return min(1.0, (1.0 - 1.0 / speed) / (1.0 - 1.0 / units))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of one action: its work, and the curve its units follow.

    `record` gives what is left of it while it runs; None where nothing is learned, and then `declared` says whether
    the work is more than what its kind usually takes.
    """

    work_s: float
    curve: Curve
    record: ClassRecord | None = None
    declared: bool = True

    def left_s(self, done_s: float) -> float:
        """Return the work that is expected to be left after `done_s` of it."""
        if self.record is not None:
            left = self.record.work.left_s(done_s)
            # Beyond all that was ever seen, durations of commands have heavy tails: as much again is a fair guess.
            return left if left is not None else max(done_s, LEAST_LEFT * self.work_s)
        if self.declared:
            return max(self.work_s - done_s, LEAST_LEFT * self.work_s)
        return max(self.work_s - done_s, done_s)


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far expectations were off: factors (2 means twice or half) that half and nine in ten of them stay within."""

    predictions: int
    factor_p50: float
    factor_p90: float


class Durations:
    """The expectations of one scheduler. With `learning` off, only declarations and kinds count."""

    def __init__(self, *, learning: bool, history: Sequence[Observation] = ()) -> None:
        self._learning = learning
        self._classes: OrderedDict[tuple[object, ...], ClassRecord] = OrderedDict()
        self._errors: list[int] = [0] * 161
        for observation in history if learning else ():
            self._take_history(observation)

    def expect(self, action: Action) -> Estimate:
        """Return what is expected of an action."""
        declared = action.work_s
        usual = USUAL_S.get(action.kind, USUAL_OTHER_S)
        if not self._learning:
            return Estimate(declared if declared is not None else usual, action.curve, declared=declared is not None)
        units = action.units
        record, wide, kind = self._records(action.job, action.kind, action.action_class or action.service, units[-1])
        above = usual
        for level in (kind, wide):
            if level.work.count:
                above = (level.work.count * level.work.mean_s() + PRIOR * above) / (level.work.count + PRIOR)
        curve = action.curve
        if units[-1] > 1:
            fraction = record.used_fraction()
            curve = curve if fraction is None else Amdahl(fraction)
        known = record.work.count
        if declared is not None and (not known or record.declared_nearer()):
            ratio = math.exp(record.log_ratio * record.ratios / (record.ratios + PRIOR))
            return Estimate(declared * ratio, curve)
        work_s = (known * record.work.mean_s() + PRIOR * above) / (known + PRIOR) if known else above
        return Estimate(work_s, curve, record if known >= 2.0 else None, declared=False)

    def observe(
        self, action: Action, expected: Estimate, *, work_s: float, held_units: float, execution_s: float, cpu_s: float | None
    ) -> None:
        """Learn from an action that succeeded: `work_s` of one unit in `execution_s`, holding `held_units` on average."""
        if expected.work_s > 0 and work_s > 0:
            off = round(8 * math.log2(work_s / expected.work_s))
            self._errors[max(-80, min(80, off)) + 80] += 1
        if not self._learning:
            return
        units = action.units
        for record in self._records(action.job, action.kind, action.action_class or action.service, units[-1]):
            if action.work_s and work_s > 0:
                _compare(record, action.work_s, work_s)
            _learn(record, work_s, held_units, execution_s, cpu_s, speed_on(action.curve, held_units))

    def error(self) -> PredictionError:
        """Return how far off expectations were so far."""
        folded = [self._errors[80 + off] + (self._errors[80 - off] if off else 0) for off in range(81)]
        count = sum(folded)
        return PredictionError(count, _factor(folded, 0.5 * count), _factor(folded, 0.9 * count))

    def _take_history(self, seen: Observation) -> None:
        speed = speed_on(seen.curve, seen.held_units)
        for record in self._records(seen.job, seen.kind, seen.action_class or seen.service, seen.units[-1]):
            _learn(record, seen.execution_s * speed, seen.held_units, seen.execution_s, seen.cpu_s, speed)

    def _records(self, job: str, kind: str, name: str | None, most_units: int) -> tuple[ClassRecord, ClassRecord, ClassRecord]:
        """Return the records of the class in its job, of the same class in all jobs, and of its kind, elastic or not."""
        return self._record((job, kind, name, most_units)), self._record((kind, name, most_units)), self._record((kind, most_units > 1))

    def _record(self, key: tuple[object, ...]) -> ClassRecord:
        record = self._classes.get(key)
        if record is None:
            record = self._classes[key] = ClassRecord()
            if len(self._classes) > MOST_CLASSES:
                self._classes.popitem(last=False)
        else:
            self._classes.move_to_end(key)
        return record


def expected_s(estimate: Estimate, units: Iterable[int]) -> tuple[float, ...]:
    """Return the expected duration in seconds on each of some amounts, ascending in units."""
    return tuple(estimate.work_s / speed_on(estimate.curve, amount) for amount in units)


@lru_cache(maxsize=4096)
def speed_on(curve: Curve, units: float) -> float:
    """Return the speed-up on `units`, which may be a mean of amounts: between two points of a table it is on the line."""
    if units <= 0:
        return 1.0
    if not isinstance(curve, Table):
        return curve.speedup(max(1.0, units))
    points = sorted({1: 1.0, **{amount: value * amount for amount, value in curve.efficiency}}.items())
    below = max((point for point in points if point[0] <= units), default=points[0])
    above = min((point for point in points if point[0] >= units), default=points[-1])
    if above[0] <= below[0]:
        return below[1]
    return below[1] + (above[1] - below[1]) * (units - below[0]) / (above[0] - below[0])


def _compare(record: ClassRecord, declared_s: float, work_s: float) -> None:
    """Note how far a declaration and the class's mean were from the truth."""
    ratio = math.log(work_s / declared_s)
    if record.work.count:
        learned = abs(math.log(work_s / max(record.work.mean_s(), SMALLEST_S)))
        record.error_learned += 0.1 * (learned - record.error_learned)
        record.error_declared += 0.1 * (abs(ratio - record.log_ratio) - record.error_declared)
    record.ratios = record.ratios * FADING + 1.0
    record.log_ratio += (ratio - record.log_ratio) / record.ratios


def _learn(record: ClassRecord, work_s: float, held_units: float, execution_s: float, cpu_s: float | None, declared_speed: float) -> None:
    record.work.add(work_s)
    if execution_s <= 0 or cpu_s is None:
        return
    if held_units >= BUSY_UNITS:
        # Sums of speeds over observations, all fading alike: their ratios are means.
        record.parallels = record.parallels * FADING + 1.0
        record.parallel_units = record.parallel_units * FADING + held_units
        record.parallel_speed = record.parallel_speed * FADING + cpu_s / execution_s
        record.declared_speed = record.declared_speed * FADING + declared_speed


def _factor(folded: Sequence[int], wanted: float) -> float:
    seen = 0.0
    for off, count in enumerate(folded):
        seen += count
        if seen >= wanted:
            return float(2.0 ** (off / 8))
    return float(2.0 ** (len(folded) / 8))
