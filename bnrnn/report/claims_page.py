"""Renders the judged claims: results/claims.md, a page for each claim, and the short table in README.md."""

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from bnrnn.report import rules
from bnrnn.report.costs import hours_of
from bnrnn.report.effects import effect_in_words
from bnrnn.report.judging import REMARKS, JudgedTest, sides_of
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.outcome import LEAST_PAIRS
from bnrnn.report.rule_history import AFTER, BEFORE, PARTLY, age, registered
from bnrnn.report.rules import PROPERTY
from bnrnn.report.verdicts import EARLY, NOT_RUN, Claim, Verdict, scope_in_words

COLUMNS = ("at the paper's length", "early, or on other data")
INTRODUCTION = f"""
A program computed this page from the runs in this folder, by the rules in `experiments/*/claims.yaml`. Each claim has
two verdicts, and a page of its own with all tests.

- **At the paper's length**: runs on the paper's data, as long as the paper's. The claim *holds*, is *contradicted*, or
  is *undecided*. With fewer than {LEAST_PAIRS} seeds there is no verdict, only their number and the effect so far.
- **Early, or on other data**: shorter runs, and smaller data in place of the paper's. They *agree* or *disagree* with
  the claim, or are *undecided*. The strongest evidence with enough seeds decides, whatever weaker evidence shows. Early
  runs say nothing about how well trained models end, so claims about that have no verdict here.
- A rule turns the runs of each seed into an effect. The verdict is *holds* or *agrees* if the 95 % interval of the mean
  effect (Student's t) lies above the rule's threshold, and *contradicted* or *disagrees* if it lies below. For
  divergence, and for properties of an analysis, all pairs or draws have to agree instead.
- "too few seeds to say": the interval is so wide that it tells nothing about the size of the effect. The numbers are on
  the claim's page. Equal effects have no interval; where they were measured coarsely, their possible range is given.
- The column *rules* says whether the rules were committed before their runs were started.
- A run that diverged counts. Several claims rest on the same runs, and intervals are not corrected for that.
"""


def claim_pages(claims: list[Claim], results_dir: Path, measured: Collection[str] = ()) -> dict[Path, str]:
    """The page of all claims and that of each claim, by their paths.

    Args:
        measured: the keys `<paper>/<table>` of tables and figures that have a page to which tests can link.
    """
    pages = {results_dir / "claims" / f"{claim.name}.md": render_claim(claim, measured) for claim in claims}
    return {results_dir / "claims.md": render(claims, results_dir, measured), **pages}


def render(claims: list[Claim], results_dir: Path, measured: Collection[str] = ()) -> str:
    """The page of all claims: one row per claim, the rules, and what the tests without a verdict would cost."""
    parts = ["# Claims of the papers", INTRODUCTION, summary(claims) + "\n", render_overview(claims)]
    names = "".join(f"- `{name}`: {_doc(rule)}\n" for name, rule in rules.RULES.items())
    names += f"- `{PROPERTY}`: a function of the analysis decides for every draw or every model if the claim holds.\n"
    parts += ["## The rules", names, "## Tests without enough runs", _render_missing(claims, results_dir, measured)]
    return "\n".join(parts)


def summary(claims: list[Claim]) -> str:
    """How many claims have which verdict, and how many verdicts rest on rules that are older than their runs."""
    length = Counter(claim.at_length.word for claim in claims)
    early = Counter(claim.early.word for claim in claims)
    ages = Counter(age(v.tests) for claim in claims for v in (claim.at_length, claim.early) if v.tests)

    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{word} {n}" for word, n in counts.most_common() if word != NONE)

    return (
        f"Of {len(claims)} claims, at the paper's length: {listed(length)}. Early, or on other data: {listed(early)}. "
        f"{ages.total()} verdicts rest on runs. The rules of {ages[BEFORE]} were all committed before their runs were "
        f"started, those of {ages[PARTLY]} partly, and those of {ages[AFTER]} are younger than their runs."
    )


def render_overview(claims: list[Claim]) -> str:
    """A table with one row per claim, for the beginning of results/claims.md."""
    rows = []
    for claim in claims:
        effects, keys = evidence(claim)
        pages = ", ".join(f"[{key.split('/')[1]}]({key}.md)" for key in keys)
        name = f"[{claim.name}](claims/{claim.name}.md)"
        verdicts = [shown(verdict) for verdict in (claim.at_length, claim.early)]
        rows.append([name, claim.says, *verdicts, ages(claim), effects, pages or NONE])
    return markdown(["", "claim", *COLUMNS, "rules", "effect [95 %]", "runs"], rows)


def render_short(claims: list[Claim]) -> str:
    """The main claims, as README.md shows them."""
    rows = [[claim.name, claim.says, shown(claim.at_length), shown(claim.early)] for claim in claims if claim.is_main]
    return markdown(["", "claim", *COLUMNS], rows)


def shown(verdict: Verdict) -> str:
    """A verdict in full, with its word in bold."""
    rest = verdict.text.removeprefix(verdict.word)
    return f"**{verdict.word}**{rest}" if len(rest) < len(verdict.text) and verdict.tests else verdict.text


def evidence(claim: Claim) -> tuple[str, list[str]]:
    """The effects that the verdicts rest on, in words, and the keys `<paper>/<table>` of the pages with the runs."""
    run = [*claim.at_length.tests, *claim.early.tests]
    found = dict.fromkeys(effect_in_words(t, whole=False) for t in run)
    return "; ".join(found) or NONE, sorted({t.key for t in run})


def ages(claim: Claim) -> str:
    """Whether the rules are older than their runs, for each verdict that rests on runs."""
    found = [age(verdict.tests) for verdict in (claim.at_length, claim.early) if verdict.tests]
    return "; ".join(dict.fromkeys(found)) or NONE


def _doc(rule: Callable[..., Any]) -> str:
    return " ".join((rule.__doc__ or "").split())


def render_claim(claim: Claim, measured: Collection[str] = ()) -> str:
    """The page of one claim: its verdicts, and all its tests with their effects."""
    rows = []
    for t in claim.tested:
        marks = "; ".join(t.outcome.marks) if t.outcome else ""
        n = str(t.n) if t.outcome else NONE
        rows.append([scope_in_words(t), rule_in_words(t, measured, "../"), n, effect_in_words(t),
                     _verdict(t, claim), registered(t), marks])  # fmt: skip
    table = markdown(["evidence", "test", "n", "effect [95 %]", "verdict", "rule and runs", ""], rows)
    verdicts = "".join(
        f"- {title[0].upper()}{title[1:]}: {shown(verdict)}\n"
        for title, verdict in zip(COLUMNS, (claim.at_length, claim.early), strict=True)
    )
    about = "\n[All claims, and what the words mean](../claims.md)\n"
    return f"# {claim.name}: {claim.says}\n\n{claim.where}\n\n{verdicts}{about}\n{table}"


def _verdict(tested: JudgedTest, claim: Claim) -> str:
    """The verdict of one test in words; with too few pairs, what they show so far."""
    if tested.outcome is None:
        return NOT_RUN
    if "replaced" in tested.test:
        return NONE
    if not tested.outcome.is_complete:
        return f"{tested.n} of {LEAST_PAIRS} seeds, so far {tested.outcome.tendency}"
    is_early = tested.test["scope"] != "paper"
    if is_early and claim.about:
        return NONE
    return EARLY[tested.outcome.verdict] if is_early else tested.outcome.verdict


def _render_missing(claims: list[Claim], results_dir: Path, measured: Collection[str]) -> str:
    rows = []
    for claim in claims:
        for t in claim.tested:
            if t.n < LEAST_PAIRS and "replaced" not in t.test:
                hours = hours_of(t, results_dir)
                cost = "no similar run has been timed" if hours is None else f"{hours:,.1f}"
                rows.append([claim.name, t.test["scope"], rule_in_words(t, measured), cost])
    about = (
        f"Core hours of all runs that a test still needs for {LEAST_PAIRS} seeds, without evaluations, at the speed of "
        "the most similar runs that have been timed. Several tests need the same runs.\n"
    )
    return f"{about}\n{markdown(['claim', 'evidence', 'test', 'core hours'], rows)}"


def rule_in_words(tested: JudgedTest, measured: Collection[str], up: str = "") -> str:
    """A test of claims.yaml in one line, with a link to its page if there is one; `up` leads to results/."""
    test = tested.test
    sides = [] if test["rule"] == PROPERTY else sides_of(test)
    between = " > " if "order" in test else ", " if "sides" in test else " against "
    skip = ("scope", "rule", "order", "sides", "of", "than", "where", "experiment", "analysis", *REMARKS)
    page = f"[{tested.key}]({up}{tested.key}.md)" if tested.key in measured else f"`{tested.key}`"
    parts = [f"`{test['rule']}` {page}"]
    parts += [_plain(test["where"])] if "where" in test else []
    parts += [between.join(_plain(side) for side in sides)] if sides else []
    parts += [f"{k} {_plain(v)}" for k, v in test.items() if k not in skip]
    parts += [test[key] for key in ("part", "note") if key in test]
    parts += [f"replaced: {test['replaced']}"] if "replaced" in test else []
    return "; ".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={_plain(v)}" for k, v in value.items()) or "recipe"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
