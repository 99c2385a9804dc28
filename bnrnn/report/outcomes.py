"""Outcomes of tests: the effects of all pairs with their interval and verdict, and the verdict of several tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

LEAST_PAIRS = 3
HOLDS, IN_PART, NOT_SHOWN = "holds", "holds in part", "not shown"
CONTRADICTED, CONTRADICTED_IN_PART = "contradicted", "contradicted in part"


@dataclass(frozen=True)
class Outcome:
    """The effects of all pairs, their mean with its 95 % interval, and the verdict of the test."""

    effects: tuple[float, ...]
    threshold: float = 0.0
    unanimous: bool = False  # whether all pairs must agree; otherwise the interval must lie beyond the threshold
    marks: tuple[str, ...] = ()

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
    def agree(self) -> int:
        """The number of pairs with an effect above the threshold."""
        return sum(effect > self.threshold for effect in self.effects)

    @property
    def verdict(self) -> str:
        """What the pairs show about the test; `LEAST_PAIRS` are needed to show anything."""
        if self.n < LEAST_PAIRS:
            return NOT_SHOWN
        low, high = (min(self.effects), max(self.effects)) if self.unanimous else self.interval
        if low > self.threshold:
            return HOLDS
        return CONTRADICTED if high < self.threshold else NOT_SHOWN

    @property
    def tendency(self) -> str:
        """Whether the mean effect agrees with the claim; reported where nothing is shown."""
        if self.mean == self.threshold:
            return "undecided"
        return "agrees" if self.mean > self.threshold else "disagrees"


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean (Student's t); infinite for a single value."""
    from scipy.special import stdtrit  # the quantile of Student's t; scipy.stats is slow to import

    if len(values) < 2:
        return -math.inf, math.inf
    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def within(values: Sequence[float], published: float, tolerance: float) -> Outcome:
    """Each value is within the tolerance of the published one; the effect is the tolerance minus the distance."""
    return Outcome(tuple(tolerance - abs(value - published) for value in values))


def combined(outcomes: list[str]) -> str:
    """The verdict of a claim all of whose tests must hold. Tests that were not run count as not shown."""
    kinds = set(outcomes)
    if kinds <= {NOT_SHOWN}:
        return NOT_SHOWN
    if kinds == {HOLDS}:
        return HOLDS
    if kinds == {CONTRADICTED}:
        return CONTRADICTED
    return CONTRADICTED_IN_PART if CONTRADICTED in kinds else IN_PART


def in_part(verdict: str) -> str:
    """The verdict on a claim if the evidence is not on the paper's data and length: at most in part."""
    return {HOLDS: IN_PART, CONTRADICTED: CONTRADICTED_IN_PART}.get(verdict, verdict)
