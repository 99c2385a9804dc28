"""Outcomes of tests: the effects of all pairs with their interval and verdict, and judged tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from bnrnn.report.claim_types import ClaimTest, Number

LEAST_PAIRS = 3
HOLDS, CONTRADICTED, UNDECIDED, NOT_RUN = "holds", "contradicted", "undecided", "not run"


@dataclass(frozen=True)
class Outcome:
    """The effects of all pairs, their mean with its 95 % interval, and the verdict of the test."""

    effects: tuple[float, ...]
    threshold: float = 0.0
    unanimous: bool = False  # whether all pairs must agree; otherwise the interval must lie beyond the threshold
    marks: tuple[str, ...] = ()
    resolution: tuple[float, float] | None = None  # the effects between which a measured effect may truly lie

    @property
    def n(self) -> int:
        """The number of pairs."""
        return len(self.effects)

    @property
    def mean(self) -> float:
        """The mean effect."""
        return mean(self.effects)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval (Student's t) of the mean over the pairs; infinite for a single pair."""
        return student_interval(self.effects)

    @property
    def num_agreeing(self) -> int:
        """The number of pairs with an effect above the threshold."""
        return sum(effect > self.threshold for effect in self.effects)

    @property
    def is_equal(self) -> bool:
        """Whether several pairs have the same effect but for rounding: their interval has no width and says nothing."""
        return self.n > 1 and all(math.isclose(effect, self.effects[0]) for effect in self.effects)

    @property
    def limits(self) -> tuple[float, float]:
        """What must lie on one side of the threshold: the interval, all effects if they must agree or, of equal
        effects, the range in which they may truly lie."""
        if self.unanimous:
            return min(self.effects), max(self.effects)
        return (self.resolution or (-math.inf, math.inf)) if self.is_equal else self.interval

    @property
    def verdict(self) -> str:
        """What the pairs show about the test; `LEAST_PAIRS` are needed to show anything."""
        if not self.is_complete:
            return UNDECIDED
        (low, high), is_open = self.limits, self.is_equal and not self.unanimous  # a resolution excludes its limits
        if low > self.threshold or (is_open and low == self.threshold):
            return HOLDS
        return CONTRADICTED if high < self.threshold or (is_open and high == self.threshold) else UNDECIDED

    @property
    def is_complete(self) -> bool:
        """Whether there are enough pairs for a verdict."""
        return self.n >= LEAST_PAIRS

    @property
    def is_too_wide(self) -> bool:
        """Whether the interval reaches as far beyond the threshold as the mean lies before it, so that it says nothing
        about the size of the effect. Never so if the effects are equal."""
        (low, high), distance = self.interval, abs(self.mean - self.threshold)
        return low < self.threshold - distance and high > self.threshold + distance

    @property
    def tendency(self) -> str:
        """Whether the mean effect agrees with the claim; reported where nothing is shown."""
        if self.mean == self.threshold:
            return "undecided"
        return "agrees" if self.mean > self.threshold else "disagrees"


@dataclass(frozen=True)
class JudgedTest:
    """A test of a claim with its outcome, which is None if the test has not been run."""

    test: ClaimTest
    outcome: Outcome | None
    commits: tuple[str, ...] = ()  # the commits with which the runs were started
    seeds: tuple[frozenset[str], ...] = ()  # for each side, the seeds of which it has a run
    updates: int | None = None  # the length up to which the runs are compared; None if the test has not been run

    @property
    def n(self) -> int:
        """The number of pairs, draws or models."""
        return self.outcome.n if self.outcome else 0


def student_interval(values: Sequence[float], level: float = 0.95, of_next: bool = False) -> tuple[float, float]:
    """The interval (Student's t) in which the mean of the values' normal distribution lies with this probability, or
    one new value with `of_next`; infinite for a single value."""
    from scipy.special import stdtrit  # the quantile of Student's t; scipy.stats is slow to import

    n = len(values)
    if n < 2:
        return -math.inf, math.inf
    half = float(stdtrit(n - 1, (1 + level) / 2)) * stdev(values) * math.sqrt(1 / n + of_next)
    return mean(values) - half, mean(values) + half


def bounded(effects: Sequence[float], threshold: Number = 0.0, have_sizes: bool = True) -> Outcome:
    """The outcome of effects of which some are infinite. These become as far from the threshold as the farthest of the
    others, or 1 if there is no other. If all are equal then, they show a direction, in which all must agree.

    Args:
        have_sizes: whether the finite effects were all measured; False if some only stand for a direction.
    """
    farthest = max((abs(e - threshold) for e in effects if math.isfinite(e)), default=0.0) or 1.0
    finite = tuple(e if math.isfinite(e) else threshold + math.copysign(farthest, e) for e in effects)
    are_measured = have_sizes and all(map(math.isfinite, effects))
    return Outcome(finite, float(threshold), unanimous=not are_measured and len(set(finite)) == 1)


def within(values: Sequence[float], published: float, tolerance: float) -> Outcome:
    """Each value is within the tolerance of the published one; the effect is the tolerance minus the distance."""
    return Outcome(tuple(tolerance - abs(value - published) for value in values))
