"""Rules that judge a claim: they compute an effect for each seed, and a verdict from all effects.

A test compares *sides*, which are selections of runs, and pairs them by seed. A rule computes an effect from the runs
of one seed. The claim is right for this seed if the effect is larger than the rule's threshold. Tests, with their rules
and parameters, are in `experiments/<paper>/claims.yaml`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

from bnrnn.errors import BnrnnError
from bnrnn.metrics import sign
from bnrnn.report.runs import Run

LEAST_PAIRS = 3
HOLDS, IN_PART, NOT_SHOWN = "holds", "holds in part", "not shown"
CONTRADICTED, CONTRADICTED_IN_PART = "contradicted", "contradicted in part"
NEVER = "a run that never got there counts with its length"


@dataclass(frozen=True)
class Outcome:
    """The effects of all pairs, their mean with its 95 % interval, and the verdict of the test."""

    effects: tuple[float, ...]
    threshold: float = 0.0
    unanimous: bool = False  # whether all pairs must agree; otherwise the interval must lie beyond the threshold
    marks: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        return len(self.effects)

    @property
    def mean(self) -> float:
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
        if self.n < LEAST_PAIRS:
            return NOT_SHOWN
        low, high = (min(self.effects), max(self.effects)) if self.unanimous else self.interval
        if low > self.threshold:
            return HOLDS
        return CONTRADICTED if high < self.threshold else NOT_SHOWN

    @property
    def tendency(self) -> str:
        """Whether the mean effect agrees with the claim; reported where nothing is shown."""
        return "agrees" if self.mean > self.threshold else "disagrees"


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean (Student's t); infinite for a single value."""
    from scipy.special import stdtrit  # the quantile of Student's t; scipy.stats is slow to import

    if len(values) < 2:
        return -math.inf, math.inf
    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


@dataclass
class Pairing:
    """The runs of a test: for each seed, the runs of each side.

    Args:
        test: the entry of claims.yaml.
        by_seed: the runs of each side, by seed. A side has one run, unless the rule compares several learning rates.
        metrics: the metrics of each side.
        marks: remarks on the outcome, for the page.
    """

    test: dict[str, Any]
    by_seed: dict[str, list[list[Run]]]
    metrics: list[list[str]]
    marks: set[str] = field(default_factory=set)

    def values(self, k: int = 0) -> list[list[float]]:
        """The k-th metric of all sides, one list per seed. A diverged run gets the worst value of the other runs."""
        found = {
            seed: [self._value(runs[0], names[k]) for runs, names in zip(sides, self.metrics, strict=True)]
            for seed, sides in self.by_seed.items()
        }
        finished = [v for row in found.values() for v in row if v is not None]
        if any(v is None for row in found.values() for v in row):
            self.marks.add("a diverged run counts as the worst value of the others")
        if not finished:
            return []
        better = sign(self.metrics[0][k])
        worst = min(finished) if better > 0 else max(finished)
        return [[worst if v is None else v for v in row] for row in found.values()]

    def _value(self, run: Run, metric: str) -> float | None:
        if run.result.status == "diverged":
            return None
        return run.best_until(metric, self.test.get("updates"))


def ends_better(pairing: Pairing) -> Outcome:
    """The first side ends better than the second by more than the margin. With several metrics, it must be better in
    all of them, and the effect is the smallest of their relative differences."""
    test, names = pairing.test, pairing.metrics[0]
    if len(names) == 1:
        better = sign(names[0])
        effects = [better * (of - than) for of, than in pairing.values()]
    else:
        tables = [[sign(m) * (of - than) / abs(than) for of, than in pairing.values(k)] for k, m in enumerate(names)]
        effects = [min(row) for row in zip(*tables, strict=True)]
    return Outcome(tuple(effects), float(test["margin"]))


def no_worse(pairing: Pairing) -> Outcome:
    """The first side does not end worse than the second by the margin or more."""
    outcome = ends_better(pairing)
    return Outcome(outcome.effects, -float(pairing.test["margin"]))


def ranking(pairing: Pairing) -> Outcome:
    """The sides end in this order, the best first; the effect is the smallest difference between neighbours."""
    better = sign(pairing.metrics[0][0])
    rows = pairing.values()
    return Outcome(tuple(min(better * (a - b) for a, b in pairwise(row)) for row in rows))


def alike(pairing: Pairing) -> Outcome:
    """All sides end within the margin of each other; the effect is minus their range."""
    return Outcome(tuple(min(row) - max(row) for row in pairing.values()), -float(pairing.test["margin"]))


def reaches_first(pairing: Pairing) -> Outcome:
    """The first side reaches the level in fewer updates; the effect is the logarithm of the ratio of updates."""
    metric, level = pairing.metrics[0][0], pairing.test["level"]
    return _first(pairing, lambda run: run.reached(metric, level))


def settles_first(pairing: Pairing) -> Outcome:
    """The first side settles in fewer updates: its curve comes within `share` of its own lowest value. The effect is
    that of `reaches_first`. A diverged run never settles."""
    metric, share = pairing.metrics[0][0], pairing.test["share"]
    return _first(pairing, lambda run: None if run.result.status == "diverged" else run.steady(metric, share))


def _first(pairing: Pairing, when: Callable[[Run], tuple[float, float] | None]) -> Outcome:
    limit, effects = pairing.test.get("updates") or math.inf, []
    for (of,), (than,) in pairing.by_seed.values():
        length = min(limit, max(of.result.updates, than.result.updates))
        counts = []
        for run in (of, than):
            reached = when(run)
            found = reached is not None and reached[0] <= length
            pairing.marks |= set() if found else {NEVER}
            counts.append(reached[0] if reached is not None and found else length)
        effects.append(math.log(counts[1] / counts[0]))
    return Outcome(tuple(effects))


def diverges(pairing: Pairing) -> Outcome:
    """The first side diverges and the second does not. The effect is 1 if so, -1 for the reverse, and 0 if both or
    none diverge. All pairs must agree."""
    lost = [[side[0].result.status == "diverged" for side in sides] for sides in pairing.by_seed.values()]
    return Outcome(tuple(float(of) - float(than) for of, than in lost), unanimous=True)


def less_stable(pairing: Pairing) -> Outcome:
    """The largest gradient norm (mean over a record) of the first side is more than `factor` times that of the second,
    or only the first side diverges. The effect is the logarithm of the ratio."""
    threshold, effects = math.log(pairing.test["factor"]), []
    for (of,), (than,) in pairing.by_seed.values():
        lost = of.result.status == "diverged", than.result.status == "diverged"
        if any(lost):  # the gradient norm of a diverged run may never have been finite
            pairing.marks.add("a run that diverged alone counts as e times the factor")
            effects.append((threshold + 1) * (lost[0] - lost[1]))
        else:
            peaks = [run.peak("train/grad_norm", pairing.test.get("updates")) for run in (of, than)]
            effects.append(math.log(peaks[0] / peaks[1]))
    return Outcome(tuple(effects), threshold)


def larger_rate(pairing: Pairing) -> Outcome:
    """The largest learning rate at which the first side trains is above that of the second. A side trains at a rate if
    neither this rate nor a smaller one diverges. The effect is the logarithm of the ratio. A side that trains at no
    rate counts with half of the smallest rate."""
    effects = []
    for sides in pairing.by_seed.values():
        largest = []
        for runs in sides:
            rates = sorted((float(run.overrides[pairing.test["key"]]), run.result.status == "diverged") for run in runs)
            trained = rates[0][0] / 2
            for rate, lost in rates:
                if lost:
                    break
                trained = rate
            largest.append(trained)
        effects.append(math.log(largest[0] / largest[1]))
    return Outcome(tuple(effects))


def learns_at_larger_rate(pairing: Pairing) -> Outcome:
    """The largest learning rate at which the first side reaches the level is above that of the second. The effect is
    the logarithm of the ratio. A side that reaches the level at no rate counts with half of the smallest rate."""
    test, metric, effects = pairing.test, pairing.metrics[0][0], []
    for sides in pairing.by_seed.values():
        largest = []
        for runs in sides:
            learned = [float(run.overrides[test["key"]]) for run in runs if run.reached(metric, test["level"])]
            largest.append(max(learned, default=min(float(run.overrides[test["key"]]) for run in runs) / 2))
        effects.append(math.log(largest[0] / largest[1]))
    return Outcome(tuple(effects))


def within(values: Sequence[float], published: float, tolerance: float) -> Outcome:
    """Each value is within the tolerance of the published one; the effect is the tolerance minus the distance."""
    return Outcome(tuple(tolerance - abs(value - published) for value in values))


RULES: dict[str, Callable[[Pairing], Outcome]] = {
    rule.__name__: rule
    for rule in (
        ends_better, no_worse, ranking, alike, reaches_first, settles_first, diverges, less_stable, larger_rate,
        learns_at_larger_rate,
    )
}  # fmt: skip
PROPERTY = "property"  # the rule for analyses: it must hold for all of their draws or models, which are not paired


def rule_of(test: dict[str, Any], where: str) -> Callable[[Pairing], Outcome]:
    """The rule of a test. Raises BnrnnError, with the name of the claim, for an unknown rule."""
    if test["rule"] not in RULES:
        raise BnrnnError(f"{where}: rule {test['rule']!r} is unknown: use {', '.join([*RULES, PROPERTY])}")
    return RULES[test["rule"]]


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
