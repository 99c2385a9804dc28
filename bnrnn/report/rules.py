"""Rules that judge a claim: they compute an effect for each seed. `outcomes` makes a verdict of all effects.

A test compares *sides*, which are selections of runs, and pairs them by seed. A rule computes an effect from the runs
of one seed. The claim is right for this seed if the effect is larger than the rule's threshold. Tests, with their rules
and parameters, are in `experiments/<paper>/claims.yaml`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import linear_regression
from typing import Any

from bnrnn.errors import BnrnnError
from bnrnn.metrics import sign
from bnrnn.report.outcome import CONTRADICTED, Outcome
from bnrnn.report.run import Run

NEVER = {  # remarks on runs that never got to a level: those of the first side, and those of the second
    "of": "a run of the first side never got there and counts with its length: the true ratio is larger",
    "than": "a run of the second side never got there and counts with its length: the true ratio is smaller",
}
LARGEST = "a side that trains at the largest rate tried might train at larger ones"
FILE_ORDER = (
    "validated in the order of the file, which is harder for a model with batch normalization if neighbours in the "
    "file are alike (D7)"
)
DIVERGED = (
    "a pair of which one run diverged counts like the other pair that is farthest from the threshold; if both "
    "diverged, there is no difference"
)


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
        """The k-th metric of all sides, one list per seed, with a sign with which larger is better.

        A diverged run has minus infinity. The list is empty if all runs diverged.
        """
        found = [
            [self._value(runs[0], names[k]) for runs, names in zip(sides, self.metrics, strict=True)]
            for sides in self.by_seed.values()
        ]
        return found if any(math.isfinite(value) for row in found for value in row) else []

    def _value(self, run: Run, metric: str) -> float:
        if self.lost(run):
            self.marks.add(DIVERGED)
            return -math.inf
        return sign(metric) * run.best_until(metric, self.limit)

    @property
    def limit(self) -> int | None:
        """The number of updates up to which runs are compared; None for whole runs."""
        return self.test.get("updates")

    def lost(self, run: Run) -> bool:
        """Whether a run diverged within the updates that are compared."""
        return run.diverged(self.limit)


def _difference(of: float, than: float) -> float:
    """`of` minus `than`; infinite if one run diverged, and 0 if both did."""
    return 0.0 if of == than else of - than


def _relative(of: float, than: float) -> float:
    difference = _difference(of, than)
    if than == 0.0 and difference:
        return math.copysign(math.inf, difference)
    return difference / abs(than) if difference and math.isfinite(difference) else difference


def _bounded(effects: Sequence[float], threshold: float) -> Outcome:
    """The outcome of effects of which some are infinite. These become as far from the threshold as the farthest of the
    others, or 1 if there is no other."""
    farthest = max((abs(e - threshold) for e in effects if math.isfinite(e)), default=0.0) or 1.0
    finite = (e if math.isfinite(e) else threshold + math.copysign(farthest, e) for e in effects)
    return Outcome(tuple(finite), threshold)


def ends_better(pairing: Pairing) -> Outcome:
    """The first side ends better than the second by more than the margin. With several metrics, it must be better in
    all of them, and the effect is the smallest of their relative differences."""
    return _bounded(_ends(pairing), float(pairing.test["margin"]))


def no_worse(pairing: Pairing) -> Outcome:
    """The first side does not end worse than the second by the margin or more."""
    return _bounded(_ends(pairing), -float(pairing.test["margin"]))


def _ends(pairing: Pairing) -> list[float]:
    names = pairing.metrics[0]
    if len(names) == 1:
        return [_difference(of, than) for of, than in pairing.values()]
    tables = [[_relative(of, than) for of, than in pairing.values(k)] for k in range(len(names))]
    return [min(row) for row in zip(*tables, strict=True)]


def ends_better_in_all(pairing: Pairing) -> Outcome:
    """The first side ends better than the second by more than the margin in every metric. Each metric has an interval
    of its own: all must lie above the margin, and one below it contradicts. The effect is the relative difference in
    the metric whose interval begins lowest."""
    outcomes = {}
    for k, metric in enumerate(pairing.metrics[0]):
        effects = [_relative(of, than) for of, than in pairing.values(k)]
        if not effects:
            return Outcome(())
        outcomes[metric] = _bounded(effects, float(pairing.test["margin"]))
    contradicted = [metric for metric, outcome in outcomes.items() if outcome.verdict == CONTRADICTED]
    lowest = min(contradicted or outcomes, key=lambda metric: (outcomes[metric].interval[0], outcomes[metric].mean))
    pairing.marks.add(f"the effect is that of {lowest}")
    return outcomes[lowest]


def ranking(pairing: Pairing) -> Outcome:
    """The sides end in this order, the best first; the effect is the smallest difference between neighbours."""
    return _bounded([min(_difference(a, b) for a, b in pairwise(row)) for row in pairing.values()], 0.0)


def alike(pairing: Pairing) -> Outcome:
    """All sides end within the margin of each other; the effect is minus their range."""
    ranges = [_difference(min(row), max(row)) for row in pairing.values()]
    return _bounded(ranges, -float(pairing.test["margin"]))


def trend(pairing: Pairing) -> Outcome:
    """The sides end worse the larger their value in `at` is. The effect is the slope of a straight line through the
    sides: how much worse they end for each 1 that the value grows. A diverged run counts like the worst that did not.
    """
    at, effects = [float(x) for x in pairing.test["at"]], []
    for row in pairing.values():
        worst = min(value for value in row if math.isfinite(value))
        effects.append(-linear_regression(at, [max(value, worst) for value in row]).slope)
    return Outcome(tuple(effects))


def reaches_first(pairing: Pairing) -> Outcome:
    """The first side reaches the level in fewer updates; the effect is the logarithm of the ratio of updates."""
    metric, level = pairing.metrics[0][0], pairing.test["level"]
    return _first(pairing, lambda run: run.reached(metric, level))


def settles_first(pairing: Pairing) -> Outcome:
    """The first side settles in fewer updates: its curve comes within `share` of its own lowest value. The effect is
    that of `reaches_first`. A diverged run never settles."""
    metric, share = pairing.metrics[0][0], pairing.test["share"]
    return _first(pairing, lambda run: None if pairing.lost(run) else run.steady(metric, share, pairing.limit))


def _first(pairing: Pairing, when: Callable[[Run], tuple[float, float] | None]) -> Outcome:
    limit, effects, bounds = pairing.limit or math.inf, [], []
    for (of,), (than,) in pairing.by_seed.values():
        length = min(limit, max(of.result.updates, than.result.updates))
        counts, befores = [], []
        for side, run in (("of", of), ("than", than)):
            reached = when(run)
            found = reached is not None and reached[0] <= length
            pairing.marks |= set() if found else {NEVER[side]}
            counts.append(reached[0] if reached is not None and found else length)
            befores.append(max((u for u in run.series(pairing.metrics[0][0]) if u < counts[-1]), default=0))
        effects.append(math.log(counts[1] / counts[0]))
        bounds += [_log(befores[1] / counts[0]), -_log(befores[0] / counts[1])]
    return Outcome(tuple(effects), resolution=(min(bounds), max(bounds)))


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def diverges(pairing: Pairing) -> Outcome:
    """The first side diverges and the second does not. The effect is 1 if so, -1 for the reverse, and 0 if both or
    none diverge. All pairs must agree."""
    lost = [[pairing.lost(side[0]) for side in sides] for sides in pairing.by_seed.values()]
    return Outcome(tuple(float(of) - float(than) for of, than in lost), unanimous=True)


def less_stable(pairing: Pairing) -> Outcome:
    """The largest gradient norm (mean over a record) of the first side is more than `factor` times that of the second,
    or only the first side diverges or has a norm that is not finite. The effect is the logarithm of the ratio."""
    threshold, effects = math.log(pairing.test["factor"]), []
    for (of,), (than,) in pairing.by_seed.values():
        norm, limit = "train/grad_norm", pairing.limit
        lost = [pairing.lost(run) or not run.always_finite(norm, limit) for run in (of, than)]
        if any(lost):
            pairing.marks.add("a run that alone diverged, or had no finite norm, counts as e times the factor")
            effects.append((threshold + 1) * (lost[0] - lost[1]))
        else:
            effects.append(math.log(of.peak(norm, limit) / than.peak(norm, limit)))
    return Outcome(tuple(effects), threshold)


def less_steady(pairing: Pairing) -> Outcome:
    """Training of the first side is more than `factor` times as unsteady as that of the second, or only the first side
    diverges. Unsteady is by how much the training loss lies above its lowest value so far, as the mean logarithm of
    their ratio over all records. The effect is the logarithm of the sides' ratio."""
    threshold, effects = math.log(pairing.test["factor"]), []
    for (of,), (than,) in pairing.by_seed.values():
        lost = [pairing.lost(run) for run in (of, than)]
        if any(lost):
            pairing.marks.add("a run that alone diverged counts as e times the factor")
            effects.append((threshold + 1) * (lost[0] - lost[1]))
        else:
            effects.append(math.log(of.unsteadiness(pairing.limit) / than.unsteadiness(pairing.limit)))
    return Outcome(tuple(effects), threshold)


def larger_rate(pairing: Pairing) -> Outcome:
    """The largest learning rate at which the first side trains is above that of the second. A side trains at a rate if
    neither this rate nor a smaller one diverges. The effect is the logarithm of the ratio. A side that trains at no
    rate counts with half of the smallest rate."""
    key = pairing.test["key"]

    def trained(runs: list[Run]) -> list[float]:
        ordered = sorted(runs, key=lambda run: float(run.overrides[key]))
        return [float(run.overrides[key]) for run in takewhile(lambda run: not pairing.lost(run), ordered)]

    return _largest(pairing, trained)


def learns_at_larger_rate(pairing: Pairing) -> Outcome:
    """The largest learning rate at which the first side reaches the level is above that of the second. The effect is
    the logarithm of the ratio. A side that reaches the level at no rate counts with half of the smallest rate."""
    test, metric = pairing.test, pairing.metrics[0][0]

    def learned(run: Run) -> bool:
        reached = run.reached(metric, test["level"])
        return reached is not None and reached[0] <= (pairing.limit or math.inf)

    return _largest(pairing, lambda runs: [float(run.overrides[test["key"]]) for run in runs if learned(run)])


def _largest(pairing: Pairing, good: Callable[[list[Run]], list[float]]) -> Outcome:
    """For each seed, the logarithm of the ratio of the sides' largest good rates."""
    effects, bounds = [], []
    for sides in pairing.by_seed.values():
        largest, nexts = [], []
        for runs in sides:
            rates = [float(run.overrides[pairing.test["key"]]) for run in runs]
            largest.append(max(good(runs), default=min(rates) / 2))
            nexts.append(min((rate for rate in rates if rate > largest[-1]), default=math.inf))
            pairing.marks |= {LARGEST} if largest[-1] == max(rates) else set()
        effects.append(math.log(largest[0] / largest[1]))
        bounds += [_log(largest[0] / nexts[1]), -_log(largest[1] / nexts[0])]
    return Outcome(tuple(effects), resolution=(min(bounds), max(bounds)))


RULES: dict[str, Callable[[Pairing], Outcome]] = {
    rule.__name__: rule
    for rule in (
        ends_better, ends_better_in_all, no_worse, ranking, trend, alike, reaches_first, settles_first, diverges,
        less_stable, less_steady, larger_rate, learns_at_larger_rate,
    )
}  # fmt: skip
OF_CURVES = (reaches_first, settles_first, learns_at_larger_rate)  # rules that read curves, also of whole runs
PROPERTY = "property"  # the rule for analyses: it must hold for all of their draws or models, which are not paired


def rule_of(test: dict[str, Any], where: str) -> Callable[[Pairing], Outcome]:
    """The rule of a test. Raises BnrnnError, with the name of the claim, for an unknown rule."""
    if test["rule"] not in RULES:
        raise BnrnnError(f"{where}: rule {test['rule']!r} is unknown: use {', '.join([*RULES, PROPERTY])}")
    return RULES[test["rule"]]
