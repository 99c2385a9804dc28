"""Runs the tests of the claims: chooses their runs, pairs these by seed, and applies their rules."""

import math
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain

from bnrnn.config import sweep
from bnrnn.errors import BnrnnError
from bnrnn.report.analyses import commits_of, results_of
from bnrnn.report.claim_tests import claims_of, same
from bnrnn.report.claim_types import ClaimTest, Side, cell_of
from bnrnn.report.claims import analysis_of, papers, table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.outcome import JudgedTest, Outcome
from bnrnn.report.rules import PROPERTY, RULES, Pairing
from bnrnn.report.run import Run, depends_on_order
from bnrnn.report.schema import REMEDY
from bnrnn.report.verdicts import JudgedClaim

FILE_ORDER = (
    "validated in the order of the file, which is harder for a model with batch normalization if neighbours in the "
    "file are alike (D7)"
)


def judge_claims(evidence: Evidence) -> list[JudgedClaim]:
    """All claims of the papers, judged by the evidence."""
    claims = [claim for paper in papers() for claim in claims_of(paper).values()]
    return [JudgedClaim(claim, tuple(judge(test, evidence) for test in claim.tests)) for claim in claims]


def judge(test: ClaimTest, evidence: Evidence) -> JudgedTest:
    """Run one test. Raises BnrnnError, with its place, for a property that the analysis does not have."""
    if test.rule == PROPERTY:
        return _judge_property(test, evidence)
    rule = RULES[test.rule]
    choices = [_choose(test, side, evidence) for side in test.sides]
    seen = tuple(frozenset(chosen) for chosen in choices)
    seeds = sorted(frozenset.intersection(*seen))
    if not seeds:
        return JudgedTest(test, None, seeds=seen)
    by_seed = {seed: [chosen[seed] for chosen in choices] for seed in seeds}
    pairing = Pairing(by_seed, [side.metrics for side in test.sides], test.updates)
    outcome = rule.judge(pairing, **test.parameters)
    if not outcome.effects:  # all runs diverged, so there is nothing to compare
        return JudgedTest(test, None, seeds=seen)
    runs = [run for chosen in choices for seed in seeds for run in chosen[seed]]
    is_curve = test.updates is not None or rule.reads == "curve"  # numbers of whole runs are of population statistics
    depends = any(
        m.endswith("_batch_statistics") or (is_curve and depends_on_order(m)) for m in chain(*pairing.metrics)
    )
    if depends and any(run.in_file_order for run in runs):
        pairing.marks.add(FILE_ORDER)
    outcome = replace(outcome, marks=tuple(sorted(pairing.marks)))
    updates = test.updates or max(run.result.updates for run in runs)
    return JudgedTest(test, outcome, tuple(sorted({run.result.commits[0] for run in runs})), seen, updates)


def _judge_property(test: ClaimTest, evidence: Evidence) -> JudgedTest:
    """Run a test of an analysis. The property is a function of its module that decides for every draw if it holds."""
    analysis = analysis_of(test.key)
    decide = getattr(analysis.module(), test.property_name, None)
    wanted = set(signature(decide).parameters) - {"result"} if decide else set()
    if decide is None or wanted != test.parameters.keys():
        has = f"{test.property_name} with {', '.join(test.parameters) or 'no other keys'}"
        expected = f"a function of {analysis.program} and its parameters: {REMEDY}"
        raise BnrnnError(f"{test.place}: the property is {has}, expected {expected}")
    stored = results_of(evidence.numbers(test.key)) if evidence.has_numbers(test.key) else []
    lengths = [result.get("updates") for result in stored]
    length = test.updates or (lengths[0] if lengths else None)
    if length not in lengths:
        return JudgedTest(test, None)
    result = stored[lengths.index(length)]
    has = decide(result, **test.parameters)
    outcome = Outcome(tuple(1.0 if held else -1.0 for held in has), unanimous=True)
    return JudgedTest(test, outcome, tuple(commits_of(result)), updates=result.get("updates"))


def _choose(test: ClaimTest, side: Side, evidence: Evidence) -> dict[str, list[Run]]:
    """The runs of a side, by seed: one run, or one for every value of the key that the rule compares."""
    found: dict[str, dict[str, Run]] = {}
    for run in evidence.runs(side.key):
        if is_chosen(run.overrides, side, test.free) and _is_long_enough(run, test, side) and not run.stale:
            value = run.overrides.get(test.free, "")
            at = found.setdefault(run.seed, {})
            if value not in at or run.result.updates > at[value].result.updates:
                at[value] = run
    values = set(sweep(side.key)[test.free]) if test.free else {""}
    complete = {seed: list(at.values()) for seed, at in found.items() if set(at) == values}
    if not test.best_of:
        return complete
    best = partial(_validation_loss, updates=test.updates)
    return {seed: [min(runs, key=best)] for seed, runs in complete.items()}


def _validation_loss(run: Run, updates: int | None) -> float:
    if run.diverged(updates):
        return math.inf
    return min(v for u, v in run.series("valid/loss").items() if updates is None or u <= updates)


def is_chosen(overrides: dict[str, str], side: Side, free: str) -> bool:
    """Whether a run with these overrides has those of a side, and its others are the only values in the grid."""
    own = cell_of(overrides)
    if any(name not in own or not same(own[name], value) for name, value in side.overrides.items()):
        return False
    rest = {k: v for k, v in own.items() if k not in side.overrides and k != free}
    return all(sweep(side.key).get(k) == [v] for k, v in rest.items()) and (not free or free in own)


def _is_long_enough(run: Run, test: ClaimTest, side: Side) -> bool:
    """Whether a run has the length that a test needs. Curves of longer runs can be cut; their test results cannot."""
    if run.diverged(test.updates):
        return True
    if test.updates is None:
        is_whole = run.is_whole(table_of(side.key).enough_updates)
        return is_whole and all(_has(run, metric, None) for metric in side.metrics)
    if run.result.updates != test.updates and any(metric.startswith("test/") for metric in side.metrics):
        return False
    return run.result.updates >= test.updates and all(_has(run, metric, test.updates) for metric in side.metrics)


def _has(run: Run, metric: str, updates: int | None) -> bool:
    try:
        run.best_until(metric, updates)
    except BnrnnError:
        return False
    return True
