"""Judges the claims in `experiments/<paper>/claims.yaml` by the runs: every test, and what follows for its claim."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bnrnn.config import ROOT, sweep
from bnrnn.errors import BnrnnError
from bnrnn.report import rules
from bnrnn.report.claims import load_analysis
from bnrnn.report.rules import NOT_SHOWN, PROPERTY, Outcome, Pairing
from bnrnn.report.runs import Run, load_runs

Load = Callable[[str], list[Run]]  # the finished runs of an experiment

SCOPES = ("paper", "shorter", "other data")  # of the evidence, the strongest first
OWN = ("metric", "experiment")  # keys of a side that are no overrides


@dataclass(frozen=True)
class JudgedTest:
    """A test of a claim with what came out; without an outcome it has not been run."""

    claim: str
    paper: str
    test: dict[str, Any]
    outcome: Outcome | None
    commits: tuple[str, ...] = ()  # with which the runs were begun

    @property
    def key(self) -> str:
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
        """The tests that the verdict rests on: of the strongest evidence that shows something, or else that was run.

        The paper's data and length come first, then shorter runs on its data, the longest first, then other data. A
        test that a better rule replaced does not count.
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
        """Of the evidence; None where no test has been run."""
        return self.counted[0].test["scope"] if self.counted else None

    @property
    def verdict(self) -> str:
        """That of the tests that count; lesser evidence than the paper's data and length judges a claim in part."""
        verdict = _together(self.counted)
        return verdict if self.scope == "paper" else rules.in_part(verdict)


def _together(tests: list[JudgedTest]) -> str:
    return rules.combined([t.verdict for t in tests])


def load_claims(results_dir: Path, root: Path = ROOT) -> list[Claim]:
    """Every claim of the papers, judged by the runs in `results_dir`."""
    load = cache(lambda key: load_runs(key, results_dir))
    claims = []
    for path in sorted((root / "experiments").glob("*/claims.yaml")):
        paper = path.parent.name
        for name, entry in (yaml.safe_load(path.read_text()).get("claims") or {}).items():
            tested = [judge(name, paper, test, results_dir, load, f"{path}: claim {name}") for test in entry["tests"]]
            claims.append(Claim(name, paper, entry["says"], entry["where"], tested))
    return claims


def judge(name: str, paper: str, test: dict[str, Any], results_dir: Path, load: Load, where: str) -> JudgedTest:
    """Run one test. Raises BnrnnError, naming the claim, for an entry that cannot be understood."""
    if test.get("scope") not in SCOPES:
        raise BnrnnError(f"{where}: scope is {test.get('scope')!r}: use {', '.join(SCOPES)}")
    if test["rule"] == PROPERTY:
        return _judge_property(name, paper, test, results_dir)
    rule = rules.rule_of(test, where)
    sides = sides_of(test)
    choices = [_choose(paper, test, side, load) for side in sides]
    seeds = sorted(set.intersection(*(set(chosen) for chosen in choices)))
    if not seeds:
        return JudgedTest(name, paper, test, None)
    pairing = Pairing(test, {s: [chosen[s] for chosen in choices] for s in seeds}, [metrics_of(test, s) for s in sides])
    outcome = rule(pairing)
    if not outcome.effects:  # every run diverged, which leaves nothing to compare
        return JudgedTest(name, paper, test, None)
    outcome = Outcome(outcome.effects, outcome.threshold, outcome.unanimous, tuple(sorted(pairing.marks)))
    runs = [run for chosen in choices for s in seeds for run in chosen[s]]
    return JudgedTest(name, paper, test, outcome, tuple(sorted({run.result.commits[0] for run in runs})))


def _judge_property(name: str, paper: str, test: dict[str, Any], results_dir: Path) -> JudgedTest:
    """A test of an analysis: its module has the property as a function that says of every draw whether it has it."""
    key = f"{paper}/{test['analysis']}"
    path, module = results_dir / f"{key}.json", load_analysis(key)
    if module is None or not path.exists():
        return JudgedTest(name, paper, test, None)
    result = json.loads(path.read_text())
    if test.get("updates", result.get("updates")) != result.get("updates"):
        return JudgedTest(name, paper, test, None)
    known = ("scope", "rule", "analysis", "property", "updates", "note", "replaced")
    has = getattr(module, test["property"])(result, **{k: v for k, v in test.items() if k not in known})
    outcome = Outcome(tuple(1.0 if held else -1.0 for held in has), unanimous=True)
    return JudgedTest(name, paper, test, outcome, (result["commit"],))


def sides_of(test: dict[str, Any]) -> list[dict[str, Any]]:
    """What a test compares: an order, several sides, or one side with another."""
    return test.get("order") or test.get("sides") or [test["of"], test["than"]]


def metrics_of(test: dict[str, Any], side: dict[str, Any]) -> list[str]:
    """The metrics of a side: its own, or the test's."""
    names = side.get("metric", test.get("metric", []))
    return [names] if isinstance(names, str) else names


def _choose(paper: str, test: dict[str, Any], side: dict[str, Any], load: Load) -> dict[str, list[Run]]:
    """The runs of a side by seed: one each, or one for every value of the key that the rule looks at."""
    key = f"{paper}/{side.get('experiment', test['experiment'])}"
    wanted = {**test.get("where", {}), **{k: v for k, v in side.items() if k not in OWN}}
    free, metrics = test.get("best_of") or test.get("key"), metrics_of(test, side)
    found: dict[str, dict[str, Run]] = {}
    for run in load(key):
        if not run.stale and _is_chosen(run, key, wanted, free) and _is_long_enough(run, test, metrics):
            value = run.overrides[free] if free else ""
            at = found.setdefault(run.seed, {})
            if value not in at or run.result.updates > at[value].result.updates:
                at[value] = run
    if not free:
        return {seed: list(at.values()) for seed, at in found.items()}
    complete = {seed: list(at.values()) for seed, at in found.items() if set(at) == set(sweep(key)[free])}
    if "best_of" in test:
        return {seed: [min(runs, key=_validation_loss)] for seed, runs in complete.items()}
    return complete


def _validation_loss(run: Run) -> float:
    return min(run.series("valid/loss").values()) if run.result.status == "finished" else math.inf


def _is_chosen(run: Run, key: str, wanted: dict[str, Any], free: str | None) -> bool:
    """Whether a run has these overrides, and beside them only what the recipe's grid leaves no choice about."""
    own = {k: v for k, v in run.overrides.items() if k != "seed" and not k.startswith("budget.")}
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
    """Whether a run has the length that the test asks for: of a longer one only curves can be cut."""
    if run.result.status == "diverged":
        return True
    updates = test.get("updates")
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
