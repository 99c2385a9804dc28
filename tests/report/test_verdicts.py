"""The runs that a test of a claim uses, the evidence that decides the verdict, and the page."""

import dataclasses
import math
import subprocess

import pytest
import yaml

from bnrnn.config import sweep
from bnrnn.report import rule_history, rules
from bnrnn.report.claim_tests import claims_of
from bnrnn.report.claim_types import Claim, text_of
from bnrnn.report.claims import papers
from bnrnn.report.claims_page import claim_pages, render, render_claim, render_overview, render_short, summary
from bnrnn.report.costs import hours_of_test
from bnrnn.report.evidence import Evidence
from bnrnn.report.judging import judge
from bnrnn.report.outcome import CONTRADICTED, HOLDS, NOT_RUN, UNDECIDED, JudgedTest, Outcome
from bnrnn.report.verdicts import (
    AGREES,
    BY_PART,
    DISAGREES,
    TOO_FEW,
    TOO_WIDE,
    JudgedClaim,
    effect_in_words,
    scope_in_words,
)
from bnrnn.system.files import read_record, write_record
from tests.report.claim_files import claim_test
from tests.report.test_runs import change_recipe, put

TABLE = "cooijmans2016/table1"
BETTER = {"scope": "paper", "rule": "ends_better", "experiment": "table1", "where": {"data": "pmnist"}, "margin": 0.01,
          "metric": "test/accuracy", "of": {"model": "bn_lstm"}, "than": {"model": "lstm"}}  # fmt: skip


SIDES = {"of": {"model": "bn_lstm"}, "than": {"model": "lstm"}, "where": {"data": "pmnist"}}


def a_test(verdict: str | None, **given) -> JudgedTest:
    effects = {HOLDS: (1.0, 1.1, 0.9), CONTRADICTED: (-1.0, -1.1, -0.9), UNDECIDED: (1.0, -1.0, 0.5), TOO_FEW: (1.0,)}
    test = claim_test({"scope": "paper", "rule": "diverges", "experiment": "table1", **SIDES, **given})
    return JudgedTest(test, Outcome(effects[verdict]) if verdict else None, updates=test.updates)


def claim(*tests: JudgedTest, about: str = "", main: bool = False) -> JudgedClaim:
    given = tuple(tested.test for tested in tests)
    return JudgedClaim(Claim("C1", "cooijmans2016", "A claim.", "section 1", given, about, main), tests)


def judged(tmp_path, test: dict, paper: str = "cooijmans2016") -> JudgedTest:
    return judge(claim_test(test, paper), Evidence(tmp_path))


def put_cell(tmp_path, seed: int, model: str, accuracy: float, **overrides) -> None:
    cell = {"data": "pmnist", "model": model, "seed": str(seed), **overrides}
    put(tmp_path, TABLE, cell, {"test/accuracy": accuracy, "valid/accuracy": accuracy})


def test_runs_are_paired_by_seed_and_a_seed_without_its_pair_is_left_out(tmp_path):
    for seed, (bn, plain) in enumerate([(0.95, 0.90), (0.96, 0.90), (0.94, 0.90)]):
        put_cell(tmp_path, seed, "bn_lstm", bn)
        put_cell(tmp_path, seed, "lstm", plain)
    put_cell(tmp_path, 3, "lstm", 0.99)
    put_cell(tmp_path, 4, "bn_lstm", 0.10, **{"optim.decay": "0.5"})  # another recipe
    put_cell(tmp_path, 4, "lstm", 0.99)
    put_cell(tmp_path, 5, "bn_lstm", 0.10, **{"budget.updates": "500"})  # shorter
    put_cell(tmp_path, 5, "lstm", 0.99)
    found = judged(tmp_path, BETTER)
    assert found.outcome.effects == pytest.approx((0.05, 0.06, 0.04)) and found.outcome.verdict == HOLDS
    assert effect_in_words(found) == "+5.0 [+2.5, +7.5] points" and found.commits == ("abc",)


def test_runs_of_enough_updates_are_judged_like_those_of_the_papers_length_and_cost_less(tmp_path):
    key, test = "cooijmans2016/table2", {k: v for k, v in BETTER.items() if k != "where"}
    test |= {"experiment": "table2", "metric": "test/bpc_one_sequence"}
    for model, value in (("lstm", 1.38), ("bn_lstm", 1.33)):
        cell = {"data": "ptb_char", "model": model, "seed": "0", "budget.epochs": "13"}
        records = [{"update": 1, "seconds": 2.0, "train/loss": 1.0}, {"update": 2, "seconds": 4.0, "train/loss": 1.0}]
        put(tmp_path, key, cell, {"test/bpc_one_sequence": value}, records)  # 100 updates, selected at the 50th
    short = judged(tmp_path, test)
    assert short.outcome is None
    for path in tmp_path.rglob("result.json"):
        write_record(path, read_record(path, "") | {"updates": 10283})
    found = judged(tmp_path, test)
    assert found.outcome.effects == pytest.approx((0.05,))
    assert scope_in_words(found) == "paper's data, at least 10,283 of 39,550 updates"
    two_seeds_of_two_models = 4 * 10283 * 2.0 / 3600
    assert hours_of_test(found, Evidence(tmp_path)) == pytest.approx(two_seeds_of_two_models)


def test_a_missing_seed_is_no_verdict_and_the_effect_so_far_is_named(tmp_path):
    put_cell(tmp_path, 0, "bn_lstm", 0.95)
    found = judged(tmp_path, BETTER)
    assert found.outcome is None and claim(found).at_length.text == NOT_RUN
    put_cell(tmp_path, 0, "lstm", 0.90)
    so_far = claim(judged(tmp_path, BETTER)).at_length
    assert (so_far.word, so_far.text) == (TOO_FEW, "1 of 3 seeds, so far +5.0 points")


def test_where_every_run_diverged_there_is_nothing_to_compare(tmp_path):
    for model in ("lstm", "bn_lstm"):
        put_cell(tmp_path, 0, model, 0.9)
    for path in tmp_path.rglob("result.json"):
        write_record(path, read_record(path, "") | {"status": "diverged"})
    found = judged(tmp_path, BETTER)
    assert found.outcome is None and effect_in_words(found) == "–"


def test_of_a_longer_run_only_the_curve_counts_to_the_length_of_the_test(tmp_path):
    def put_curve(model, values):
        records = [{"update": u, "seconds": 1.0, "valid/accuracy": v} for u, v in values.items()]
        cell = {"data": "pmnist", "model": model, "seed": "0"}
        put(tmp_path, TABLE, cell, {"test/accuracy": 0.9, "valid/accuracy": max(values.values())}, records)

    put_curve("bn_lstm", {50: 0.7, 100: 0.9})  # `put` stores 100 updates
    put_curve("lstm", {50: 0.6, 100: 0.95})
    shorter = {**BETTER, "scope": "shorter", "updates": 50, "metric": "valid/accuracy"}
    found = judged(tmp_path, shorter)
    assert found.outcome.effects == pytest.approx((0.1,)) and found.updates == 50
    assert judged(tmp_path, {**shorter, "metric": "test/accuracy"}).outcome is None
    assert judged(tmp_path, {**shorter, "updates": 101}).outcome is None


def test_of_two_lengths_of_a_run_the_longer_counts_and_a_stale_one_never(tmp_path):
    for model, value in (("bn_lstm", 0.9), ("lstm", 0.8)):
        cell = {"data": "pmnist", "model": model, "seed": "0"}
        for budget, better in (("cpu", 0.0), ("paper", 0.05), ("smoke", 0.0)):
            records = [{"update": 50, "seconds": 1.0, "valid/accuracy": value + better * (model == "bn_lstm")}]
            put(tmp_path, TABLE, cell, {"valid/accuracy": value}, records, budget)
    for path in (tmp_path / TABLE / "paper").rglob("result.json"):
        write_record(path, read_record(path, "") | {"updates": 200})
    shorter = {**BETTER, "scope": "shorter", "updates": 50, "metric": "valid/accuracy"}
    assert judged(tmp_path, shorter).outcome.effects == pytest.approx((0.15,))
    for path in (tmp_path / TABLE / "paper").rglob("result.json"):
        change_recipe(path)
    assert judged(tmp_path, shorter).outcome.effects == pytest.approx((0.1,))


def test_a_result_without_the_number_asked_for_is_left_out(tmp_path):
    for model in ("lstm", "bn_lstm"):
        put_cell(tmp_path, 0, model, 0.9)
    assert judged(tmp_path, {**BETTER, "metric": "test/accuracy_shared_statistics"}).outcome is None


def test_each_side_takes_its_own_best_rate_once_all_rates_are_there(tmp_path):
    key, rates = "zhang2017/rates", sweep("zhang2017/rates")["optim.lr"]

    def put_rate(setting, rate, loss, bleu):
        cell = {"setting": setting, "optim.lr": rate, "seed": "0"}
        records = [{"update": 100, "seconds": 1.0, "valid/loss": loss}]
        put(tmp_path, key, cell, {"test/bleu1": bleu, "valid/loss": loss}, records)

    test = {"scope": "other data", "updates": 100, "rule": "ends_better", "experiment": "rates", "best_of": "optim.lr",
            "metric": "test/bleu1", "margin": 0, "of": {"setting": "lstm_captioner"},
            "than": {"setting": "rhn_captioner"}}  # fmt: skip

    def outcome():
        return judged(tmp_path, test, "zhang2017").outcome

    for k, rate in enumerate(rates):
        put_rate("lstm_captioner", rate, loss=3.0 - k, bleu=0.1 * k)  # the last has the lowest loss
        if k:
            put_rate("rhn_captioner", rate, loss=3.0 + k, bleu=0.1 * k)  # the first has
    assert outcome() is None
    put_rate("rhn_captioner", rates[0], loss=3.0, bleu=0.05)
    assert outcome().effects == pytest.approx((0.3 - 0.05,))


SHORTER = {"scope": "shorter", "updates": 2500}
OTHER = {"scope": "other data", "experiment": "fig4_small", "updates": 9, "where": {"data": "babi_qa1"},
         "of": {"setting": "bn_lstm_reader"}, "than": {"setting": "lstm_reader"}}  # fmt: skip
LONGER = {"scope": "shorter", "updates": 30000}


def test_runs_at_the_paper_s_length_and_early_runs_have_verdicts_of_their_own():
    both = claim(a_test(HOLDS), a_test(CONTRADICTED, **SHORTER))
    assert (both.at_length.word, both.early.word) == (HOLDS, DISAGREES)
    for word in (CONTRADICTED, UNDECIDED):  # which other data does not outvote
        both = claim(a_test(word), a_test(HOLDS, **OTHER))
        assert (both.at_length.word, both.early.word) == (word, AGREES)
    only = claim(a_test(None), a_test(HOLDS, **SHORTER))
    assert (only.at_length.text, only.early.text) == (NOT_RUN, "agrees (first 2,500 of 100,000 updates, n=3)")
    assert only.at_length.tests == () and len(only.early.tests) == 1
    left = claim(a_test(None), a_test(None, **SHORTER))
    assert (left.at_length.word, left.early.word) == (NOT_RUN, NOT_RUN)
    assert claim(a_test(HOLDS)).early.text == "–"


def test_stronger_evidence_that_shows_nothing_is_not_outvoted_by_weaker_evidence():
    assert claim(a_test(HOLDS, **SHORTER), a_test(UNDECIDED, **LONGER)).early.word == UNDECIDED
    assert claim(a_test(HOLDS, **OTHER), a_test(UNDECIDED, **SHORTER)).early.word == UNDECIDED
    assert claim(a_test(CONTRADICTED, **SHORTER), a_test(HOLDS, **LONGER)).early.word == AGREES
    other = claim(a_test(None, **SHORTER), a_test(HOLDS, **OTHER)).early
    assert other.text == "agrees (bAbI 1 in place of CNN, 9 updates, n=3)"


def test_whole_runs_on_other_data_are_named_with_their_length():
    whole = a_test(HOLDS, **{key: value for key, value in OTHER.items() if key != "updates"})
    other = claim(dataclasses.replace(whole, updates=3000)).early
    assert other.text == "agrees (bAbI 1 in place of CNN, 3,000 updates, n=3)"


def test_stronger_evidence_with_too_few_seeds_decides_nothing_and_is_mentioned():
    early = claim(a_test(CONTRADICTED, **SHORTER), a_test(TOO_FEW, **LONGER)).early
    assert early.word == DISAGREES
    decided, so_far = early.text.split("; ")
    assert decided == "disagrees (first 2,500 of 100,000 updates, n=3)"
    assert so_far.startswith("1 of 3 seeds, so far in 1 of 1 pairs")
    assert claim(a_test(TOO_FEW, **LONGER)).early.word == TOO_FEW


def test_early_runs_are_no_evidence_of_final_quality():
    final = claim(a_test(None), a_test(HOLDS, **SHORTER), about="quality")
    assert (final.early.word, final.early.tests) == ("–", ()) and "do not show final quality" in final.early.text
    page = render_claim(final)
    assert "in 3 of 3 pairs | – |" in page, "the effect is shown, without a verdict"
    assert claim(a_test(HOLDS), about="quality").at_length.word == HOLDS


def test_where_tests_differ_the_verdict_says_which_part_does_what():
    parts = claim(a_test(HOLDS, part="small"), a_test(None, part="large"), a_test(HOLDS, part="medium")).at_length
    assert (parts.word, parts.text) == (BY_PART, "holds: small, medium; not run: large")
    parts = claim(a_test(CONTRADICTED, part="a", **SHORTER), a_test(HOLDS, part="b", **SHORTER)).early
    assert parts.text == "agrees: b; disagrees: a (first 2,500 of 100,000 updates, n=3)"


def test_a_test_that_was_replaced_is_shown_and_does_not_count():
    both = claim(a_test(CONTRADICTED, replaced="a better one"), a_test(HOLDS))
    assert both.at_length.word == HOLDS and "replaced: a better one" in render_claim(both)


def test_the_cost_of_a_test_counts_all_missing_seeds_of_all_sides(tmp_path):
    cell = {"data": "pmnist", "model": "lstm", "seed": "0"}
    records = [{"update": 100, "seconds": 200.0, "train/loss": 1.0}]  # 2 seconds for each update
    put(tmp_path, TABLE, cell, {"test/accuracy": 0.9}, records)
    for path in tmp_path.rglob("result.json"):
        path.unlink()  # this run is begun
    given = a_test(None, **SHORTER)
    run = 2500 * 2 / 3600  # hours

    def hours(tested):
        return hours_of_test(tested, Evidence(tmp_path))

    assert hours(given) == pytest.approx(6 * run - 100 * 2 / 3600), "three seeds of two models, one begun"
    half = dataclasses.replace(given, seeds=(frozenset({"0", "2"}), frozenset({"0", "1", "2"})))
    assert hours(half) == pytest.approx(run)
    assert hours(a_test(None)) == pytest.approx((6 * 100_000 - 100) * 2 / 3600)
    put(tmp_path, TABLE, cell | {"seed": "1"}, {"test/accuracy": 0.9}, records)  # finished, but of no use to the test
    assert hours(given) == pytest.approx(6 * run - 100 * 2 / 3600), "seed 3 takes its place"
    assert hours(a_test(None, **OTHER)) is None, "never timed"
    analysis = {"scope": "shorter", "rule": "property", "analysis": "fig3b", "updates": 10283,
                "property": "longer_is_no_worse"}  # fmt: skip
    put(tmp_path, "cooijmans2016/table2", {"data": "ptb_char", "model": "lstm", "seed": "7"}, {}, records)
    assert hours(JudgedTest(claim_test(analysis), None)) == pytest.approx(6 * 10283 * 2 / 3600)


def test_the_page_lists_tests_without_enough_seeds(tmp_path):
    text = render([claim(a_test(HOLDS), a_test(TOO_FEW), a_test(None, replaced="x"))], Evidence(tmp_path))
    missing = text.split("## Tests without enough runs")[1]
    assert missing.count("| C1 |") == 1 and "no similar run has been timed" in missing


def reaching():
    return claim_test({"scope": "paper", "rule": "reaches_first", "experiment": "table1", **SIDES, "level": 0.9,
                       "metric": "valid/accuracy"})  # fmt: skip


def test_a_ratio_of_updates_is_a_bound_if_one_side_never_got_there_and_has_an_interval_if_pairs_differ():
    def words(effects, *marks):
        return effect_in_words(JudgedTest(reaching(), Outcome(effects, marks=marks)))

    half, third = 0.6931, 1.0986
    assert words((half, third)) == "in 0.41 of the updates", "two pairs have no interval"
    assert words((half, half, third)) == "in 0.44 [0.24, 0.78] of the updates"
    assert words((half, half)) == "in 0.50 of the updates"
    assert words((half, half), rules.NEVER["than"]) == "in at most 0.50 of the updates"
    assert words((half, half), rules.NEVER["of"]) == "in at least 0.50 of the updates"
    assert words((half, half), *rules.NEVER.values()) == "in 0.50 of the updates"


def test_equal_effects_have_a_resolution_in_place_of_an_interval():
    rates = claim_test({"scope": "paper", "rule": "larger_rate", "experiment": "rates", "key": "optim.lr",
                        "of": {"model": "bn_rnn_gamma1"}, "than": {"model": "rnn"}}, "laurent2015")  # fmt: skip

    def words(low, high, test=None):
        outcome = Outcome((0.6931,) * 3, resolution=(low, high))
        return effect_in_words(JudgedTest(test or reaching(), outcome))

    assert words(0.2877, 1.3863) == "in 0.50 of the updates (resolution: 0.25 to 0.75)"
    assert words(-math.inf, 1.3863) == "in 0.50 of the updates (resolution: at least 0.25)"
    assert words(0.0, math.inf, rates) == "2 times the learning rate (resolution: at least 1)"


def test_an_interval_that_is_too_wide_is_said_in_words_and_shown_on_the_page_of_the_claim():
    wide, narrow, equal = ((2.0, -3.0, 2.5), (0.02, -0.03, 0.0), (0.0, 0.0, 0.0))

    def judged(effects):
        return JudgedTest(claim_test({**BETTER, "margin": 0.0}), Outcome(effects))

    assert effect_in_words(judged(wide), whole=False) == effect_in_words(judged(narrow), whole=False) == TOO_WIDE
    assert effect_in_words(judged(wide)) == "+50.0 [-705.5, +805.5] points"
    assert effect_in_words(judged(equal), whole=False) == "+0.0 points"
    assert TOO_WIDE in render_overview([claim(judged(wide))]) and "-705.5" in render_claim(claim(judged(wide)))
    decided = judged((1.0, 1.1, 0.9))
    assert effect_in_words(decided, whole=False) == effect_in_words(decided)


def test_the_pages_of_the_claims_name_verdicts_effects_and_runs(tmp_path):
    text = render_overview([claim(a_test(HOLDS), a_test(HOLDS)), claim(a_test(None))])
    assert "| [C1](claims/C1.md) | A claim. | **holds** | – | after its runs | in 3 of 3 pairs | [table1](cooij" in text
    assert "| not run | – | – | – | – |" in text
    both = claim(a_test(HOLDS), a_test(CONTRADICTED, **SHORTER))
    counted = summary([both, both, claim(a_test(None))])
    assert "at the paper's length: holds 2, not run 1. Early, or on other data: disagrees 2." in counted
    assert "4 verdicts rest on runs. The rules of 0 were all" in counted and "those of 4 are younger" in counted
    pages = claim_pages([both], Evidence(tmp_path), measured={"cooijmans2016/table1"})
    assert set(pages) == {tmp_path / "claims.md", tmp_path / "claims/C1.md"}
    assert "- At the paper's length: **holds**" in pages[tmp_path / "claims/C1.md"]
    assert "[cooijmans2016/table1](../cooijmans2016/table1.md)" in pages[tmp_path / "claims/C1.md"]


def test_the_short_table_has_the_main_claims():
    main, other = claim(a_test(HOLDS), main=True), claim(a_test(HOLDS))
    assert render_short([main, other]).splitlines()[2:] == ["| C1 | A claim. | **holds** | – |"]


def test_every_claim_of_the_papers_has_an_entry():
    last = {"B": 3, "N": 4, "C": 24, "K": 7, "L": 7, "Z": 4}
    expected = [[f"{letter}{k}" for k in range(1, number + 1)] for letter, number in last.items()]
    found = [claims_of(paper) for paper in papers()]
    assert [list(claims) for claims in found] == expected
    claims = [claim for of_paper in found for claim in of_paper.values()]
    final = [claim.name for claim in claims if claim.about == "quality"]
    assert final == [
        "B2", "B3", "C3", "C4", "C11", "C13", "C22", "C24", "K1", "K2", "K3", "K4", "K5", "K6", "L2", "L7", "Z1",
    ]  # fmt: skip
    assert all(claim.says.endswith(".") and claim.where and claim.tests for claim in claims)


def test_a_rule_is_before_its_runs_if_they_were_begun_with_its_commit_or_a_later_one(tmp_path, monkeypatch):
    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    def commit(tests):
        path = tmp_path / "experiments/cooijmans2016/claims.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"claims": {"C1": {"tests": tests}}}))
        git("add", "-A")
        git("commit", "-m", "x")
        return git("rev-parse", "--short=7", "HEAD").strip()

    git("init")
    first = commit([{"level": 1}])
    second = commit([{"level": 1}, {"level": 2}])
    monkeypatch.setattr(rule_history, "ROOT", tmp_path)
    for cached in (rule_history.rule_commit, rule_history._history, rule_history._git):
        cached.cache_clear()

    def judged(given, *commits):
        test = dataclasses.replace(a_test(None).test, text=text_of(given), known=given.get("known", ""))
        return JudgedTest(test, Outcome((1.0,)), commits)

    def registered(given, *commits):
        return rule_history.registered(judged(given, *commits))

    assert registered({"level": 1}, first, second) == f"{first}, before the runs of {first}, {second}"
    assert registered({"level": 2}, second + "+changes") == f"{second}, before the runs of {second}"
    after = f"{second}, after the runs of {first}, before those of {second}"
    assert registered({"level": 2, "replaced": "why"}, first, second) == after
    assert registered({"level": 1, "note": "why"}, first).startswith(f"{first}, before the runs")
    assert registered({"level": 1}, *[first] * 5).endswith(f"{first}, {first}, {first} and 2 more")
    assert registered({"level": 3}, first) == "rule not committed yet"
    assert registered({"level": 1}, "0123456789ab") == f"{first}, unknown whether before the runs of 0123456"
    known = {"level": 1, "known": "a run was seen"}
    assert registered(known, first) == f"{first}, before the runs of {first}; a run was seen"

    def age(*tests):
        return rule_history.age([judged(given, *commits) for given, commits in tests])

    before, after = ({"level": 1}, (first,)), ({"level": 2}, (first,))
    assert age(before) == age(before, before) == rule_history.BEFORE and age(after) == rule_history.AFTER
    assert age(before, after) == age(({"level": 2}, (first, second))) == age((known, (first,))) == rule_history.PARTLY
    assert age(({"level": 3}, (second,))) == rule_history.AFTER and age() == ""
    assert rule_history.has_history()
    for cached in (rule_history.rule_commit, rule_history._history, rule_history._git):
        cached.cache_clear()
