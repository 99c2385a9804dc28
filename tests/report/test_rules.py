"""Rules compute effects from runs with the same seed, and verdicts from effects."""

import math
from pathlib import Path

import pytest

from bnrnn.errors import BnrnnError
from bnrnn.report import outcome as outcomes
from bnrnn.report import rules
from bnrnn.report.outcome import CONTRADICTED, HOLDS, UNDECIDED, Outcome
from bnrnn.report.rules import DIVERGED, Pairing
from bnrnn.report.run import Run
from bnrnn.training.results import Result


def run(seed: int = 0, curve=None, metric="valid/accuracy", status="finished", updates=1000, metrics=None, **overrides):
    records = [{"update": u, "seconds": float(u), metric: v} for u, v in (curve or {}).items()]
    texts = {**{k: str(v) for k, v in overrides.items()}, "seed": str(seed)}
    result = Result("key", texts, status, updates, 0, metrics or {}, 1.0, 1, ["abc"], {}, {})
    return Run(Path("folder"), texts, "paper", result, records)


def pairing(*sides, metric: str | list[str] = "test/accuracy", updates: int | None = None) -> Pairing:
    """A pairing of sides. A side is a list with a run, or a list of runs, for each seed."""
    rows = zip(*sides, strict=True)
    by_seed = {str(k): [[x] if isinstance(x, Run) else x for x in row] for k, row in enumerate(rows)}
    return Pairing(by_seed, [(metric,) if isinstance(metric, str) else tuple(metric)] * len(sides), updates)


def final(*values, metric="test/accuracy", **options):
    return [run(k, metrics={metric: v}, **options) for k, v in enumerate(values)]


def test_the_interval_is_students():
    # t(0.975) is 4.3027 with two degrees of freedom and 12.7062 with one, from a table of the distribution.
    for values, middle, half in (([1.0, 2.0, 3.0], 2, 4.3027 / 3**0.5), ([1.0, 2.0], 1.5, 12.7062 / 2)):
        assert outcomes.student_interval(values) == pytest.approx((middle - half, middle + half), abs=1e-4)
    assert outcomes.student_interval([1.0]) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("effects", "threshold", "verdict"),
    [
        ((5.0, 5.1, 4.9), 0.0, HOLDS),
        ((5.0, 5.1, 4.9), 5.5, CONTRADICTED),
        ((5.0, 5.1, 4.9), 4.9, UNDECIDED),  # the interval is on both sides
        ((5.0, 5.1), 0.0, UNDECIDED),  # two pairs show nothing
        ((9.0, 1.0, 5.0), 0.0, UNDECIDED),
    ],
)
def test_a_verdict_needs_three_pairs_and_an_interval_beyond_the_threshold(effects, threshold, verdict):
    outcome = Outcome(effects, threshold)
    assert outcome.verdict == verdict
    assert outcome.tendency == ("agrees" if sum(effects) / len(effects) > threshold else "disagrees")


def test_where_all_have_to_agree_one_that_does_not_is_enough():
    assert Outcome((1.0,) * 9, unanimous=True).verdict == HOLDS
    assert Outcome((1.0,) * 9 + (-1.0,), unanimous=True).verdict == UNDECIDED
    assert Outcome((-1.0,) * 3, unanimous=True).verdict == CONTRADICTED
    tie = Outcome((0.0,) * 3, unanimous=True)
    assert (tie.verdict, tie.tendency) == (UNDECIDED, "undecided")


def test_ends_better_knows_which_way_is_better():
    for metric, sign in (("test/accuracy", 1), ("test/bleu4", 1), ("test/cider_beam3", 1), ("test/bpc", -1),
                         ("valid/ppl", -1), ("test/error", -1), ("valid/loss", -1)):  # fmt: skip
        sides = final(0.9, 0.8, metric=metric), final(0.5, 0.6, metric=metric)
        outcome = rules.ends_better(pairing(*sides, metric=metric), margin=0.3)
        assert outcome.effects == pytest.approx((sign * 0.4, sign * 0.2)) and outcome.threshold == 0.3


def test_a_tie_is_enough_to_be_no_worse_and_not_to_be_better():
    sides = final(0.990, 0.991, 0.989), final(0.990, 0.990, 0.990)
    assert rules.no_worse(pairing(*sides), margin=0.005).verdict == HOLDS
    assert rules.ends_better(pairing(*sides), margin=0.0).verdict == UNDECIDED
    worse = final(0.95, 0.951, 0.949), final(0.990, 0.990, 0.990)
    assert rules.no_worse(pairing(*worse), margin=0.005).verdict == CONTRADICTED


def test_of_several_scores_the_smallest_relative_difference_counts():
    of = [run(0, metrics={"test/bleu1": 0.6, "test/cider": 0.9})]
    than = [run(0, metrics={"test/bleu1": 0.5, "test/cider": 1.0})]
    outcome = rules.ends_better(pairing(of, than, metric=["test/bleu1", "test/cider"]), margin=0.0)
    assert outcome.effects == pytest.approx((-0.1,))


def test_a_score_of_zero_is_as_far_below_any_other_as_can_be_told():
    of = [run(k, metrics={"test/bleu1": 0.6, "test/cider": v}) for k, v in enumerate((0.9, 0.0, 0.0))]
    than = [run(k, metrics={"test/bleu1": 0.5, "test/cider": v}) for k, v in enumerate((0.0, 0.0, 0.5))]
    outcome = rules.ends_better(pairing(of, than, metric=["test/bleu1", "test/cider"]), margin=0.0)
    assert outcome.effects == pytest.approx((0.2, 0.0, -1.0))


def test_at_equal_updates_a_longer_run_counts_only_with_what_it_had_reached_by_then():
    long = run(curve={1000: 0.9, 5000: 1.0}, updates=5000, metrics={"valid/accuracy": 1.0})
    assert long.best_until("valid/accuracy", 1000) == 0.9 and long.best_until("valid/accuracy", None) == 1.0
    with pytest.raises(BnrnnError, match="has no valid/accuracy up to update 500"):
        long.best_until("valid/accuracy", 500)
    assert run(updates=500, metrics={"valid/accuracy": 0.7}).best_until("valid/accuracy", 500) == 0.7


def lost(n: int = 3) -> list[Run]:
    return [run(k, status="diverged") for k in range(n)]


def test_a_run_that_diverged_alone_is_worse_by_as_much_as_the_largest_difference():
    of, than = final(0.9, 0.8, 0.85), [*final(0.5, 0.7), *lost(1)]
    given = pairing(of, than)
    assert rules.ends_better(given, margin=0.1).effects == pytest.approx((0.4, 0.1, 0.4)) and given.marks == {DIVERGED}
    assert rules.ends_better(pairing(than, of), margin=0.1).effects == pytest.approx((-0.4, -0.1, -0.4))
    both = pairing([*of[:2], *lost(1)], than)
    assert rules.ends_better(both, margin=0.1).effects == pytest.approx((0.4, 0.1, 0.0))
    assert rules.ends_better(pairing(lost(), lost()), margin=0.0).n == 0


@pytest.mark.parametrize("metric", ["valid/loss", "test/accuracy"])
def test_a_side_that_diverged_is_worse_than_any_other_and_like_no_other(metric):
    trained = final(1.10, 1.11, 1.105, metric=metric)

    def verdict(rule, *sides):
        return rule(pairing(*sides, metric=metric), margin=0.02).verdict

    def ranked(*sides):
        return rules.ranking(pairing(*sides, metric=metric)).verdict

    assert verdict(rules.ends_better, trained, lost()) == verdict(rules.no_worse, trained, lost()) == HOLDS
    assert verdict(rules.ends_better, lost(), trained) == verdict(rules.no_worse, lost(), trained) == CONTRADICTED
    assert verdict(rules.alike, trained, trained, lost()) == CONTRADICTED
    better = final(*((1.00, 1.02, 1.005) if metric == "valid/loss" else (1.2, 1.22, 1.205)), metric=metric)
    assert ranked(better, trained, lost()) == HOLDS
    assert ranked(better, lost(), trained) == CONTRADICTED
    scores = pairing(trained, lost(), metric=[metric, metric])
    assert rules.ends_better(scores, 0.0).verdict == rules.ends_better_in_all(scores, 0.0).verdict == HOLDS


def test_a_run_that_diverged_after_the_updates_that_are_compared_has_not_diverged():
    late = [run(curve={500: 0.9, 1000: 0.1}, status="diverged", updates=1200)]
    slow = [run(curve={500: 0.8, 1000: 0.95})]
    given = pairing(late, slow, metric="valid/accuracy", updates=500)
    assert rules.ends_better(given, margin=0.0).effects == pytest.approx((0.1,)) and given.marks == set()
    assert rules.diverges(given).effects == (0.0,)
    longer = pairing(late, slow, metric="valid/accuracy", updates=1200)
    assert rules.diverges(longer).effects == (1.0,)


def test_each_score_has_an_interval_of_its_own():
    def sides(*rows):  # rows of two scores, by seed
        return [run(k, metrics=dict(zip(("test/bleu1", "test/cider"), row, strict=True))) for k, row in enumerate(rows)]

    def outcome(of):
        than = sides((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
        given = pairing(of, than, metric=["test/bleu1", "test/cider"])
        return rules.ends_better_in_all(given, margin=0.0), given.marks

    # Neither score differs for sure, but the smaller of the two differences is below zero for every seed.
    mixed = sides((0.7, 1.2), (1.2, 0.8), (0.9, 1.1))
    assert outcome(mixed)[0].verdict == UNDECIDED and outcome(mixed)[1] == {"the effect is that of test/bleu1"}
    assert outcome(sides((1.2, 1.3), (1.3, 1.2), (1.25, 1.25)))[0].verdict == HOLDS
    found, marks = outcome(sides((0.8, 3.0), (0.81, 0.1), (0.82, 2.0)))  # test/cider has the lower interval
    assert found.verdict == CONTRADICTED and marks == {"the effect is that of test/bleu1"}
    assert found.effects == pytest.approx((-0.2, -0.19, -0.18))


def test_a_ranking_is_as_strong_as_its_closest_neighbours():
    sides = [final(v, metric="valid/loss") for v in (1.0, 1.5, 1.6)]
    assert rules.ranking(pairing(*sides, metric="valid/loss")).effects == pytest.approx((0.1,))
    sides = [final(v, metric="valid/loss") for v in (1.0, 1.7, 1.6)]
    assert rules.ranking(pairing(*sides, metric="valid/loss")).effects == pytest.approx((-0.1,))


def test_what_is_alike_lies_within_the_margin():
    sides = [final(v, v, 1.0001 * v, metric="valid/loss") for v in (1.00, 1.015, 1.01)]
    assert rules.alike(pairing(*sides, metric="valid/loss"), margin=0.02).verdict == HOLDS
    outcome = rules.alike(pairing(*sides, metric="valid/loss"), margin=0.01)
    assert outcome.verdict == CONTRADICTED and outcome.effects == pytest.approx((-0.015,) * 3, rel=1e-3)


def reached(of, than, level: float = 0.7, updates: int | None = None):
    """The effect of `reaches_first` on two curves of accuracy, and its marks."""
    given = pairing([run(curve=of)], [run(curve=than)], metric="valid/accuracy", updates=updates)
    (effect,) = rules.reaches_first(given, level=level).effects
    return effect, given.marks


FAST, SLOW, NEVER, AT_ONCE = {100: 0.5, 200: 0.8}, {100: 0.1, 400: 0.9}, {100: 0.1, 1000: 0.3}, {0: 0.8, 100: 0.9}


@pytest.mark.parametrize(("of", "than", "updates", "ratio", "marks"), [
    (FAST, SLOW, None, 2, set()),
    (SLOW, FAST, None, 1 / 2, set()),
    (FAST, NEVER, None, 5, {rules.NEVER["than"]}),  # a run that never gets there counts with its length
    (FAST, NEVER, 150, 1, set(rules.NEVER.values())),  # within 150 updates, neither run reaches the level
    (AT_ONCE, {0: 0.1, 100: 0.9}, None, 100, set()),  # a level that is reached at update 0 counts as one update
    ({0: 0.1, 100: 0.9}, AT_ONCE, None, 1 / 100, set()),
    (AT_ONCE, AT_ONCE, None, 1, set()),
])  # fmt: skip
def test_reaching_a_level_first_is_a_ratio_of_updates(of, than, updates, ratio, marks):
    assert reached(of, than, updates=updates) == (pytest.approx(math.log(ratio)), marks)


def test_settling_is_measured_against_a_runs_own_lowest_loss():
    quick = run(curve={100: 2.0, 200: 1.005, 400: 1.0}, metric="valid/loss")
    slow = run(curve={100: 0.9, 200: 0.6, 400: 0.5}, metric="valid/loss")
    outcome = rules.settles_first(pairing([quick], [slow], metric="valid/loss"), share=0.01)
    assert outcome.effects == pytest.approx((math.log(2),))


def test_a_run_that_diverged_never_settles():
    lost = run(curve={100: 1.0}, metric="valid/loss", status="diverged", updates=150)
    slow = run(curve={100: 0.9, 200: 0.6, 400: 0.5}, metric="valid/loss")
    given = pairing([lost], [slow], metric="valid/loss")
    assert rules.settles_first(given, share=0.01).effects == pytest.approx((math.log(0.4),))
    assert given.marks == {rules.NEVER["of"]}
    slow.records.append({"update": 900, "seconds": 900.0, "valid/loss": 0.1})
    given = pairing([slow], [slow], metric="valid/loss", updates=400)
    assert rules.settles_first(given, share=0.01).n == 1
    assert given.marks == set(), "the lowest loss within 400 updates counts"


def test_divergence_counts_where_the_other_trains():
    lost, trained = [run(status="diverged")] * 3, final(0.1, 0.2, 0.3)
    assert rules.diverges(pairing(lost, trained)).verdict == HOLDS
    assert rules.diverges(pairing(trained, lost)).verdict == CONTRADICTED
    assert rules.diverges(pairing(trained, trained)).verdict == UNDECIDED
    assert rules.diverges(pairing([*lost[:2], trained[2]], trained)).verdict == UNDECIDED


def test_stability_compares_the_largest_gradients():
    def peaks(value, **options):
        return run(curve={10: 1.0, 20: value, 2000: 1e6}, metric="train/grad_norm", **options)

    def compared(of, than):
        return rules.less_stable(pairing(of, than, metric=[], updates=1000), factor=10)

    outcome = compared([peaks(50.0)], [peaks(2.0)])
    assert outcome.effects == pytest.approx((math.log(25),)) and outcome.num_agreeing == 1
    assert compared([peaks(10.0)], [peaks(2.0)]).num_agreeing == 0
    lost, trained = [run(status="diverged")], [peaks(2.0)]  # not one finite gradient norm was recorded
    assert compared(lost, trained).num_agreeing == 1
    assert compared(trained, lost).effects[0] < -math.log(10)
    assert compared(lost, lost).effects == (0.0,)
    assert compared([peaks(None)], [peaks(2.0)]).num_agreeing == 1  # a norm of infinity
    assert compared(lost * 3, trained * 3).verdict == HOLDS and compared(trained * 3, lost * 3).verdict == CONTRADICTED


def test_the_largest_learning_rate_has_no_divergence_below_it():
    def at(*statuses):
        return [run(status=s, rate=r) for r, s in zip((0.1, 0.5, 1.0), statuses, strict=True)]

    good, bad = "finished", "diverged"

    def effect(of, than):
        (value,) = rules.larger_rate(pairing([of], [than], metric=[]), key="rate").effects
        return math.exp(value)

    assert effect(at(good, good, good), at(good, bad, bad)) == pytest.approx(10)
    assert effect(at(good, bad, good), at(good, good, bad)) == pytest.approx(0.2)
    assert effect(at(good, good, good), at(bad, good, good)) == pytest.approx(20)  # counts with half of the smallest
    for of, marks in ((at(good, good, good), {rules.LARGEST}), (at(good, good, bad), set())):
        given = pairing([of], [at(good, bad, bad)], metric=[])
        assert rules.larger_rate(given, key="rate").n == 1 and given.marks == marks


def test_the_largest_learning_rate_at_which_a_level_is_reached():
    def at(*lowest):
        return [run(curve={50: v}, metric="valid/loss", rate=r) for r, v in zip((0.1, 0.5, 1.0), lowest, strict=True)]

    def effect(of, than):
        given = pairing([of], [than], metric="valid/loss")
        (value,) = rules.learns_at_larger_rate(given, key="rate", level=2.5).effects
        return math.exp(value)

    assert effect(at(2.0, 2.0, 2.5), at(2.0, 9.0, 9.0)) == pytest.approx(10)
    assert effect(at(9.0, 9.0, 9.0), at(9.0, 2.0, 9.0)) == pytest.approx(0.1)
    given = pairing([at(2.0, 2.0, 2.0)], [at(9.0, 9.0, 9.0)], metric="valid/loss", updates=49)
    after = rules.learns_at_larger_rate(given, key="rate", level=2.5)
    assert after.effects == (0.0,), "reached after the updates that are compared"


def test_reproduced_is_within_the_tolerance_for_sure():
    assert outcomes.within([95.3, 95.5, 95.4], 95.4, 0.5).verdict == HOLDS
    assert outcomes.within([94.0, 94.1, 94.05], 95.4, 0.5).verdict == CONTRADICTED
    assert outcomes.within([95.0, 95.9, 94.6], 95.4, 0.5).verdict == UNDECIDED
    assert outcomes.within([95.4], 95.4, 0.5).verdict == UNDECIDED


def test_a_trend_is_the_slope_of_a_line_through_the_sides_and_larger_values_end_worse():
    # Losses 1 + 2 gamma, with a deviation that does not change the slope of the least-squares line.
    at = (0.0, 1.0, 2.0)
    losses = [[1.1, 2.8, 5.1], [1.0, 3.0, 5.0], [1.2, 2.6, 5.4]]
    sides = [final(*column, metric="valid/loss") for column in zip(*losses, strict=True)]
    outcome = rules.trend(pairing(*sides, metric="valid/loss"), at=at)
    assert outcome.effects == pytest.approx((2.0, 2.0, 2.1)) and outcome.verdict == HOLDS
    falling = rules.trend(pairing(*reversed(sides), metric="valid/loss"), at=at)
    assert falling.effects == pytest.approx((-2.0, -2.0, -2.1)) and falling.verdict == CONTRADICTED
    accuracies = [final(value, metric="valid/accuracy") for value in (0.9, 0.8, 0.7)]
    assert rules.trend(pairing(*accuracies, metric="valid/accuracy"), at=at).effects == pytest.approx((0.1,))
    lost = [*sides[:2], [run(k, status="diverged") for k in range(3)]]
    given = pairing(*lost, metric="valid/loss")
    assert rules.trend(given, at=at).effects[1] == pytest.approx(1.0), "the diverged run counts like the worst: 1, 3, 3"
    assert DIVERGED in given.marks
    none = pairing([accuracies[0][0], run(1, status="diverged")], [accuracies[1][0], run(1, status="diverged")],
                   metric="valid/accuracy")  # fmt: skip
    assert rules.trend(none, at=at[:2]).effects == pytest.approx((0.1, 0.0)), "where both diverged there is none"


def test_training_is_unsteady_by_how_much_its_loss_lies_above_its_lowest_so_far():
    def trained(*losses, status="finished"):
        return run(curve=dict(enumerate(losses, 1)), metric="train/loss", status=status)

    steady, unsteady = trained(8.0, 4.0, 4.4, 2.0), trained(8.0, 4.0, 8.0, 2.0, 8.0)
    assert trained(3.0, 2.0, 1.0).unsteadiness() == 0.0
    assert steady.unsteadiness() == pytest.approx(math.log(1.1) / 4)
    assert unsteady.unsteadiness() == pytest.approx((math.log(2) + math.log(4)) / 5)
    assert unsteady.unsteadiness(updates=3) == pytest.approx(math.log(2) / 3)

    def compared(of, than, factor=2):
        return rules.less_steady(pairing([of], [than], metric=[]), factor=factor)

    ratio = math.log(unsteady.unsteadiness() / steady.unsteadiness())
    assert compared(unsteady, steady).effects == pytest.approx((ratio,))
    assert compared(unsteady, steady).num_agreeing == 1 and compared(unsteady, steady, factor=50).num_agreeing == 0
    lost, falling = trained(8.0, status="diverged"), trained(2.0, 1.0)
    assert compared(lost, steady).num_agreeing == 1 and compared(steady, lost).effects[0] < 0
    # A loss that only falls is infinitely steadier than any other.
    assert compared(steady, falling).effects == pytest.approx((math.log(2) + 1,))
    assert compared(falling, falling).effects == (0.0,) and compared(falling, steady).effects[0] < 0


def test_the_resolution_of_a_ratio_follows_from_the_distance_of_evaluations():
    of, than = run(curve={500: 0.1, 1000: 0.9}), run(curve={500: 0.1, 1000: 0.2, 1500: 0.3, 2000: 0.9}, updates=2000)
    outcome = rules.reaches_first(pairing([of], [than], metric="valid/accuracy"), level=0.8)
    assert [math.exp(-x) for x in outcome.resolution] == pytest.approx([1000 / 1500, 500 / 2000])
    at_once = rules.reaches_first(pairing([of], [than], metric="valid/accuracy"), level=0.1)
    assert at_once.resolution == (-math.inf, math.inf), "both got there before their first evaluation"


def test_the_resolution_of_a_rate_follows_from_the_rates_that_were_tried():
    def swept(*lost):
        return [run(status="diverged" if rate in lost else "finished", **{"optim.lr": rate}) for rate in (1, 2, 4)]

    outcome = rules.larger_rate(pairing([swept(4)], [swept(2, 4)]), key="optim.lr")
    assert [math.exp(x) for x in outcome.resolution] == pytest.approx([2 / 2, 4 / 1])
    top = rules.larger_rate(pairing([swept()], [swept(2, 4)]), key="optim.lr")
    assert top.resolution == (pytest.approx(math.log(4 / 2)), math.inf)


def test_an_interval_is_too_wide_if_it_reaches_as_far_beyond_the_threshold_as_the_mean_lies_before_it():
    assert Outcome((2.0, -3.0, 2.5)).is_too_wide and not Outcome((2.0, 2.1, 1.9)).is_too_wide
    assert not Outcome((0.5, 0.5, 0.5)).is_too_wide and not Outcome((0.0, 0.0, 0.0)).is_too_wide
    # Mean 1 and a half-width of 1.5: undecided, but an effect of -1 is outside.
    sd = 1.5 / 4.3027 * 3**0.5
    undecided = Outcome((1 - sd, 1.0, 1 + sd))
    assert undecided.verdict == UNDECIDED and not undecided.is_too_wide
    assert Outcome((1 - 2 * sd, 1.0, 1 + 2 * sd)).is_too_wide and not Outcome(undecided.effects, -9.0).is_too_wide


def test_equal_effects_show_something_only_if_their_possible_range_does():
    rounded = Outcome((0.3, 0.1 + 0.2, 0.3))
    assert Outcome((0.5,) * 3).verdict == rounded.verdict == UNDECIDED, "their interval has no width"
    assert Outcome((0.5,) * 3, resolution=(0.2, 0.9)).verdict == HOLDS
    assert Outcome((0.5,) * 3, resolution=(0.0, math.inf)).verdict == HOLDS, "the range has open ends"
    assert Outcome((0.5,) * 3, resolution=(-0.1, 0.9)).verdict == UNDECIDED
    assert Outcome((-0.5,) * 3, resolution=(-0.9, -0.0)).verdict == CONTRADICTED
    assert outcomes.within([95.3] * 3, 95.4, 0.5).verdict == UNDECIDED
    lone = pairing(final(1.0, 1.1, 1.2), [*final(0.5), *lost(2)])
    assert rules.ends_better(lone, margin=0.0).verdict == HOLDS, "all agree, and two of the effects have no size"


def test_the_parameters_of_a_rule_are_those_that_a_test_must_have():
    declared = {name: set(rule.parameters) for name, rule in rules.RULES.items()}
    assert declared["ends_better"] == {"margin"} and declared["diverges"] == set() and declared["trend"] == {"at"}
    assert declared["learns_at_larger_rate"] == {"key", "level"} and len(declared) == 13
