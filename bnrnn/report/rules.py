"""Rules that turn runs of the same seed into one number, and numbers into a verdict.

A test compares *sides*, each a choice of runs, and pairs them by seed. A rule turns the runs of one seed into an
effect, which is compared with the rule's threshold: the claim is right where the effect is larger. Rules are named in
`experiments/<paper>/claims.yaml`, with their parameters.
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
    """The effects of all pairs, their mean with its 95 % interval, and what the test says of the claim."""

    effects: tuple[float, ...]
    threshold: float = 0.0
    unanimous: bool = False  # all pairs have to agree; else the interval has to lie beyond the threshold
    marks: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        return len(self.effects)

    @property
    def mean(self) -> float:
        return mean(self.effects)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of Student's t over the pairs; infinite for a single pair."""
        return student_interval(self.effects)

    @property
    def agree(self) -> int:
        """How many pairs have an effect beyond the threshold."""
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
        """What too few pairs, or an interval on both sides of the threshold, suggest."""
        return "agrees" if self.mean > self.threshold else "disagrees"


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean; without bounds for a single value."""
    from scipy.stats import t  # slow to import

    if len(values) < 2:
        return -math.inf, math.inf
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


@dataclass
class Pairing:
    """The runs of a test: for each seed, the runs of each side.

    Args:
        test: the entry of claims.yaml.
        by_seed: seed -> side -> runs; one run a side, unless the rule looks at several learning rates.
        metrics: of each side.
    """

    test: dict[str, Any]
    by_seed: dict[str, list[list[Run]]]
    metrics: list[list[str]]
    marks: set[str] = field(default_factory=set)

    def values(self, k: int = 0) -> list[list[float]]:
        """The k-th metric of every side, a list a seed. A run that diverged counts as the worst value of the others."""
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
    """The first side ends better than the second by more than the margin (of several metrics: in all of them, and the
    effect is the smallest of their relative differences)."""
    test, names = pairing.test, pairing.metrics[0]
    if len(names) == 1:
        better = sign(names[0])
        effects = [better * (of - than) for of, than in pairing.values()]
    else:
        tables = [[sign(m) * (of - than) / abs(than) for of, than in pairing.values(k)] for k, m in enumerate(names)]
        effects = [min(row) for row in zip(*tables, strict=True)]
    return Outcome(tuple(effects), float(test["margin"]))


def no_worse(pairing: Pairing) -> Outcome:
    """The first side ends no worse than the second by the margin or more."""
    outcome = ends_better(pairing)
    return Outcome(outcome.effects, -float(pairing.test["margin"]))


def ranking(pairing: Pairing) -> Outcome:
    """The sides end in this order, the best first; the effect is the smallest difference between neighbours."""
    better = sign(pairing.metrics[0][0])
    rows = pairing.values()
    return Outcome(tuple(min(better * (a - b) for a, b in pairwise(row)) for row in rows))


def alike(pairing: Pairing) -> Outcome:
    """The sides end within the margin of one another; the effect is their range, with a minus."""
    return Outcome(tuple(min(row) - max(row) for row in pairing.values()), -float(pairing.test["margin"]))


def reaches_first(pairing: Pairing) -> Outcome:
    """The first side reaches the level in fewer updates; the effect is the logarithm of the ratio of updates."""
    metric, level = pairing.metrics[0][0], pairing.test["level"]
    return _first(pairing, lambda run: run.reached(metric, level))


def settles_first(pairing: Pairing) -> Outcome:
    """The first side comes within this share of its own lowest value in fewer updates; effect as `reaches_first`. A run
    that diverged never settles."""
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
    """The first side diverges where the second does not: 1, the reverse: -1, both alike: 0. All pairs have to agree."""
    lost = [[side[0].result.status == "diverged" for side in sides] for sides in pairing.by_seed.values()]
    return Outcome(tuple(float(of) - float(than) for of, than in lost), unanimous=True)


def less_stable(pairing: Pairing) -> Outcome:
    """The largest gradient norm (mean over a record) of the first side is `factor` times that of the second, or the
    first diverges where the second does not; the effect is the logarithm of the ratio."""
    threshold, effects = math.log(pairing.test["factor"]), []
    for (of,), (than,) in pairing.by_seed.values():
        lost = of.result.status == "diverged", than.result.status == "diverged"
        if any(lost):  # its gradient norm may not have been finite once
            pairing.marks.add("a run that diverged alone counts as e times the factor")
            effects.append((threshold + 1) * (lost[0] - lost[1]))
        else:
            peaks = [run.peak("train/grad_norm", pairing.test.get("updates")) for run in (of, than)]
            effects.append(math.log(peaks[0] / peaks[1]))
    return Outcome(tuple(effects), threshold)


def larger_rate(pairing: Pairing) -> Outcome:
    """The largest learning rate at which the first side trains is above that of the second: neither it nor a smaller
    one that was tried diverges. The effect is the logarithm of the ratio; a side that trains at no rate counts with
    half of the smallest."""
    key, effects = pairing.test["key"], []
    for sides in pairing.by_seed.values():
        largest = []
        for runs in sides:
            rates = sorted((float(run.overrides[key]), run.result.status == "diverged") for run in runs)
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
    the logarithm of the ratio; a side that reaches it at no rate counts with half of the smallest."""
    test, metric, effects = pairing.test, pairing.metrics[0][0], []
    for sides in pairing.by_seed.values():
        largest = []
        for runs in sides:
            learned = [float(run.overrides[test["key"]]) for run in runs if run.reached(metric, test["level"])]
            largest.append(max(learned, default=min(float(run.overrides[test["key"]]) for run in runs) / 2))
        effects.append(math.log(largest[0] / largest[1]))
    return Outcome(tuple(effects))


def within(values: Sequence[float], published: float, tolerance: float) -> Outcome:
    """Each value is within the tolerance of the published one; the effect is the tolerance less the distance."""
    return Outcome(tuple(tolerance - abs(value - published) for value in values))


RULES: dict[str, Callable[[Pairing], Outcome]] = {
    rule.__name__: rule
    for rule in (
        ends_better, no_worse, ranking, alike, reaches_first, settles_first, diverges, less_stable, larger_rate,
        learns_at_larger_rate,
    )
}  # fmt: skip
PROPERTY = "property"  # of an analysis that has draws or models in place of pairs: every one of them has it


def rule_of(test: dict[str, Any], where: str) -> Callable[[Pairing], Outcome]:
    """The rule of a test. Raises BnrnnError, naming the claim, for one that does not exist."""
    if test["rule"] not in RULES:
        raise BnrnnError(f"{where}: rule {test['rule']!r} is unknown: use {', '.join([*RULES, PROPERTY])}")
    return RULES[test["rule"]]


def combined(outcomes: list[str]) -> str:
    """The verdict of tests that all have to hold; those that were not run are not shown."""
    kinds = set(outcomes)
    if kinds <= {NOT_SHOWN}:
        return NOT_SHOWN
    if kinds == {HOLDS}:
        return HOLDS
    if kinds == {CONTRADICTED}:
        return CONTRADICTED
    return CONTRADICTED_IN_PART if CONTRADICTED in kinds else IN_PART


def in_part(verdict: str) -> str:
    """What a verdict on lesser evidence than the paper's data and length says of the claim."""
    return {HOLDS: IN_PART, CONTRADICTED: CONTRADICTED_IN_PART}.get(verdict, verdict)
