"""Renders the judged claims: results/claims.md, and the shorter table in README.md."""

import math
from collections.abc import Callable, Collection
from typing import Any

from bnrnn.metrics import metric_of
from bnrnn.report import rules
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.outcomes import NOT_SHOWN, Outcome
from bnrnn.report.rule_history import registered
from bnrnn.report.rules import NEVER, PROPERTY
from bnrnn.report.verdicts import Claim, JudgedTest, hours_of, metrics_of, sides_of
from bnrnn.training.cells import Cell


def effect_in_words(tested: JudgedTest) -> str:
    """The mean effect with its interval, in the unit of the table."""
    outcome, test = tested.outcome, tested.test
    if outcome is None:
        return NONE
    rule = test["rule"]
    if rule == PROPERTY:
        return f"{outcome.agree} of {outcome.n}"
    if rule == "diverges":
        return f"in {outcome.agree} of {outcome.n} pairs"
    if rule in ("reaches_first", "settles_first"):
        late = [side for side, mark in NEVER.items() if mark in outcome.marks]
        bound = {"of": "at least ", "than": "at most "}[late[0]] if len(late) == 1 else ""
        return _interval(outcome, lambda x: f"{math.exp(-x):.2f}", f"in {bound}{{}} of the updates", reverse=True)
    if rule == "less_stable":
        return _interval(outcome, lambda x: f"{math.exp(x):.3g}", "{} times the largest gradient norm")
    if rule in ("larger_rate", "learns_at_larger_rate"):
        return _interval(outcome, lambda x: f"{math.exp(x):.3g}", "{} times the learning rate")
    metrics = metrics_of(test, sides_of(test)[0])
    if len(metrics) > 1:
        return _interval(outcome, lambda x: f"{100 * x:+.1f}", "{} %")
    metric = metric_of(metrics[0])
    assert metric is not None
    return _interval(outcome, lambda x: f"{metric.scale * x:+.{metric.digits}f}", f"{{}} {metric.unit}".strip())


def _interval(outcome: Outcome, shown: Callable[[float], str], words: str, reverse: bool = False) -> str:
    low, high = reversed(outcome.interval) if reverse else outcome.interval
    bounds = f" [{shown(low)}, {shown(high)}]" if low != high and outcome.n > 1 else ""
    return words.format(shown(outcome.mean) + bounds)


def verdict_in_words(tested: JudgedTest) -> str:
    """The verdict of one test. If it is not shown, the number of pairs and their tendency are added."""
    if tested.outcome is None:
        return "not run"
    if tested.verdict != NOT_SHOWN:
        return tested.verdict
    return f"{NOT_SHOWN} (n={tested.outcome.n}, {tested.outcome.tendency})"


def rests_on(claim: Claim) -> str:
    """The scope of a claim's evidence in words, with the number of seeds or draws."""
    if claim.scope is None:
        return "not run"
    run = [t for t in claim.counted if t.outcome]
    least = min(t.outcome.n for t in run if t.outcome)
    lengths = sorted({t.updates for t in run if t.updates})
    words = {"paper": "paper's data and length", "shorter": "paper's data, shorter", "other data": "other data"}
    length = f", {' and '.join(f'{n:,}' for n in lengths)} updates" if lengths and claim.scope != "paper" else ""
    missing = len(claim.counted) - len(run)
    return f"{words[claim.scope]}{length}, n={least}" + (f"; {missing} of its tests not run" if missing else "")


def verdict_with_tendency(claim: Claim) -> str:
    """The verdict of a claim. If nothing is shown, it also names the tendency of the runs."""
    run = [t.outcome for t in claim.counted if t.outcome]
    if claim.verdict == NOT_SHOWN and run:
        return f"{NOT_SHOWN} ({', '.join(sorted({outcome.tendency for outcome in run}))})"
    return claim.verdict


def _claim_in_words(claim: Claim) -> list[str]:
    """[name, claim, verdict, evidence]."""
    return [claim.name, claim.says, f"**{verdict_with_tendency(claim)}**", rests_on(claim)]


def evidence(claim: Claim) -> tuple[str, list[str]]:
    """The effects that a verdict rests on, in words, and the keys `<paper>/<table>` of the pages with the runs."""
    run = [t for t in claim.counted if t.outcome]
    return "; ".join(effect_in_words(t) for t in run) or NONE, sorted({t.key for t in run})


def render_overview(claims: list[Claim]) -> str:
    """A table with one row per claim, for the beginning of results/claims.md."""
    rows = []
    for claim in claims:
        effects, keys = evidence(claim)
        pages = ", ".join(f"[{key.split('/')[1]}]({key}.md)" for key in keys)
        rows.append([*_claim_in_words(claim), effects, pages or NONE])
    return markdown(["", "claim", "verdict", "rests on", "effect [95 %]", "runs"], rows)


def render_short(claims: list[Claim]) -> str:
    """A line for every claim that has runs, and one line for all others, as README.md shows them."""
    table = markdown(["", "claim", "verdict", "evidence"], [_claim_in_words(c) for c in claims if c.scope])
    without = [claim.name for claim in claims if not claim.scope]
    return table + (f"\nNot run yet: {', '.join(without)}.\n" if without else "")


INTRODUCTION = """
A program computed this page from the runs in this folder, by the rules in `experiments/*/claims.yaml`.

- Runs are paired by seed, and a rule turns each pair into an effect. A test *holds* if it has at least three pairs and
  the 95 % interval of their mean effect (Student's t) lies above the threshold. It is *contradicted* if the interval is
  below it. For divergence, and for properties of an analysis, all pairs or draws have to agree instead.
- Any other outcome is *not shown*. The page then says whether the mean effect agrees or disagrees with the claim.
- A claim *holds* if all its tests on the paper's data and length hold. It holds *in part* if some do and none is
  contradicted, or if only shorter runs or other data show it. The same goes for *contradicted*.
- A run that diverged counts. A rule that was committed after the first run it judges is marked *after*.
- Several claims rest on the same runs. Intervals are not corrected for that.
"""


def render(claims: list[Claim], planned: list[tuple[Cell, float]], measured: Collection[str] = ()) -> str:
    """The page of all claims: one row per claim, then all tests, then the tests that have not been run.

    Args:
        planned: the cells that a campaign will train, with their estimated core hours.
        measured: the keys `<paper>/<table>` of tables and figures that have a page to which tests can link.
    """
    parts = ["# Claims of the papers", INTRODUCTION, render_overview(claims)]
    parts += ["## The rules", "".join(f"- `{name}`: {_doc(rule)}\n" for name, rule in rules.RULES.items())]
    parts[-1] += (
        f"- `{PROPERTY}`: a function of the analysis, which decides for every draw or every model whether the claim "
        "holds for it.\n"
    )
    for paper in sorted({claim.paper for claim in claims}):
        parts.append(f"## {paper}")
        parts += [_render_claim(claim, measured) for claim in claims if claim.paper == paper]
    return "\n".join([*parts, "## Tests that have not been run", _render_missing(claims, planned, measured)])


def _render_missing(claims: list[Claim], planned: list[tuple[Cell, float]], measured: Collection[str]) -> str:
    rows = []
    for claim in claims:
        missing = [t for t in claim.tested if t.outcome is None and "replaced" not in t.test]
        for t in missing:
            hours = hours_of(t, planned)
            cost = f"{hours:.1f}" if hours else "not in the campaign"
            rows.append([claim.name, t.test["scope"], rule_in_words(t, measured), cost])
    header = ["claim", "scope", "test", "hours"]
    about = (
        "Core hours of the runs in conf/campaign.yaml that a test still needs, as estimated there. Of runs that differ "
        "only in their number of updates, the shortest counts.\n"
    )
    return f"{about}\n{markdown(header, rows)}"


def _doc(rule: Callable[..., Any]) -> str:
    return " ".join((rule.__doc__ or "").split())


def _render_claim(claim: Claim, measured: Collection[str]) -> str:
    rows = []
    for t in claim.tested:
        marks = "; ".join(t.outcome.marks) if t.outcome else ""
        n = str(t.outcome.n) if t.outcome else NONE
        rows.append(
            [
                t.test["scope"],
                rule_in_words(t, measured),
                n,
                effect_in_words(t),
                verdict_in_words(t),
                registered(t),
                marks,
            ]
        )
    header = ["scope", "test", "n", "effect [95 %]", "verdict", "rule and runs", ""]
    return f"### {claim.name}: {claim.says}\n\n{claim.where}. **{claim.verdict}**\n\n{markdown(header, rows)}"


def rule_in_words(tested: JudgedTest, measured: Collection[str]) -> str:
    """A test of claims.yaml in one line, with a link to its page if there is one."""
    test = tested.test
    sides = [] if test["rule"] == PROPERTY else sides_of(test)
    between = " > " if "order" in test else ", " if "sides" in test else " against "
    skip = ("scope", "rule", "order", "sides", "of", "than", "where", "experiment", "analysis", "note", "replaced")
    page = f"[{tested.key}]({tested.key}.md)" if tested.key in measured else f"`{tested.key}`"
    parts = [f"`{test['rule']}` {page}"]
    parts += [_plain(test["where"])] if "where" in test else []
    parts += [between.join(_plain(side) for side in sides)] if sides else []
    parts += [f"{k} {_plain(v)}" for k, v in test.items() if k not in skip]
    parts += [test["note"]] if "note" in test else []
    parts += [f"replaced: {test['replaced']}"] if "replaced" in test else []
    return "; ".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={_plain(v)}" for k, v in value.items()) or "recipe"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
