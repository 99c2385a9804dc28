"""Whether new runs agree with the stored ones of the same recipe, or with the paper."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bnrnn.report.claim_types import Number, cell_of
from bnrnn.report.claims import has_entry, table_of
from bnrnn.report.outcome import student_interval
from bnrnn.report.run import Run
from bnrnn.report.stored import Stored, summary_of
from bnrnn.report.summary import Summary, rounded
from bnrnn.report.tables import number_of
from bnrnn.training.results import flat, identity

CONSISTENT, ITSELF, DIFFERS = "consistent", "consistent (the stored run itself)", "differs"
NOTHING = "nothing to compare with"
STATES = (DIFFERS, CONSISTENT, ITSELF, NOTHING)  # a cell has the first state that one of its runs has
LEAST = 3  # stored seeds that make an interval
LEVEL = 0.95  # of all intervals of a run together
APART = ("seed", "evaluation_order")  # options in which runs of one recipe may differ
MEASURED = ("eval_batches", "population_batches")  # the options of the budget that change what a number means


@dataclass(frozen=True)
class Finding:
    """The state of a run or a cell, and why. `distance` is in half widths of the interval or tolerance."""

    state: str
    why: str
    distance: float = 0.0


def recipe_of(config: dict[str, Any]) -> dict[str, Any]:
    """The identity of a configuration without its seed, its length and the order in which it is evaluated."""
    budget = {k: config.get("budget", {}).get(k) for k in MEASURED}
    return identity({k: v for k, v in config.items() if k not in APART} | {"budget": budget})


def same_recipe(one: Summary, other: Summary) -> bool:
    """Whether two runs differ at most in seed, length and order of evaluation."""
    return one.key == other.key and recipe_of(one.config) == recipe_of(other.config)


def judge_cell(runs: list[Run], stored: Stored) -> Finding:
    """The finding of a cell: new runs that differ only in their seed."""
    found = {run.seed: judge_run(run, stored) for run in runs}
    state = next(state for state in STATES if any(finding.state == state for finding in found.values()))
    seeds = [seed for seed, finding in found.items() if finding.state == state]
    worst = found[max(seeds, key=lambda seed: found[seed].distance)]
    if len(found) == 1 or state == ITSELF:
        return Finding(state, f"seed {', '.join(seeds)}" if state == ITSELF else worst.why, worst.distance)
    counted = f"{len(found)} seeds" if len(seeds) == len(found) else f"{len(seeds)} of {len(found)} seeds"
    which = "the furthest is" if worst.distance else "for example"
    named = next(seed for seed in seeds if found[seed] is worst)
    return Finding(state, f"{counted}, {which} seed {named}: {worst.why}", worst.distance)


def judge_run(run: Run, stored: Stored) -> Finding:
    """The finding of one run: by the first of the comparisons that is possible."""
    new = summary_of(run)
    alike = [other for other in stored.finished(new.key) if same_recipe(new, other)]
    if any(_is_copy(new, other) for other in alike):
        return Finding(ITSELF, "")
    finding = _by_divergence(run, new, alike) or _by_interval(run, new, alike) or _by_paper(run, new, alike)
    if finding is None:  # only now are the curves of unfinished runs needed
        curves = [*alike, *(other for other in stored.unfinished(new.key) if same_recipe(new, other))]
        finding = _by_curve(run, new, curves)
    return finding or Finding(NOTHING, _why_nothing(new, stored.finished(new.key), alike))


def _is_copy(new: Summary, other: Summary) -> bool:
    """Whether a run is a stored one: the same seed, records and numbers, as far as the package has their digits."""
    same = new.seed == other.seed and new.records_sha256 == other.records_sha256
    return same and _short(new) == _short(other)


def _short(summary: Summary) -> dict[str, float]:
    return {name: rounded(value) for name, value in summary.numbers.items()}


def _of_length(new: Summary, alike: Iterable[Summary]) -> list[Summary]:
    """The stored runs of the same length, one for each seed. A diverged one would have diverged here too."""
    same = [s for s in alike if s.updates == new.updates or (s.status == "diverged" and s.updates < new.updates)]
    return list({s.seed: s for s in same if s.status != "unfinished"}.values())


def _by_divergence(run: Run, new: Summary, alike: list[Summary]) -> Finding | None:
    """Compare whether the runs diverged; None if neither did, or only some stored ones."""
    if new.status == "diverged":
        seen = [s for s in alike if s.status == "diverged" or s.updates >= new.updates]
        diverged = sum(s.status == "diverged" for s in seen)
        told = f"it diverged at update {new.updates:,}"
        if diverged:
            return Finding(CONSISTENT, f"{told}, as {diverged} of {_seeds(len(seen))} did")
        return _differing(run, new, seen, f"{told}, and none of {_seeds(len(seen))} did") if seen else None
    same = _of_length(new, alike)
    if len(same) >= LEAST and all(s.status == "diverged" for s in same):
        return _differing(run, new, same, f"it did not diverge, and {_seeds(len(same))} did")
    return None


def _by_interval(run: Run, new: Summary, alike: list[Summary]) -> Finding | None:
    """Compare the numbers with the prediction intervals of stored runs of the same length; None without intervals."""
    same = [s for s in _of_length(new, alike) if s.status == "finished"]
    values: dict[str, list[float]] = {}
    for name in new.numbers:
        comparable = [s.numbers[name] for s in same if name in s.numbers and not _depends_on_order(name, new, s)]
        if len(comparable) >= LEAST and (len(set(comparable)) > 1 or rounded(comparable[0]) == _short(new)[name]):
            values[name] = comparable  # equal numbers of all seeds say nothing about another one
    if not values or new.status != "finished":
        return None
    level = 1 - (1 - LEVEL) / len(values)
    intervals = {name: student_interval(comparable, level, of_next=True) for name, comparable in values.items()}
    distances = {name: _distance(new.numbers[name], *interval) for name, interval in intervals.items()}
    worst = max(distances, key=lambda name: distances[name])
    spread = "{:.4g} to {:.4g}".format(*intervals[worst])
    of = f"{_seeds(len(values[worst]))} at {new.updates:,} updates"
    told = _not_compared(new, same)
    if distances[worst] <= 1:
        why = f"{', '.join(values)} as in {of}; nearest to its limits is {worst} {new.numbers[worst]:.4g}, in {spread}"
        return Finding(CONSISTENT, why + told, distances[worst])
    beyond = _beyond(new.numbers[worst], *intervals[worst])
    why = f"{worst} {new.numbers[worst]:.4g} is {beyond:.2g} outside of {spread}, the interval of {of}"
    return _differing(run, new, same, why + told, distances[worst])


def _depends_on_order(name: str, new: Summary, other: Summary) -> bool:
    """Whether a number cannot be compared, because it uses batch statistics and the batches were others."""
    return name.startswith("valid/") and new.order != other.order and (new.normalizes or other.normalizes)


def _not_compared(new: Summary, same: list[Summary]) -> str:
    orders = {s.order for s in same for name in new.numbers if _depends_on_order(name, new, s)}
    if not orders:
        return ""
    return f"; valid/{new.metric} cannot be compared: evaluated in the order {new.order} here, {_or(orders)} there"


def _by_paper(run: Run, new: Summary, alike: list[Summary]) -> Finding | None:
    """Compare with the paper's numbers and their tolerances; None if it has none for this run."""
    parts = published(run)
    if not parts:
        return None
    if new.status == "diverged":
        return _differing(run, new, alike, f"it diverged at update {new.updates:,}, and the paper has numbers")
    distances = [abs(value - printed) / tolerance for _, value, printed, tolerance in parts]
    distance = max(distances)
    what, value, printed, tolerance = parts[distances.index(distance)]
    why = f"{what}: {value:.4g}, the paper's is {printed} with the tolerance {tolerance}"
    return Finding(CONSISTENT, why, distance) if distance <= 1 else _differing(run, new, alike, why, distance)


def published(run: Run) -> list[tuple[str, float, Number, Number]]:
    """What the paper printed for a run of its length: the quantity, our value, the paper's value and its tolerance."""
    if not has_entry(run.result.name):
        return []
    table = table_of(run.result.name)
    if not run.is_whole(table.enough_updates):
        return []
    found: list[tuple[str, float, Number, Number]] = []
    row, col = (run.overrides.get(axis, "") for axis in (table.rows, table.cols))
    for part in table.published if table.has_cell(run.overrides, row, col) else ():
        printed = part.cells.get(row, {}).get(col)
        try:
            value = number_of(run, part)
        except (KeyError, ValueError):  # the run did not measure it, or it has diverged
            value = math.nan
        if printed is not None and (math.isfinite(value) or run.diverged()):
            found.append((part.what, value, printed, part.tolerance))
    return found


def _by_curve(run: Run, new: Summary, alike: list[Summary]) -> Finding | None:
    """Compare the curves of validation at the last shared update; None without one."""
    name = f"valid/{new.metric}"
    curves: dict[str, dict[int, float]] = {}
    for other in sorted(alike, key=lambda s: s.updates):  # of a seed, the longest counts
        if not _depends_on_order(name, new, other) and new.curve.keys() & other.curve.keys():
            curves[other.seed] = other.curve
    at = {update: [curve[update] for curve in curves.values() if update in curve] for update in new.curve}
    enough = [update for update, values in at.items() if len(values) >= LEAST and len(set(values)) > 1]
    if not curves:
        return None
    update = max(enough or [update for update, values in at.items() if values])
    values, value = at[update], new.curve[update]
    if not enough:
        difference = f"difference {value - mean(values):+.3g} in {name}"
        return Finding(NOTHING, f"only {_seeds(len(values))} at update {update:,}, {difference}")
    low, high = student_interval(values, LEVEL, of_next=True)
    distance = _distance(value, low, high)
    spread = f"{low:.4g} to {high:.4g}, the interval of {_seeds(len(values))} at update {update:,}"
    if distance <= 1:
        return Finding(CONSISTENT, f"{name} {value:.4g} is in {spread}", distance)
    why = f"{name} {value:.4g} is {_beyond(value, low, high):.2g} outside of {spread}"
    return _differing(run, new, alike, why, distance)


def _distance(value: float, low: float, high: float) -> float:
    """The distance of a value from the middle of an interval, in half widths; infinite for a value that is not one."""
    if low == high:
        return 0.0
    distance = abs(value - (low + high) / 2) / ((high - low) / 2)
    return distance if math.isfinite(distance) else math.inf


def _beyond(value: float, low: float, high: float) -> float:
    return max(low - value, value - high)


def _seeds(count: int) -> str:
    return f"{count} stored seed{'' if count == 1 else 's'}"


def _or(values: Iterable[str]) -> str:
    return " or ".join(sorted(values))


def _differing(run: Run, new: Summary, others: list[Summary], why: str, distance: float = math.inf) -> Finding:
    """A difference, with the first things to check."""
    return Finding(DIFFERS, f"{why}; {first_checks(run, new, others)}", distance)


def first_checks(run: Run, new: Summary, others: list[Summary]) -> str:
    """What is recorded of a run and differs from all stored ones, as text."""
    if not others:
        return "no stored run has this configuration"
    found = []
    for title, own in _recorded(new).items():
        there = {str(value) for other in others if (value := _recorded(other)[title]) is not None}
        if own is not None and there and str(own) not in there:
            found.append(f"{title} {own} here, {_or(there)} there")
    if run.stale:
        found.append("its recipe has changed since it was trained")
    return f"check first: {', '.join(found)}" if found else "nothing that is recorded differs"


def _recorded(summary: Summary) -> dict[str, Any]:
    environment = summary.environment
    return {
        "precision": environment["precision"],
        "engine": environment["backend"],
        "device": environment["device"],
        "evaluation order": summary.order,
        "data digest": summary.data,
        "torch": environment["torch"],
    }


def _why_nothing(new: Summary, stored: list[Summary], alike: list[Summary]) -> str:
    """Why no stored run can be compared with a new one."""
    if alike and all(_depends_on_order(f"valid/{new.metric}", new, s) for s in alike):
        return f"evaluated in the order {new.order} here, {_or({s.order for s in alike})} there"
    if alike:
        lengths = ", ".join(f"{updates:,}" for updates in sorted({s.updates for s in alike}))
        return f"the stored runs have {lengths} updates, and were evaluated at none of this run's updates"
    if not stored:
        return f"no run of {new.key} is stored"
    cell = cell_of(new.overrides)
    if not (namesakes := [s for s in stored if cell_of(s.overrides) == cell]):
        return "no stored run has this configuration"
    here, there = flat(recipe_of(new.config)), flat(recipe_of(namesakes[0].config))
    changed = [k for k in sorted(here | there) if here.get(k) != there.get(k)]
    told = ", ".join(f"{k} {json.dumps(here.get(k))} here, {json.dumps(there.get(k))} there" for k in changed)
    return f"the stored runs have another recipe: {told}"
