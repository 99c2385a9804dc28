"""Rules that judge a claim: they compute an effect for each seed, and `Outcome` makes a verdict of all effects.

A test compares *sides*, which are selections of runs, and pairs them by seed. A rule computes an effect from the runs
of one seed. The claim is right for this seed if the effect is larger than the rule's threshold. Tests, with their rules
and parameters, are in `experiments/<paper>/claims.yaml`: the parameters of a rule's function are the keys that a test
with this rule must have.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise, takewhile
from statistics import linear_regression
from typing import Any, get_type_hints

from bnrnn.metrics import sign
from bnrnn.report.claim_types import Number
from bnrnn.report.outcome import CONTRADICTED, Outcome, bounded
from bnrnn.report.run import Run

PROPERTY = "property"  # the rule for analyses: it must hold for all of their draws or models, which are not paired
DIVERGED = (
    "a pair of which one run diverged counts like the other pair that is farthest from the threshold; if both "
    "diverged, there is no difference"
)
NEVER = {  # remarks on runs that never got to a level: those of the first side, and those of the second
    "of": "a run of the first side never got there and counts with its length: the true ratio is larger",
    "than": "a run of the second side never got there and counts with its length: the true ratio is smaller",
}
LARGEST = "a side that trains at the largest rate tried might train at larger ones"


@dataclass
class Pairing:
    """The runs of a test: for each seed, the runs of each side.

    Args:
        by_seed: the runs of each side, by seed. A side has one run, unless the rule compares several learning rates.
        metrics: the metrics of each side.
        updates: the number of updates up to which runs are compared; None for whole runs.
        marks: remarks on the outcome, for the page.
    """

    by_seed: dict[str, list[list[Run]]]
    metrics: list[tuple[str, ...]]
    updates: int | None = None
    marks: set[str] = field(default_factory=set)

    def signed_values(self, k: int = 0) -> list[list[float]]:
        """The k-th metric of all sides, one list per seed, with a sign with which larger is better.

        A diverged run has minus infinity. The list is empty if all runs diverged.
        """
        names = [metrics[k] for metrics in self.metrics]
        found = [[self._signed(runs[0], name) for runs, name in zip(sides, names, strict=True)]
                 for sides in self.by_seed.values()]  # fmt: skip
        return found if any(math.isfinite(value) for row in found for value in row) else []

    def _signed(self, run: Run, metric: str) -> float:
        if self.lost(run):
            self.marks.add(DIVERGED)
            return -math.inf
        return sign(metric) * run.best_until(metric, self.updates)

    def lost(self, run: Run) -> bool:
        """Whether a run diverged within the updates that are compared."""
        return run.diverged(self.updates)


@dataclass(frozen=True)
class Rule:
    """A rule, and what a test that names it has to give.

    Args:
        judge: computes the outcome of a pairing. Its other parameters are keys of the test.
        sides: the key with the sides: "of" (with "than") for two, "order" or "sides" for any number.
        reads: what it reads of the metric: "end", "curve" (also of whole runs), or "" if it needs no metric.
        ratio: for effects that are logarithms of a ratio, the words around this ratio.
    """

    judge: Callable[..., Outcome]
    sides: str
    reads: str
    ratio: str

    @property
    def parameters(self) -> dict[str, Any]:
        """The type of each key that a test needs for this rule."""
        hints = get_type_hints(self.judge)
        return {name: hints[name] for name in list(signature(self.judge).parameters)[1:]}

    @property
    def about(self) -> str:
        """What the rule compares, for the page of all claims."""
        return " ".join((self.judge.__doc__ or "").split())


RULES: dict[str, Rule] = {}  # by name, in the order of the page of all claims


def rule(sides: str = "of", reads: str = "end", ratio: str = "") -> Callable[..., Any]:
    """A decorator that adds a function to the rules; the arguments are those of `Rule`."""

    def add(judge: Callable[..., Outcome]) -> Callable[..., Outcome]:
        RULES[judge.__name__] = Rule(judge, sides, reads, ratio)
        return judge

    return add


def _difference(of: float, than: float) -> float:
    """`of` minus `than`; infinite if one run diverged, and 0 if both did."""
    return 0.0 if of == than else of - than


def _relative(of: float, than: float) -> float:
    difference = _difference(of, than)
    if not difference or math.isinf(difference):
        return difference
    return difference / abs(than) if than else math.copysign(math.inf, difference)


def _log_ratio(of: Number, than: Number) -> float:
    """The logarithm of `of` / `than`; infinite if `of` is 0 or `than` is 0 or infinite, and 0 if they are equal."""
    if of == than:
        return 0.0
    return math.log(of / than) if of and math.isfinite(than) and than else math.copysign(math.inf, of - than)


@rule()
def ends_better(pairing: Pairing, margin: Number) -> Outcome:
    """The first side ends better than the second by more than the margin. With several metrics, it must be better in
    all of them, and the effect is the smallest of their relative differences."""
    return bounded(_ends(pairing), margin)


@rule()
def ends_better_in_all(pairing: Pairing, margin: Number) -> Outcome:
    """The first side ends better than the second by more than the margin in every metric. Each metric has an interval
    of its own: all must lie above the margin, and one below it contradicts. The effect is the relative difference in
    the metric whose interval begins lowest."""
    effects = _relative_ends(pairing)
    if not all(effects):  # all runs diverged
        return Outcome(())
    outcomes = {metric: bounded(found, margin) for metric, found in zip(pairing.metrics[0], effects, strict=True)}
    contradicted = [metric for metric, outcome in outcomes.items() if outcome.verdict == CONTRADICTED]
    lowest = min(contradicted or outcomes, key=lambda metric: (outcomes[metric].interval[0], outcomes[metric].mean))
    pairing.marks.add(f"the effect is that of {lowest}")
    return outcomes[lowest]


@rule()
def no_worse(pairing: Pairing, margin: Number) -> Outcome:
    """The first side does not end worse than the second by the margin or more."""
    return bounded(_ends(pairing), -margin)


def _ends(pairing: Pairing) -> list[float]:
    if len(pairing.metrics[0]) == 1:
        return [_difference(of, than) for of, than in pairing.signed_values()]
    return [min(row) for row in zip(*_relative_ends(pairing), strict=True)]


def _relative_ends(pairing: Pairing) -> list[list[float]]:
    """The relative differences of two sides in each metric, by seed."""
    return [[_relative(*row) for row in pairing.signed_values(k)] for k in range(len(pairing.metrics[0]))]


@rule(sides="order")
def ranking(pairing: Pairing) -> Outcome:
    """The sides end in this order, the best first; the effect is the smallest difference between neighbours."""
    return bounded([min(_difference(a, b) for a, b in pairwise(row)) for row in pairing.signed_values()])


@rule(sides="sides")
def trend(pairing: Pairing, at: tuple[Number, ...]) -> Outcome:
    """The sides end worse the larger their value in `at` is. The effect is the slope of a straight line through the
    sides: how much worse they end for each 1 that the value grows. A diverged run counts like the worst that did not.
    """
    effects = []
    for row in pairing.signed_values():
        worst = min((value for value in row if math.isfinite(value)), default=0.0)
        effects.append(-linear_regression(at, [max(value, worst) for value in row]).slope)
    return Outcome(tuple(effects))


@rule(sides="sides")
def alike(pairing: Pairing, margin: Number) -> Outcome:
    """All sides end within the margin of each other; the effect is minus their range."""
    ranges = [_difference(min(row), max(row)) for row in pairing.signed_values()]
    return bounded(ranges, -margin)


@rule(reads="curve", ratio="in {} of the updates")
def reaches_first(pairing: Pairing, level: Number) -> Outcome:
    """The first side reaches the level in fewer updates; the effect is the logarithm of the ratio of updates."""
    metric = pairing.metrics[0][0]
    return _first(pairing, lambda run: run.reached(metric, level))


@rule(reads="curve", ratio="in {} of the updates")
def settles_first(pairing: Pairing, share: Number) -> Outcome:
    """The first side settles in fewer updates: its curve comes within `share` of its own lowest value. The effect is
    that of `reaches_first`. A diverged run never settles."""
    metric = pairing.metrics[0][0]
    return _first(pairing, lambda run: None if pairing.lost(run) else run.steady(metric, share, pairing.updates))


def _first(pairing: Pairing, when: Callable[[Run], tuple[float, float] | None]) -> Outcome:
    limit, effects, bounds = pairing.updates or math.inf, [], []
    for (of,), (than,) in pairing.by_seed.values():
        length = min(limit, max(of.result.updates, than.result.updates))
        counts, befores = [], []
        for side, run in (("of", of), ("than", than)):
            reached = when(run)
            found = reached is not None and reached[0] <= length
            pairing.marks |= set() if found else {NEVER[side]}
            counts.append(max(1, reached[0] if reached is not None and found else length))
            befores.append(max((u for u in run.series(pairing.metrics[0][0]) if u < counts[-1]), default=0))
        effects.append(math.log(counts[1] / counts[0]))
        bounds += [_log_ratio(befores[1], counts[0]), -_log_ratio(befores[0], counts[1])]
    return Outcome(tuple(effects), resolution=(min(bounds), max(bounds)))


@rule(reads="")
def diverges(pairing: Pairing) -> Outcome:
    """The first side diverges and the second does not. The effect is 1 if so, -1 for the reverse, and 0 if both or
    none diverge. All pairs must agree."""
    lost = [[pairing.lost(side[0]) for side in sides] for sides in pairing.by_seed.values()]
    return Outcome(tuple(float(of) - float(than) for of, than in lost), unanimous=True)


@rule(reads="", ratio="{} times the largest gradient norm")
def less_stable(pairing: Pairing, factor: Number) -> Outcome:
    """The largest gradient norm (mean over a record) of the first side is more than `factor` times that of the second,
    or only the first side diverges or has a norm that is not finite. The effect is the logarithm of the ratio."""
    norm, updates = "train/grad_norm", pairing.updates

    def peak(run: Run) -> float | None:
        return run.peak(norm, updates) if run.always_finite(norm, updates) else None

    mark = "a run that alone diverged, or had no finite norm, counts as e times the factor"
    return _times(pairing, factor, peak, mark)


@rule(reads="", ratio="{} times as unsteady")
def less_steady(pairing: Pairing, factor: Number) -> Outcome:
    """Training of the first side is more than `factor` times as unsteady as that of the second, or only the first side
    diverges. Unsteady is by how much the training loss lies above its lowest value so far, as the mean logarithm of
    their ratio over all records. The effect is the logarithm of the sides' ratio."""
    mark = "a run that alone diverged counts as e times the factor"
    return _times(pairing, factor, lambda run: run.unsteadiness(pairing.updates), mark)


def _times(pairing: Pairing, factor: Number, measure: Callable[[Run], float | None], mark: str) -> Outcome:
    """The logarithms of the ratios of a measure of both sides. A run that diverged or has none counts with a mark."""
    threshold, effects = math.log(factor), []
    for sides in pairing.by_seed.values():
        first, second = (None if pairing.lost(run) else measure(run) for (run,) in sides)
        if first is None or second is None:
            pairing.marks.add(mark)
            effects.append((threshold + 1) * ((first is None) - (second is None)))
        else:
            effects.append(_log_ratio(first, second))
    return bounded(effects, threshold, have_sizes=mark not in pairing.marks)


@rule(reads="", ratio="{} times the learning rate")
def larger_rate(pairing: Pairing, key: str) -> Outcome:
    """The largest learning rate at which the first side trains is above that of the second. A side trains at a rate if
    neither this rate nor a smaller one diverges. The effect is the logarithm of the ratio. A side that trains at no
    rate counts with half of the smallest rate."""

    def trained(runs: list[Run]) -> list[float]:
        ordered = sorted(runs, key=lambda run: float(run.overrides[key]))
        return [float(run.overrides[key]) for run in takewhile(lambda run: not pairing.lost(run), ordered)]

    return _largest(pairing, key, trained)


@rule(reads="curve", ratio="{} times the learning rate")
def learns_at_larger_rate(pairing: Pairing, key: str, level: Number) -> Outcome:
    """The largest learning rate at which the first side reaches the level is above that of the second. The effect is
    the logarithm of the ratio. A side that reaches the level at no rate counts with half of the smallest rate."""

    def learned(run: Run) -> bool:
        reached = run.reached(pairing.metrics[0][0], level)
        return reached is not None and reached[0] <= (pairing.updates or math.inf)

    return _largest(pairing, key, lambda runs: [float(run.overrides[key]) for run in runs if learned(run)])


def _largest(pairing: Pairing, key: str, good: Callable[[list[Run]], list[float]]) -> Outcome:
    """For each seed, the logarithm of the ratio of the sides' largest good rates."""
    effects, bounds = [], []
    for sides in pairing.by_seed.values():
        largest, nexts = [], []
        for runs in sides:
            rates = [float(run.overrides[key]) for run in runs]
            largest.append(max(good(runs), default=min(rates) / 2))
            nexts.append(min((rate for rate in rates if rate > largest[-1]), default=math.inf))
            pairing.marks |= {LARGEST} if largest[-1] == max(rates) else set()
        effects.append(math.log(largest[0] / largest[1]))
        bounds += [_log_ratio(largest[0], nexts[1]), -_log_ratio(largest[1], nexts[0])]
    return Outcome(tuple(effects), resolution=(min(bounds), max(bounds)))
