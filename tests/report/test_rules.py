"""Rules compute effects from runs with the same seed, and verdicts from effects."""

import math
from pathlib import Path

import pytest

from bnrnn.errors import BnrnnError
from bnrnn.report import outcome as outcomes
from bnrnn.report import rules
from bnrnn.report.outcome import CONTRADICTED, HOLDS, UNDECIDED, Outcome
from bnrnn.report.rules import Pairing
from bnrnn.report.run import Run
from bnrnn.training.results import Result


def run(seed: int = 0, curve=None, metric="valid/accuracy", status="finished", updates=1000, metrics=None, **overrides):
    records = [{"update": u, "seconds": float(u), metric: v} for u, v in (curve or {}).items()]
    texts = {**{k: str(v) for k, v in overrides.items()}, "seed": str(seed)}
    result = Result("key", texts, status, updates, 0, metrics or {}, 1.0, 1, ["abc"], {}, {})
    return Run(Path("folder"), texts, "paper", result, records, stale=False)


def pairing(test: dict, *sides, metric: str | list[str] = "test/accuracy") -> Pairing:
    """A pairing of sides. A side is a list with a run, or a list of runs, for each seed."""
    by_seed = {
        str(k): [[x] if isinstance(x, Run) else x for x in row] for k, row in enumerate(zip(*sides, strict=True))
    }
    return Pairing(test, by_seed, [[metric] if isinstance(metric, str) else metric] * len(sides))


def final(*values, metric="test/accuracy", **options):
    return [run(k, metrics={metric: v}, **options) for k, v in enumerate(values)]


def test_the_interval_is_students():
    # t(0.975) is 4.3027 with two degrees of freedom and 12.7062 with one, from a table of the distribution.
    assert outcomes.student_interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4
    )
    assert outcomes.student_interval([1.0, 2.0]) == pytest.approx((1.5 - 12.7062 / 2, 1.5 + 12.7062 / 2), abs=1e-3)
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
        outcome = rules.ends_better(pairing({"margin": 0.3}, *sides, metric=metric))
        assert outcome.effects == pytest.approx((sign * 0.4, sign * 0.2)) and outcome.threshold == 0.3


def test_a_tie_is_enough_to_be_no_worse_and_not_to_be_better():
    sides = final(0.990, 0.991, 0.989), final(0.990, 0.990, 0.990)
    assert rules.no_worse(pairing({"margin": 0.005}, *sides)).verdict == HOLDS
    assert rules.ends_better(pairing({"margin": 0.0}, *sides)).verdict == UNDECIDED
    worse = final(0.95, 0.951, 0.949), final(0.990, 0.990, 0.990)
    assert rules.no_worse(pairing({"margin": 0.005}, *worse)).verdict == CONTRADICTED


def test_of_several_scores_the_smallest_relative_difference_counts():
    of = [run(0, metrics={"test/bleu1": 0.6, "test/cider": 0.9})]
    than = [run(0, metrics={"test/bleu1": 0.5, "test/cider": 1.0})]
    outcome = rules.ends_better(pairing({"margin": 0.0}, of, than, metric=["test/bleu1", "test/cider"]))
    assert outcome.effects == pytest.approx((-0.1,))


def test_a_score_of_zero_is_as_far_below_any_other_as_can_be_told():
    of = [run(k, metrics={"test/bleu1": 0.6, "test/cider": v}) for k, v in enumerate((0.9, 0.0, 0.0))]
    than = [run(k, metrics={"test/bleu1": 0.5, "test/cider": v}) for k, v in enumerate((0.0, 0.0, 0.5))]
    outcome = rules.ends_better(pairing({"margin": 0.0}, of, than, metric=["test/bleu1", "test/cider"]))
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
    given = pairing({"margin": 0.1}, of, than)
    assert rules.ends_better(given).effects == pytest.approx((0.4, 0.1, 0.4)) and given.marks == {rules.DIVERGED}
    assert rules.ends_better(pairing({"margin": 0.1}, than, of)).effects == pytest.approx((-0.4, -0.1, -0.4))
    both = pairing({"margin": 0.1}, [*of[:2], *lost(1)], than)
    assert rules.ends_better(both).effects == pytest.approx((0.4, 0.1, 0.0))
    assert rules.ends_better(pairing({"margin": 0.0}, lost(), lost())).n == 0


@pytest.mark.parametrize("metric", ["valid/loss", "test/accuracy"])
def test_a_side_that_diverged_is_worse_than_any_other_and_like_no_other(metric):
    trained = final(1.10, 1.11, 1.105, metric=metric)
    test = {"margin": 0.02}

    def verdict(rule, *sides):
        return rule(pairing(test, *sides, metric=metric)).verdict

    assert verdict(rules.ends_better, trained, lost()) == verdict(rules.no_worse, trained, lost()) == HOLDS
    assert verdict(rules.ends_better, lost(), trained) == verdict(rules.no_worse, lost(), trained) == CONTRADICTED
    assert verdict(rules.alike, trained, trained, lost()) == CONTRADICTED
    better = (
        final(1.00, 1.01, 1.005, metric=metric) if metric == "valid/loss" else final(1.2, 1.21, 1.205, metric=metric)
    )
    assert verdict(rules.ranking, better, trained, lost()) == HOLDS
    assert verdict(rules.ranking, better, lost(), trained) == CONTRADICTED
    scores = pairing({"margin": 0.0}, trained, lost(), metric=[metric, metric])
    assert rules.ends_better(scores).verdict == rules.ends_better_in_all(scores).verdict == HOLDS


def test_a_run_that_diverged_after_the_updates_that_are_compared_has_not_diverged():
    late = [run(curve={500: 0.9, 1000: 0.1}, status="diverged", updates=1200)]
    slow = [run(curve={500: 0.8, 1000: 0.95})]
    test = {"margin": 0.0, "updates": 500, "level": 0.9}
    given = pairing(test, late, slow, metric="valid/accuracy")
    assert rules.ends_better(given).effects == pytest.approx((0.1,)) and given.marks == set()
    assert rules.diverges(given).effects == (0.0,)
    longer = pairing({**test, "updates": 1200}, late, slow, metric="valid/accuracy")
    assert rules.diverges(longer).effects == (1.0,)


def test_each_score_has_an_interval_of_its_own():
    def sides(*rows):  # rows of two scores, by seed
        return [run(k, metrics=dict(zip(("test/bleu1", "test/cider"), row, strict=True))) for k, row in enumerate(rows)]

    def outcome(of):
        than = sides((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
        given = pairing({"margin": 0.0}, of, than, metric=["test/bleu1", "test/cider"])
        return rules.ends_better_in_all(given), given.marks

    # Neither score differs for sure, but the smaller of the two differences is below zero for every seed.
    mixed = sides((0.7, 1.2), (1.2, 0.8), (0.9, 1.1))
    assert outcome(mixed)[0].verdict == UNDECIDED and outcome(mixed)[1] == {"the effect is that of test/bleu1"}
    assert outcome(sides((1.2, 1.3), (1.3, 1.2), (1.25, 1.25)))[0].verdict == HOLDS
    found, marks = outcome(sides((0.8, 3.0), (0.81, 0.1), (0.82, 2.0)))  # test/cider has the lower interval
    assert found.verdict == CONTRADICTED and marks == {"the effect is that of test/bleu1"}
    assert found.effects == pytest.approx((-0.2, -0.19, -0.18))


def test_a_ranking_is_as_strong_as_its_closest_neighbours():
    sides = [final(v, metric="valid/loss") for v in (1.0, 1.5, 1.6)]
    assert rules.ranking(pairing({}, *sides, metric="valid/loss")).effects == pytest.approx((0.1,))
    sides = [final(v, metric="valid/loss") for v in (1.0, 1.7, 1.6)]
    assert rules.ranking(pairing({}, *sides, metric="valid/loss")).effects == pytest.approx((-0.1,))


def test_what_is_alike_lies_within_the_margin():
    sides = [final(v, v, v, metric="valid/loss") for v in (1.00, 1.015, 1.01)]
    assert rules.alike(pairing({"margin": 0.02}, *sides, metric="valid/loss")).verdict == HOLDS
    outcome = rules.alike(pairing({"margin": 0.01}, *sides, metric="valid/loss"))
    assert outcome.verdict == CONTRADICTED and outcome.effects == pytest.approx((-0.015,) * 3)


def test_reaching_a_level_first_is_a_ratio_of_updates():
    fast, slow = {100: 0.5, 200: 0.8}, {100: 0.1, 200: 0.4, 400: 0.9}
    given = pairing({"level": 0.7}, [run(curve=fast)], [run(curve=slow)], metric="valid/accuracy")
    assert rules.reaches_first(given).effects == pytest.approx((math.log(2),)) and given.marks == set()
    reverse = pairing({"level": 0.7}, [run(curve=slow)], [run(curve=fast)], metric="valid/accuracy")
    assert rules.reaches_first(reverse).effects == pytest.approx((-math.log(2),))


def test_a_run_that_never_gets_there_counts_with_its_length_and_is_marked():
    fast, never = {100: 0.5, 200: 0.8}, {100: 0.1, 1000: 0.3}
    given = pairing({"level": 0.7}, [run(curve=fast)], [run(curve=never)], metric="valid/accuracy")
    assert rules.reaches_first(given).effects == pytest.approx((math.log(5),)) and given.marks == {rules.NEVER["than"]}
    # Within 150 updates, neither run reaches the level.
    given = pairing({"level": 0.7, "updates": 150}, [run(curve=fast)], [run(curve=never)], metric="valid/accuracy")
    assert rules.reaches_first(given).effects == (0.0,) and given.marks == set(rules.NEVER.values())


def test_settling_is_measured_against_a_runs_own_lowest_loss():
    quick = run(curve={100: 2.0, 200: 1.005, 400: 1.0}, metric="valid/loss")
    slow = run(curve={100: 0.9, 200: 0.6, 400: 0.5}, metric="valid/loss")
    outcome = rules.settles_first(pairing({"share": 0.01}, [quick], [slow], metric="valid/loss"))
    assert outcome.effects == pytest.approx((math.log(2),))


def test_a_run_that_diverged_never_settles():
    lost = run(curve={100: 1.0}, metric="valid/loss", status="diverged", updates=150)
    slow = run(curve={100: 0.9, 200: 0.6, 400: 0.5}, metric="valid/loss")
    given = pairing({"share": 0.01}, [lost], [slow], metric="valid/loss")
    assert rules.settles_first(given).effects == pytest.approx((math.log(0.4),)) and given.marks == {rules.NEVER["of"]}
    slow.records.append({"update": 900, "seconds": 900.0, "valid/loss": 0.1})
    given = pairing({"share": 0.01, "updates": 400}, [slow], [slow], metric="valid/loss")
    assert rules.settles_first(given).n == 1 and given.marks == set()  # the lowest loss within 400 updates counts


def test_divergence_counts_where_the_other_trains():
    lost, trained = [run(status="diverged")] * 3, final(0.1, 0.2, 0.3)
    assert rules.diverges(pairing({}, lost, trained)).verdict == HOLDS
    assert rules.diverges(pairing({}, trained, lost)).verdict == CONTRADICTED
    assert rules.diverges(pairing({}, trained, trained)).verdict == UNDECIDED
    assert rules.diverges(pairing({}, [*lost[:2], trained[2]], trained)).verdict == UNDECIDED


def test_stability_compares_the_largest_gradients():
    def peaks(value, **options):
        return run(curve={10: 1.0, 20: value, 2000: 1e6}, metric="train/grad_norm", **options)

    test = {"factor": 10, "updates": 1000}
    outcome = rules.less_stable(pairing(test, [peaks(50.0)], [peaks(2.0)], metric=[]))
    assert outcome.effects == pytest.approx((math.log(25),)) and outcome.agree == 1
    assert rules.less_stable(pairing(test, [peaks(10.0)], [peaks(2.0)], metric=[])).agree == 0
    lost, trained = [run(status="diverged")], [peaks(2.0)]  # not one finite gradient norm was recorded
    assert rules.less_stable(pairing(test, lost, trained, metric=[])).agree == 1
    assert rules.less_stable(pairing(test, trained, lost, metric=[])).effects[0] < -math.log(10)
    assert rules.less_stable(pairing(test, lost, lost, metric=[])).effects == (0.0,)
    assert rules.less_stable(pairing(test, [peaks(None)], [peaks(2.0)], metric=[])).agree == 1  # a norm of infinity


def test_the_largest_learning_rate_has_no_divergence_below_it():
    def at(*statuses):
        return [run(status=s, rate=r) for r, s in zip((0.1, 0.5, 1.0), statuses, strict=True)]

    good, bad = "finished", "diverged"

    def effect(of, than):
        (value,) = rules.larger_rate(pairing({"key": "rate"}, [of], [than], metric=[])).effects
        return math.exp(value)

    assert effect(at(good, good, good), at(good, bad, bad)) == pytest.approx(10)
    assert effect(at(good, bad, good), at(good, good, bad)) == pytest.approx(0.2)
    assert effect(at(good, good, good), at(bad, good, good)) == pytest.approx(20)  # counts with half of the smallest
    for of, marks in ((at(good, good, good), {rules.LARGEST}), (at(good, good, bad), set())):
        given = pairing({"key": "rate"}, [of], [at(good, bad, bad)], metric=[])
        assert rules.larger_rate(given).n == 1 and given.marks == marks


def test_the_largest_learning_rate_at_which_a_level_is_reached():
    def at(*lowest):
        return [run(curve={50: v}, metric="valid/loss", rate=r) for r, v in zip((0.1, 0.5, 1.0), lowest, strict=True)]

    def effect(of, than):
        given = pairing({"key": "rate", "level": 2.5}, [of], [than], metric="valid/loss")
        (value,) = rules.learns_at_larger_rate(given).effects
        return math.exp(value)

    assert effect(at(2.0, 2.0, 2.5), at(2.0, 9.0, 9.0)) == pytest.approx(10)
    assert effect(at(9.0, 9.0, 9.0), at(9.0, 2.0, 9.0)) == pytest.approx(0.1)
    given = pairing({"key": "rate", "level": 2.5, "updates": 49}, [at(2.0, 2.0, 2.0)], [at(9.0, 9.0, 9.0)],
                    metric="valid/loss")  # fmt: skip
    assert rules.learns_at_larger_rate(given).effects == (0.0,)  # reached after the updates that are compared


def test_reproduced_is_within_the_tolerance_for_sure():
    assert outcomes.within([95.3, 95.5, 95.4], 95.4, 0.5).verdict == HOLDS
    assert outcomes.within([94.0, 94.1, 94.05], 95.4, 0.5).verdict == CONTRADICTED
    assert outcomes.within([95.0, 95.9, 94.6], 95.4, 0.5).verdict == UNDECIDED
    assert outcomes.within([95.4], 95.4, 0.5).verdict == UNDECIDED


def test_a_trend_is_the_slope_of_a_line_through_the_sides_and_larger_values_end_worse():
    # Losses 1 + 2 gamma, with a deviation that does not change the slope of the least-squares line.
    at = [0.0, 1.0, 2.0]
    losses = [[1.1, 2.8, 5.1], [1.0, 3.0, 5.0], [1.2, 2.6, 5.2]]
    sides = [final(*column, metric="valid/loss") for column in zip(*losses, strict=True)]
    outcome = rules.trend(pairing({"at": at}, *sides, metric="valid/loss"))
    assert outcome.effects == pytest.approx((2.0, 2.0, 2.0)) and outcome.verdict == HOLDS
    falling = rules.trend(pairing({"at": at}, *reversed(sides), metric="valid/loss"))
    assert falling.effects == pytest.approx((-2.0, -2.0, -2.0)) and falling.verdict == CONTRADICTED
    accuracies = [final(value, metric="valid/accuracy") for value in (0.9, 0.8, 0.7)]
    assert rules.trend(pairing({"at": at}, *accuracies, metric="valid/accuracy")).effects == pytest.approx((0.1,))
    lost = [*sides[:2], [run(k, status="diverged") for k in range(3)]]
    given = pairing({"at": at}, *lost, metric="valid/loss")
    assert rules.trend(given).effects[1] == pytest.approx(1.0), "the diverged run counts like the worst, 1, 3 and 3"
    assert rules.DIVERGED in given.marks


def test_training_is_unsteady_by_how_much_its_loss_lies_above_its_lowest_so_far():
    def trained(*losses, status="finished"):
        return run(curve=dict(enumerate(losses, 1)), metric="train/loss", status=status)

    steady, unsteady = trained(8.0, 4.0, 4.4, 2.0), trained(8.0, 4.0, 8.0, 2.0, 8.0)
    assert trained(3.0, 2.0, 1.0).unsteadiness() == 0.0
    assert steady.unsteadiness() == pytest.approx(math.log(1.1) / 4)
    assert unsteady.unsteadiness() == pytest.approx((math.log(2) + math.log(4)) / 5)
    assert unsteady.unsteadiness(updates=3) == pytest.approx(math.log(2) / 3)
    outcome = rules.less_steady(pairing({"factor": 2}, [unsteady], [steady], metric=[]))
    assert outcome.effects == pytest.approx((math.log(unsteady.unsteadiness() / steady.unsteadiness()),))
    assert outcome.agree == 1 and rules.less_steady(pairing({"factor": 50}, [unsteady], [steady], metric=[])).agree == 0
    lost = trained(8.0, status="diverged")
    assert rules.less_steady(pairing({"factor": 2}, [lost], [steady], metric=[])).agree == 1
    assert rules.less_steady(pairing({"factor": 2}, [steady], [lost], metric=[])).effects[0] < 0


def test_the_resolution_of_a_ratio_follows_from_the_distance_of_evaluations():
    of, than = run(curve={500: 0.1, 1000: 0.9}), run(curve={500: 0.1, 1000: 0.2, 1500: 0.3, 2000: 0.9}, updates=2000)
    outcome = rules.reaches_first(pairing({"level": 0.8}, [of], [than], metric="valid/accuracy"))
    assert [math.exp(-x) for x in outcome.resolution] == pytest.approx([1000 / 1500, 500 / 2000])
    at_once = rules.reaches_first(pairing({"level": 0.1}, [of], [than], metric="valid/accuracy"))
    assert at_once.resolution == (-math.inf, math.inf), "both got there before their first evaluation"


def test_the_resolution_of_a_rate_follows_from_the_rates_that_were_tried():
    def swept(*lost):
        return [run(status="diverged" if rate in lost else "finished", **{"optim.lr": rate}) for rate in (1, 2, 4)]

    outcome = rules.larger_rate(pairing({"key": "optim.lr"}, [swept(4)], [swept(2, 4)]))
    assert [math.exp(x) for x in outcome.resolution] == pytest.approx([2 / 2, 4 / 1])
    top = rules.larger_rate(pairing({"key": "optim.lr"}, [swept()], [swept(2, 4)]))
    assert top.resolution == (pytest.approx(math.log(4 / 2)), math.inf)


def test_an_interval_is_too_wide_if_it_reaches_as_far_beyond_the_threshold_as_the_mean_lies_before_it():
    assert Outcome((2.0, -3.0, 2.5)).is_too_wide and not Outcome((2.0, 2.1, 1.9)).is_too_wide
    assert not Outcome((0.5, 0.5, 0.5)).is_too_wide and not Outcome((0.0, 0.0, 0.0)).is_too_wide
    # Mean 1 and a half-width of 1.5: undecided, but an effect of -1 is outside.
    sd = 1.5 / 4.3027 * 3**0.5
    undecided = Outcome((1 - sd, 1.0, 1 + sd))
    assert undecided.verdict == UNDECIDED and not undecided.is_too_wide
    assert Outcome((1 - 2 * sd, 1.0, 1 + 2 * sd)).is_too_wide and not Outcome(undecided.effects, -9.0).is_too_wide


def test_an_unknown_rule_is_an_error_that_names_the_claim():
    with pytest.raises(BnrnnError, match=r"claims.yaml: claim C1: rule 'wins' is unknown: use ends_better, "):
        rules.rule_of({"rule": "wins"}, "claims.yaml: claim C1")
