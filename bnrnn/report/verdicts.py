"""Judges the claims in `experiments/<paper>/claims.yaml`: runs their tests and combines these into verdicts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bnrnn.config import ROOT, sweep
from bnrnn.errors import BnrnnError
from bnrnn.files import read_record
from bnrnn.report import rules
from bnrnn.report.analyses import commits_of, results_of
from bnrnn.report.claims import load_analysis, load_claim, read_claims
from bnrnn.report.outcomes import NOT_SHOWN, Outcome, combined, in_part
from bnrnn.report.rules import PROPERTY, Pairing
from bnrnn.report.runs import Run, load_runs
from bnrnn.training.cells import Cell

Load = Callable[[str], list[Run]]  # the finished runs of an experiment

SCOPES = ("paper", "shorter", "other data")  # kinds of evidence, the strongest first
OWN = ("metric", "experiment")  # keys of a side that are not overrides


@dataclass(frozen=True)
class JudgedTest:
    """A test of a claim with its outcome, which is None if the test has not been run."""

    claim: str
    paper: str
    test: dict[str, Any]
    outcome: Outcome | None
    commits: tuple[str, ...] = ()  # the commits with which the runs were started
    seeds: tuple[frozenset[str], ...] = ()  # for each side, the seeds of which it has a run
    updates: int | None = None  # the length up to which the runs are compared; None if the test has not been run

    @property
    def key(self) -> str:
        """`<paper>/<table>` of the page with its runs or its analysis."""
        return f"{self.paper}/{self.test.get('experiment') or self.test['analysis']}"

    @property
    def verdict(self) -> str:
        return self.outcome.verdict if self.outcome else NOT_SHOWN


@dataclass(frozen=True)
class Claim:
    """A claim with all its tests."""

    name: str
    paper: str
    says: str
    where: str
    tested: list[JudgedTest]

    @property
    def counted(self) -> list[JudgedTest]:
        """The tests that decide the verdict: those with the strongest evidence that shows something.

        If no test shows anything, these are the tests with the strongest evidence that were run. The strongest evidence
        is on the paper's data and length, then come shorter runs on its data, the longest first, then other data. A
        test that was replaced by one with a better rule does not count.
        """
        groups: dict[tuple[int, int], list[JudgedTest]] = {}
        for tested in self.tested:
            if "replaced" not in tested.test:
                scope = tested.test["scope"]
                length = tested.test.get("updates", 0) if scope == "shorter" else 0
                groups.setdefault((SCOPES.index(scope), -length), []).append(tested)
        run = [tests for _, tests in sorted(groups.items()) if any(t.outcome for t in tests)]
        shown = [tests for tests in run if _together(tests) != NOT_SHOWN]
        return next(iter(shown or run), [])

    @property
    def scope(self) -> str | None:
        """The scope of the evidence; None if no test has been run."""
        return self.counted[0].test["scope"] if self.counted else None

    @property
    def verdict(self) -> str:
        """The verdict of the tests that count; at most in part if they are not on the paper's data and length."""
        verdict = _together(self.counted)
        return verdict if self.scope == "paper" else in_part(verdict)


def _together(tests: list[JudgedTest]) -> str:
    return combined([t.verdict for t in tests])


def load_claims(results_dir: Path, root: Path = ROOT) -> list[Claim]:
    """All claims of the papers, judged by the runs in `results_dir`. Raises BnrnnError for an invalid test."""
    load = cache(lambda key: load_runs(key, results_dir))
    claims = []
    for path in sorted((root / "experiments").glob("*/claims.yaml")):
        paper = path.parent.name
        for name, entry in (read_claims(path).get("claims") or {}).items():
            tested = [judge(name, paper, test, results_dir, load, f"{path}: claim {name}") for test in entry["tests"]]
            claims.append(Claim(name, paper, entry["says"], entry["where"], tested))
    return claims


def judge(name: str, paper: str, test: dict[str, Any], results_dir: Path, load: Load, where: str) -> JudgedTest:
    """Run one test. Raises BnrnnError, with the name of the claim, for an unknown scope or rule."""
    if test.get("scope") not in SCOPES:
        raise BnrnnError(f"{where}: scope is {test.get('scope')!r}: use {', '.join(SCOPES)}")
    if test["rule"] == PROPERTY:
        return _judge_property(name, paper, test, results_dir)
    rule = rules.rule_of(test, where)
    sides = sides_of(test)
    choices = [_choose(paper, test, side, load, where) for side in sides]
    seen = tuple(frozenset(chosen) for chosen in choices)
    seeds = sorted(frozenset.intersection(*seen))
    if not seeds:
        return JudgedTest(name, paper, test, None, seeds=seen)
    pairing = Pairing(test, {s: [chosen[s] for chosen in choices] for s in seeds}, [metrics_of(test, s) for s in sides])
    outcome = rule(pairing)
    if not outcome.effects:  # all runs diverged, so there is nothing to compare
        return JudgedTest(name, paper, test, None, seeds=seen)
    if rule in rules.COARSE and len(set(outcome.effects)) == 1 < outcome.n:
        pairing.marks.add(rules.ALIKE)
    outcome = Outcome(outcome.effects, outcome.threshold, outcome.unanimous, tuple(sorted(pairing.marks)))
    runs = [run for chosen in choices for s in seeds for run in chosen[s]]
    updates = test.get("updates", max(run.result.updates for run in runs))
    return JudgedTest(name, paper, test, outcome, tuple(sorted({run.result.commits[0] for run in runs})), seen, updates)


def _judge_property(name: str, paper: str, test: dict[str, Any], results_dir: Path) -> JudgedTest:
    """Run a test of an analysis. The property is a function of its module that decides for every draw if it holds."""
    key = f"{paper}/{test['analysis']}"
    path, module = results_dir / f"{key}.json", load_analysis(key)
    if module is None or not path.exists():
        return JudgedTest(name, paper, test, None)
    stored = results_of(read_record(path, f"run {module.__name__}.py again"))
    wanted = test.get("updates", stored[0].get("updates"))
    result = next((result for result in stored if result.get("updates") == wanted), None)
    if result is None:
        return JudgedTest(name, paper, test, None)
    known = ("scope", "rule", "analysis", "property", "updates", "note", "replaced")
    has = getattr(module, test["property"])(result, **{k: v for k, v in test.items() if k not in known})
    outcome = Outcome(tuple(1.0 if held else -1.0 for held in has), unanimous=True)
    return JudgedTest(name, paper, test, outcome, tuple(commits_of(result)), updates=result.get("updates"))


def sides_of(test: dict[str, Any]) -> list[dict[str, Any]]:
    """The sides that a test compares: an order, several sides, or one side with another."""
    return test.get("order") or test.get("sides") or [test["of"], test["than"]]


def metrics_of(test: dict[str, Any], side: dict[str, Any]) -> list[str]:
    """The metrics of a side: its own, or the test's."""
    names = side.get("metric", test.get("metric", []))
    return [names] if isinstance(names, str) else names


def hours_of(tested: JudgedTest, planned: list[tuple[Cell, float]]) -> float:
    """The core hours of the planned cells that a test needs. Of cells that differ only in their number of updates, the
    cheapest counts."""
    costs: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for cell, cost in planned:
        if serves(cell, tested):
            run = cell.experiment, frozenset((k, v) for k, v in cell.overrides.items() if k != "budget.updates")
            costs[run] = min(cost, costs.get(run, math.inf))
    return sum(costs.values(), 0.0)


def serves(cell: Cell, tested: JudgedTest) -> bool:
    """Whether a side of a test that has no run of this cell's seed would use the cell. Its length is compared only if
    it is given in updates."""
    test, updates = tested.test, cell.overrides.get("budget.updates")
    if test["scope"] == "paper" and any(name.startswith("budget.") for name in cell.overrides):
        return False
    if updates is not None and int(updates) < test.get("updates", math.inf):
        return False
    if test["rule"] == PROPERTY:
        return cell.experiment == load_claim(tested.key).get("models")
    free, sides = test.get("best_of") or test.get("key"), sides_of(test)
    return any(
        cell.experiment == f"{tested.paper}/{side.get('experiment', test['experiment'])}"
        and _is_chosen(cell.overrides, cell.experiment, _wanted(test, side), free)
        for side, seeds in zip(sides, tested.seeds or [frozenset()] * len(sides), strict=True)
        if cell.overrides.get("seed") not in seeds
    )


def _wanted(test: dict[str, Any], side: dict[str, Any]) -> dict[str, Any]:
    """The overrides that the runs of a side must have."""
    return {**test.get("where", {}), **{k: v for k, v in side.items() if k not in OWN}}


def _choose(paper: str, test: dict[str, Any], side: dict[str, Any], load: Load, where: str) -> dict[str, list[Run]]:
    """The runs of a side, by seed: one run, or one for every value of the key that the rule compares."""
    key = f"{paper}/{side.get('experiment', test['experiment'])}"
    wanted = _wanted(test, side)
    free, metrics = test.get("best_of") or test.get("key"), metrics_of(test, side)
    values = _swept(free, key, where) if free else set()
    found: dict[str, dict[str, Run]] = {}
    for run in load(key):
        if not run.stale and _is_chosen(run.overrides, key, wanted, free) and _is_long_enough(run, test, metrics):
            value = run.overrides.get(free, "") if free else ""
            at = found.setdefault(run.seed, {})
            if value not in at or run.result.updates > at[value].result.updates:
                at[value] = run
    if not free:
        return {seed: list(at.values()) for seed, at in found.items()}
    complete = {seed: list(at.values()) for seed, at in found.items() if set(at) == values}
    if "best_of" in test:
        best = partial(_validation_loss, updates=test.get("updates"))
        return {seed: [min(runs, key=best)] for seed, runs in complete.items()}
    return complete


def _swept(free: str, key: str, where: str) -> set[str]:
    """The values of a key in an experiment's sweep. Raises BnrnnError unless they are positive numbers."""
    values = set(sweep(key).get(free, []))
    if not values or not all(_is_positive(value) for value in values):
        raise BnrnnError(f"{where}: expected a key for which {key} sweeps over positive numbers, found {free}")
    return values


def _is_positive(value: str) -> bool:
    try:
        return 0 < float(value) < math.inf
    except ValueError:
        return False


def _validation_loss(run: Run, updates: int | None) -> float:
    if run.diverged(updates):
        return math.inf
    return min(v for u, v in run.series("valid/loss").items() if updates is None or u <= updates)


def _is_chosen(overrides: dict[str, str], key: str, wanted: dict[str, Any], free: str | None) -> bool:
    """Whether a run with these overrides has the wanted ones, and its others are the only values in the grid."""
    own = {k: v for k, v in overrides.items() if k != "seed" and not k.startswith("budget.")}
    if any(name not in own or not _same(own[name], value) for name, value in wanted.items()):
        return False
    rest = {k: v for k, v in own.items() if k not in wanted and k != free}
    return all(sweep(key).get(k) == [v] for k, v in rest.items()) and (free is None or free in own)


def _same(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == str(value)


def _is_long_enough(run: Run, test: dict[str, Any], metrics: list[str]) -> bool:
    """Whether a run has the length that the test needs. Curves of longer runs can be cut; their test results cannot."""
    updates = test.get("updates")
    if run.diverged(updates):
        return True
    if updates is None:
        return run.full_length and all(_has(run, metric, None) for metric in metrics)
    if run.result.updates != updates and any(metric.startswith("test/") for metric in metrics):
        return False
    return run.result.updates >= updates and all(_has(run, metric, updates) for metric in metrics)


def _has(run: Run, metric: str, updates: int | None) -> bool:
    try:
        run.best_until(metric, updates)
    except BnrnnError:
        return False
    return True
