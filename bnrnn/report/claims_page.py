"""Renders the judged claims: results/claims.md, a page for each claim, and the short table in README.md."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from bnrnn.report.costs import hours_of_test
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.outcome import LEAST_PAIRS, NOT_RUN, JudgedTest
from bnrnn.report.rule_history import AFTER, BEFORE, PARTLY, age, registered
from bnrnn.report.rules import PROPERTY, RULES
from bnrnn.report.verdicts import EARLY, JudgedClaim, Verdict, effect_in_words, scope_in_words

COLUMNS = ("at the paper's length", "early, or on other data")
INTRODUCTION = f"""
A program computed this page from the runs in this folder, by the rules in `experiments/*/claims.yaml`. Each claim has
two verdicts, and a page of its own with all tests.

- **At the paper's length**: runs on the paper's data, as long as the paper's. The claim *holds*, is *contradicted*, or
  is *undecided*. With fewer than {LEAST_PAIRS} seeds there is no verdict, only their number and the effect so far. A
  run of the `enough_updates` of its entry counts too, if validation selected a model before its end.
- **Early, or on other data**: shorter runs, and smaller data in place of the paper's. They *agree* or *disagree* with
  the claim, or are *undecided*. The strongest evidence with enough seeds decides, whatever weaker evidence shows. Early
  runs say nothing about how well trained models end, so claims about that have no verdict here.
- A rule turns the runs of each seed into an effect. The verdict is *holds* or *agrees* if the 95 % interval of the mean
  effect (Student's t) lies above the rule's threshold, and *contradicted* or *disagrees* if it lies below. For
  divergence, and for properties of an analysis, all pairs or draws have to agree instead.
- "too few seeds to say": the interval is so wide that it tells nothing about the size of the effect. The numbers are on
  the claim's page. Equal effects have no interval; where they were measured coarsely, their possible range is given,
  and decides in its place.
- The column *rules* says whether the rules were committed before their runs were started.
- A run that diverged counts. Several claims rest on the same runs, and intervals are not corrected for that.
"""


def claim_pages(claims: list[JudgedClaim], evidence: Evidence, measured: Collection[str] = ()) -> dict[Path, str]:
    """The page of all claims and that of each claim, by their paths.

    Args:
        measured: the keys `<paper>/<table>` of tables and figures that have a page to which tests can link.
    """
    folder = evidence.folder
    pages = {folder / "claims" / f"{judged.claim.name}.md": render_claim(judged, measured) for judged in claims}
    return {folder / "claims.md": render(claims, evidence, measured), **pages}


def render(claims: list[JudgedClaim], evidence: Evidence, measured: Collection[str] = ()) -> str:
    """The page of all claims: one row per claim, the rules, and what the tests without a verdict would cost."""
    parts = ["# Claims of the papers", INTRODUCTION, summary(claims) + "\n", render_overview(claims)]
    names = "".join(f"- `{name}`: {rule.about}\n" for name, rule in RULES.items())
    names += f"- `{PROPERTY}`: a function of the analysis decides for every draw or every model if the claim holds.\n"
    parts += ["## The rules", names, "## Tests without enough runs", _render_missing(claims, evidence, measured)]
    return "\n".join(parts)


def summary(claims: list[JudgedClaim]) -> str:
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


def render_overview(claims: list[JudgedClaim]) -> str:
    """A table with one row per claim, for the beginning of results/claims.md."""
    rows = []
    for judged in claims:
        effects, keys = support(judged)
        pages = ", ".join(f"[{key.split('/')[1]}]({key}.md)" for key in keys)
        name = f"[{judged.claim.name}](claims/{judged.claim.name}.md)"
        verdicts = [shown(verdict) for verdict in (judged.at_length, judged.early)]
        rows.append([name, judged.claim.says, *verdicts, ages(judged), effects, pages or NONE])
    return markdown(["", "claim", *COLUMNS, "rules", "effect [95 %]", "runs"], rows)


def render_short(claims: list[JudgedClaim]) -> str:
    """The main claims, as README.md shows them."""
    rows = [[judged.claim.name, judged.claim.says, shown(judged.at_length), shown(judged.early)]
            for judged in claims if judged.claim.main]  # fmt: skip
    return markdown(["", "claim", *COLUMNS], rows)


def shown(verdict: Verdict) -> str:
    """A verdict in full, with its word in bold."""
    rest = verdict.text.removeprefix(verdict.word)
    return f"**{verdict.word}**{rest}" if len(rest) < len(verdict.text) and verdict.tests else verdict.text


def support(judged: JudgedClaim) -> tuple[str, list[str]]:
    """The effects that the verdicts rest on, in words, and the keys `<paper>/<table>` of the pages with the runs."""
    run = [*judged.at_length.tests, *judged.early.tests]
    found = dict.fromkeys(effect_in_words(t, whole=False) for t in run)
    return "; ".join(found) or NONE, sorted({t.test.key for t in run})


def ages(judged: JudgedClaim) -> str:
    """Whether the rules are older than their runs, for each verdict that rests on runs."""
    found = [age(verdict.tests) for verdict in (judged.at_length, judged.early) if verdict.tests]
    return "; ".join(dict.fromkeys(found)) or NONE


def render_claim(judged: JudgedClaim, measured: Collection[str] = ()) -> str:
    """The page of one claim: its verdicts, and all its tests with their effects."""
    rows, claim = [], judged.claim
    for t in judged.tested:
        marks, n = ("; ".join(t.outcome.marks), str(t.n)) if t.outcome else ("", NONE)
        rows.append([scope_in_words(t), rule_in_words(t, measured, "../"), n, effect_in_words(t),
                     _verdict(t, claim.about), registered(t), marks])  # fmt: skip
    table = markdown(["evidence", "test", "n", "effect [95 %]", "verdict", "rule and runs", ""], rows)
    verdicts = "".join(
        f"- {title[0].upper()}{title[1:]}: {shown(verdict)}\n"
        for title, verdict in zip(COLUMNS, (judged.at_length, judged.early), strict=True)
    )
    about = "\n[All claims, and what the words mean](../claims.md)\n"
    return f"# {claim.name}: {claim.says}\n\n{claim.where}\n\n{verdicts}{about}\n{table}"


def _verdict(tested: JudgedTest, about: str) -> str:
    """The verdict of one test in words; with too few pairs, what they show so far."""
    if tested.outcome is None:
        return NOT_RUN
    if tested.test.replaced:
        return NONE
    if not tested.outcome.is_complete:
        return f"{tested.n} of {LEAST_PAIRS} seeds, so far {tested.outcome.tendency}"
    if tested.test.scope == "paper":
        return tested.outcome.verdict
    return NONE if about else EARLY[tested.outcome.verdict]


def _render_missing(claims: list[JudgedClaim], evidence: Evidence, measured: Collection[str]) -> str:
    rows = []
    for t in (t for judged in claims for t in judged.tested if t.n < LEAST_PAIRS and not t.test.replaced):
        hours = hours_of_test(t, evidence)
        cost = "no similar run has been timed" if hours is None else f"{hours:,.1f}"
        rows.append([t.test.claim, t.test.scope, rule_in_words(t, measured), cost])
    about = (
        f"Core hours of all runs that a test still needs for {LEAST_PAIRS} seeds, without evaluations, at the speed of "
        "the most similar runs that have been timed. Several tests need the same runs.\n"
    )
    return f"{about}\n{markdown(['claim', 'evidence', 'test', 'core hours'], rows)}"


def rule_in_words(tested: JudgedTest, measured: Collection[str], up: str = "") -> str:
    """A test of claims.yaml in one line, with a link to its page if there is one; `up` leads to results/."""
    test = tested.test
    page = f"[{test.key}]({up}{test.key}.md)" if test.key in measured else f"`{test.key}`"
    replaced = [f"replaced: {test.replaced}"] if test.replaced else []
    return "; ".join([f"`{test.rule}` {page}", *test.words, *replaced])
