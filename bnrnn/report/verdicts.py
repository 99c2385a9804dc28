"""The two verdicts on a claim, at the paper's length and from early runs or other data, and effects in words."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from bnrnn.metrics import metric_of
from bnrnn.report.claim_types import SCOPES, Claim, Table
from bnrnn.report.claims import entry_of
from bnrnn.report.markdown import NONE
from bnrnn.report.outcome import CONTRADICTED, HOLDS, LEAST_PAIRS, NOT_RUN, UNDECIDED, JudgedTest, Outcome
from bnrnn.report.rules import NEVER, PROPERTY, RULES

TOO_FEW, BY_PART = "too few seeds", "differs by part"
TOO_WIDE = "too few seeds to say"
AGREES, DISAGREES = "agrees", "disagrees"
EARLY = {HOLDS: AGREES, CONTRADICTED: DISAGREES, UNDECIDED: UNDECIDED}
WORDS = (HOLDS, AGREES, BY_PART, CONTRADICTED, DISAGREES, UNDECIDED, TOO_FEW, NOT_RUN, NONE)  # in the order of sorting
FINAL = "quality"  # a claim `about` quality: how well trained models end, of which early runs show nothing


@dataclass(frozen=True)
class Verdict:
    """A verdict in one word, in full, and the tests on which it rests."""

    word: str  # one of WORDS
    text: str
    tests: tuple[JudgedTest, ...] = ()


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with all its tests."""

    claim: Claim
    tested: tuple[JudgedTest, ...]

    @property
    def at_length(self) -> Verdict:
        """The verdict of runs on the paper's data, of its length: holds, contradicted, undecided, or how many of the
        needed seeds there are. If the tests differ, the text says which part does what."""
        tests = self._counted("paper")
        if not any(tested.outcome for tested in tests):
            return Verdict(NOT_RUN, NOT_RUN)
        return combined_verdict(tests, _at_length)

    @property
    def early(self) -> Verdict:
        """The verdict of shorter runs and of other data. The strongest evidence with enough pairs decides, whatever
        weaker evidence shows; stronger evidence with too few pairs is mentioned."""
        groups = [list(group) for _, group in groupby(sorted(self._counted(*SCOPES[1:]), key=_strength), key=_strength)]
        run = [tests for tests in groups if any(tested.outcome for tested in tests)]
        if self.claim.about == FINAL:
            return Verdict(NONE, "no verdict: early runs do not show final quality" if run else NONE)
        decided = next((tests for tests in run if any(t.n >= LEAST_PAIRS for t in tests)), None)
        stronger = run[: run.index(decided)] if decided else run
        so_far = "; ".join(f"{_so_far(tests)} ({in_words(tests)})" for tests in stronger)
        if decided is None:
            word = NOT_RUN if groups else NONE
            return Verdict(TOO_FEW, so_far) if run else Verdict(word, word)
        verdict = combined_verdict(decided, _early)
        text = f"{verdict.text} ({in_words(decided)})" + (f"; {so_far}" if so_far else "")
        return Verdict(verdict.word, text, verdict.tests)

    def _counted(self, *scopes: str) -> list[JudgedTest]:
        """The tests of these scopes. A test that was replaced by one with a better rule does not count."""
        return [t for t in self.tested if t.test.scope in scopes and not t.test.replaced]


def _strength(tested: JudgedTest) -> tuple[int, int]:
    """Sorts tests: runs on the paper's data before other data, and longer runs before shorter ones."""
    scope, updates = tested.test.scope, tested.test.updates or 0
    return SCOPES.index(scope), -updates if scope == "shorter" else 0


def _at_length(tested: JudgedTest) -> str:
    if tested.outcome is None:
        return NOT_RUN
    return tested.outcome.verdict if tested.outcome.is_complete else _so_far([tested])


def _early(tested: JudgedTest) -> str:
    verdict = _at_length(tested)
    return EARLY.get(verdict, verdict)


def _so_far(tests: list[JudgedTest]) -> str:
    """How many of the needed seeds there are, and the effects so far."""
    run = [t for t in tests if t.outcome]
    effects = ", ".join(effect_in_words(t) for t in run)
    return f"{min(t.n for t in run)} of {LEAST_PAIRS} seeds, so far {effects}"


def combined_verdict(tests: list[JudgedTest], status: Callable[[JudgedTest], str]) -> Verdict:
    """The verdict of tests that are parts of one claim: their common one, or which part does what."""
    run = tuple(tested for tested in tests if tested.outcome)
    by_status: dict[str, list[str]] = {}
    for k, tested in enumerate(tests, 1):
        by_status.setdefault(status(tested), []).append(tested.test.part or f"part {k}")
    if len(by_status) == 1:
        (text,) = by_status
        return Verdict(text if text in WORDS else TOO_FEW, text, run)
    text = "; ".join(f"{found}: {', '.join(parts)}" for found, parts in sorted(by_status.items(), key=_place))
    return Verdict(BY_PART, text, run)


def _place(item: tuple[str, list[str]]) -> int:
    return WORDS.index(item[0]) if item[0] in WORDS else WORDS.index(TOO_FEW)


def in_words(tests: list[JudgedTest]) -> str:
    """The evidence of tests of equal strength: which data, how many of how many updates, how many seeds."""
    run = [tested for tested in tests if tested.outcome]
    n = f"n={min(tested.n for tested in run)}"
    return ", ".join([*dict.fromkeys(scope_in_words(tested) for tested in run), n])


def scope_in_words(tested: JudgedTest) -> str:
    """The evidence of a test, such as "first 2,500 of 100,000 updates" or "bAbI 1 in place of CNN, 3,000 updates"."""
    entry, updates = entry_of(tested.test.key), tested.updates or tested.test.updates
    if tested.test.scope == "paper":
        if isinstance(entry, Table) and entry.enough_updates is not None:
            return f"paper's data, at least {entry.enough_updates:,} of {entry.paper_updates:,} updates"
        return "paper's data and length"
    length = f"{updates:,}" if updates else "all"
    if tested.test.scope == "shorter":
        return f"first {length} of {entry.paper_updates:,} updates"
    return f"{entry.in_place_of}, {length} updates"


def effect_in_words(tested: JudgedTest, whole: bool = True) -> str:
    """The mean effect in the unit of the table, with its interval.

    Equal effects have no interval; if the measurement is coarse, the range is given in which they may truly lie.

    Args:
        whole: whether an effect whose interval is too wide to mean anything is given as a number all the same.
    """
    outcome = tested.outcome
    if outcome is None:
        return NONE
    if tested.test.rule in (PROPERTY, "diverges"):
        counted = f"{outcome.num_agreeing} of {outcome.n}"
        return counted if tested.test.rule == PROPERTY else f"in {counted} pairs"
    if not whole and outcome.is_complete and outcome.is_too_wide:
        return TOO_WIDE
    shown, words, reverse = _form(tested, outcome)
    mean = shown(outcome.mean)
    if outcome.n == 1 or (outcome.is_equal and outcome.resolution is None):
        return words.format(mean)
    low, high = outcome.resolution if outcome.is_equal and outcome.resolution else outcome.interval
    low, high = (high, low) if reverse else (low, high)
    if outcome.is_equal:
        return f"{words.format(mean)} ({_range(low, high, shown)})"
    return words.format(mean + (f" [{shown(low)}, {shown(high)}]" if outcome.is_complete else ""))


def _range(low: float, high: float, shown: Callable[[float], str]) -> str:
    """The range in which an effect that was measured coarsely may truly lie."""
    if math.isfinite(low) and math.isfinite(high):
        return f"resolution: {shown(low)} to {shown(high)}"
    return f"resolution: at least {shown(low)}" if math.isfinite(low) else f"resolution: at most {shown(high)}"


def _form(tested: JudgedTest, outcome: Outcome) -> tuple[Callable[[float], str], str, bool]:
    """How a number is shown, the words around it, and whether a larger effect is a smaller number."""
    test, rule = tested.test, RULES[tested.test.rule]
    if test.rule in ("reaches_first", "settles_first"):
        late = [side for side, mark in NEVER.items() if mark in outcome.marks]
        bound = {"of": "at least ", "than": "at most "}[late[0]] if len(late) == 1 else ""
        return (lambda x: f"{math.exp(-x):.2f}"), rule.ratio.replace("{}", f"{bound}{{}}"), True
    if rule.ratio:
        return (lambda x: f"{math.exp(x):.3g}"), rule.ratio, False
    metrics = test.sides[0].metrics
    if len(metrics) > 1:
        return (lambda x: f"{100 * x:+.1f}"), "{} %", False
    metric = metric_of(metrics[0]) if metrics else None
    assert metric is not None
    unit = f"{metric.unit} for each {test.per}" if test.rule == "trend" else metric.unit
    margin = test.parameters["margin"] if test.rule in ("no_worse", "alike") else 0
    within = f" (margin {metric.scale * margin:g})" if margin else ""
    return (lambda x: f"{metric.scale * x:+.{metric.digits}f}"), f"{{}} {unit}".strip() + within, False
