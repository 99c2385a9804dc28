"""Effects of tests in words."""

import math
from collections.abc import Callable

from bnrnn.metrics import metric_of
from bnrnn.report.judging import JudgedTest
from bnrnn.report.markdown import NONE
from bnrnn.report.outcome import Outcome
from bnrnn.report.rules import NEVER, PROPERTY, RULES

TOO_WIDE = "too few seeds to say"


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
