"""Expected durations, and how the core learns them.

An action's *work* is `T_ori`, its seconds on one unit. The expected work is the first of these that applies:

1. the declared work, corrected by the usual error of the class's declarations, if this has been nearer than the class's mean, or if the
   class is unknown;
2. the mean work of earlier actions of its class (job, kind, class or service, largest amount), once there are any;
3. the mean of the class in other jobs; the mean of the kind; a constant for the kind.

Estimates are shrunk towards the level above, which counts as `PRIOR` more observations. Three rules make the estimates robust. An
observation counts at most `OUTLIER` medians. Older observations fade. The expected rest of a running action comes from the
distribution, not from the mean: an action that has run for long is expected to run on.

Core-seconds also show how many units a class really uses. A program that burns one of eight cores is given one core.

These durations do not decide the order on cores. The expected work left does (`work_left.py`).

Only numbers and tables of numbers may live here. There is no clock; time only passes by observations.
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
    "cpu.request": 0.05,
    "cpu.snapshot": 1.0,
    "cpu.close_session": 0.02,
    "cpu.close": 0.02,
    "gpu.score": 0.6,
    "gpu.logprobs": 0.6,
    "gpu.generate": 3.0,
    "api.call": 0.8,
}
"""Seconds on one unit by kind, for unknown actions."""

USUAL_OTHER_S: Final = 1.0

PRIOR: Final = 2.0
"""Observations that the level above a class counts for."""

FADING: Final = 0.998
"""Weight that an observation keeps for each later observation. About five hundred observations count."""

OUTLIER: Final = 8.0
"""Most medians of its class that one observation counts for, once `SETTLED` observations are known."""

SETTLED: Final = 8
BINS_PER_OCTAVE: Final = 2
SMALLEST_S: Final = 1e-3
BINS: Final = 56
EDGES: Final = tuple(SMALLEST_S * 2.0 ** (index / BINS_PER_OCTAVE) for index in range(BINS - 1))
"""Upper edges of the histogram's bins: 1 ms to some 37 hours; the last bin has none."""

LEAST_LEFT: Final = 0.05
"""Part of its work that an action still counts as needing after it has run for longer than expected, where nothing is learned."""

USED: Final = 0.4
"""Part of the declared speed-up that a class must show in core-seconds for its curve to be believed."""

BUSY_UNITS: Final = 1.5
"""Units from which on core-seconds say something about parallelism."""

MEASURED: Final = "cpu.exec"
"""The kind whose core-seconds are measured. For other kinds they are unknown."""

MOST_CLASSES: Final = 20_000
"""Most classes that are remembered, about 2 kB each. The least recently used classes are forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One action that succeeded: its declarations, its mean units, its seconds and its core-seconds.

    `cpu_s` is None if it was not measured (`MEASURED`). `environment` is the action's environment.
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
        """Take in an observation. An outlier counts as less work."""
        work_s = min(work_s, self.most_s)
        # Later observations weigh more, instead of fading all earlier ones. Sums are rescaled now and then.
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

    def quantile(self, fraction: float) -> float:
        """Return the mean of the bin in which the quantile lies."""
        wanted, seen = fraction * self.scale * self.count, 0.0
        last = 0.0
        for weight, amount in zip(self.weights, self.sums, strict=True):
            if weight:
                seen += weight
                last = amount / weight
                if seen >= wanted:
                    break
        return last

    def left_s(self, done_s: float) -> float | None:
        """Return the mean work beyond `done_s` of the actions that had more work; None if no action had."""
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
        """Return Amdahl's fraction by the measured core-seconds, if it contradicts the declared curve."""
        if self.parallels < 2.0 or self.parallel_speed >= USED * self.declared_speed:
            return None
        speed, units = max(1.0, self.parallel_speed / self.parallels), self.parallel_units / self.parallels
        return min(1.0, (1.0 - 1.0 / speed) / (1.0 - 1.0 / units))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected work of one action, and its curve.

    `record` gives the expected work left while the action runs. Without a record, `declared` says whether the work was declared or
    is only an estimate.
    """

    work_s: float
    curve: Curve
    record: ClassRecord | None = None
    declared: bool = True

    def left_s(self, done_s: float) -> float:
        """Return the expected work left after `done_s` of work."""
        if self.record is not None:
            left = self.record.work.left_s(done_s)
            # Durations of commands have heavy tails. Beyond all known durations, as much work again is a fair guess.
            return left if left is not None else max(done_s, LEAST_LEFT * self.work_s)
        if self.declared:
            return max(self.work_s - done_s, LEAST_LEFT * self.work_s)
        return max(self.work_s - done_s, done_s)


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far expectations were off: half of them, and nine in ten, stay within these factors.

    A factor of 2 means twice or half.
    """

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
        """Return the estimate for an action."""
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

    def ratios(self) -> tuple[int, ...]:
        """Return how often work was 2 ** (i / 8) times the expected work, for i from -80 to 80. Values beyond count at the ends."""
        return tuple(self._errors)

    def _take_history(self, seen: Observation) -> None:
        speed = speed_on(seen.curve, seen.held_units)
        for record in self._records(seen.job, seen.kind, seen.action_class or seen.service, seen.units[-1]):
            _learn(record, seen.execution_s * speed, seen.held_units, seen.execution_s, seen.cpu_s, speed)

    def _records(self, job: str, kind: str, name: str | None, most_units: int) -> tuple[ClassRecord, ClassRecord, ClassRecord]:
        """Return three records: of the class in its job, of the class in all jobs, and of the kind, elastic or not."""
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
    """Return the speed-up on `units`, which may be a mean of amounts. Between two points of a table it is interpolated."""
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
        # Sums over observations with the same fading. Their ratios are means.
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
