"""Runs the tests of the claims in `experiments/<paper>/claims.yaml`: chooses their runs, and applies their rules."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bnrnn.config import sweep
from bnrnn.errors import BnrnnError
from bnrnn.report import rules
from bnrnn.report.analyses import commits_of, results_of
from bnrnn.report.claims import load_analysis
from bnrnn.report.outcome import Outcome
from bnrnn.report.rules import PROPERTY, Pairing
from bnrnn.report.run import Run, depends_on_order
from bnrnn.system.files import read_record

Load = Callable[[str], list[Run]]  # the finished runs of an experiment

SCOPES = ("paper", "shorter", "other data")  # kinds of evidence, the strongest first
OWN = ("metric", "experiment")  # keys of a side that are not overrides
REMARKS = ("note", "replaced", "part", "known", "per")  # keys of a test that do not change its outcome


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
    def n(self) -> int:
        """The number of pairs, draws or models."""
        return self.outcome.n if self.outcome else 0


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
    runs = [run for chosen in choices for s in seeds for run in chosen[s]]
    is_curve = "updates" in test or rule in rules.OF_CURVES  # numbers of whole runs are of population statistics
    depends = any(
        m.endswith("_batch_statistics") or (is_curve and depends_on_order(m)) for m in chain(*pairing.metrics)
    )
    if depends and any(run.in_file_order for run in runs):
        pairing.marks.add(rules.FILE_ORDER)
    outcome = replace(outcome, marks=tuple(sorted(pairing.marks)))
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
    known = ("scope", "rule", "analysis", "property", "updates", *REMARKS)
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


def wanted_of(test: dict[str, Any], side: dict[str, Any]) -> dict[str, Any]:
    """The overrides that the runs of a side must have."""
    return {**test.get("where", {}), **{k: v for k, v in side.items() if k not in OWN}}


def _choose(paper: str, test: dict[str, Any], side: dict[str, Any], load: Load, where: str) -> dict[str, list[Run]]:
    """The runs of a side, by seed: one run, or one for every value of the key that the rule compares."""
    key = f"{paper}/{side.get('experiment', test['experiment'])}"
    wanted = wanted_of(test, side)
    free, metrics = test.get("best_of") or test.get("key"), metrics_of(test, side)
    values = _swept(free, key, where) if free else set()
    found: dict[str, dict[str, Run]] = {}
    for run in load(key):
        if not run.stale and is_chosen(run.overrides, key, wanted, free) and _is_long_enough(run, test, metrics):
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


def is_chosen(overrides: dict[str, str], key: str, wanted: dict[str, Any], free: str | None) -> bool:
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
