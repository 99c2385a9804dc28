"""The runs that a test of a claim uses, the evidence that decides the verdict, and the page."""

import dataclasses
import math
import re
import subprocess
from functools import cache

import pytest
import yaml

from bnrnn.config import ROOT, compose_config, sweep
from bnrnn.errors import BnrnnError
from bnrnn.report import rule_history, rules
from bnrnn.report.claims import claim_keys, load_claim
from bnrnn.report.claims_page import claim_pages, render, render_claim, render_overview, render_short, summary
from bnrnn.report.costs import hours_of
from bnrnn.report.effects import TOO_WIDE, effect_in_words
from bnrnn.report.judging import OWN, SCOPES, JudgedTest, judge, metrics_of, sides_of
from bnrnn.report.outcome import CONTRADICTED, HOLDS, UNDECIDED, Outcome
from bnrnn.report.runs import load_runs
from bnrnn.report.verdicts import AGREES, BY_PART, DISAGREES, NOT_RUN, TOO_FEW, Claim
from bnrnn.system.files import read_record, write_record
from tests.report.test_runs import change_recipe, put

TABLE = "cooijmans2016/table1"
BETTER = {"scope": "paper", "rule": "ends_better", "experiment": "table1", "where": {"data": "pmnist"}, "margin": 0.01,
          "metric": "test/accuracy", "of": {"model": "bn_lstm"}, "than": {"model": "lstm"}}  # fmt: skip


def a_test(verdict: str | None, **test) -> JudgedTest:
    effects = {HOLDS: (1.0, 1.0, 1.0), CONTRADICTED: (-1.0, -1.0, -1.0), UNDECIDED: (1.0, -1.0, 0.5), TOO_FEW: (1.0,)}
    entry = {"scope": "paper", "rule": "diverges", "experiment": "table1", "of": {"model": "lstm"}, "than": {}, **test}
    outcome = Outcome(effects[verdict]) if verdict else None
    return JudgedTest("C1", "cooijmans2016", entry, outcome, updates=entry.get("updates"))


def claim(*tests: JudgedTest, about: str = "") -> Claim:
    return Claim("C1", "cooijmans2016", "A claim.", "section 1", list(tests), about)


def judged(tmp_path, test: dict) -> JudgedTest:
    return judge("C1", "cooijmans2016", test, tmp_path, lambda key: load_runs(key, tmp_path), "claims.yaml: claim C1")


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
    assert judged(tmp_path, shorter).outcome.effects == pytest.approx((0.1,))
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
        return judge("Z1", "zhang2017", test, tmp_path, lambda k: load_runs(k, tmp_path), "here").outcome

    for k, rate in enumerate(rates):
        put_rate("lstm_captioner", rate, loss=3.0 - k, bleu=0.1 * k)  # the last has the lowest loss
        if k:
            put_rate("rhn_captioner", rate, loss=3.0 + k, bleu=0.1 * k)  # the first has
    assert outcome() is None
    put_rate("rhn_captioner", rates[0], loss=3.0, bleu=0.05)
    assert outcome().effects == pytest.approx((0.3 - 0.05,))


SHORTER, OTHER = (
    {"scope": "shorter", "updates": 2500},
    {"scope": "other data", "experiment": "fig4_small", "updates": 9},
)
LONGER = {"scope": "shorter", "updates": 30000}


def test_runs_at_the_paper_s_length_and_early_runs_have_verdicts_of_their_own():
    both = claim(a_test(HOLDS), a_test(CONTRADICTED, **SHORTER))
    assert (both.at_length.word, both.early.word) == (HOLDS, DISAGREES)
    both = claim(a_test(CONTRADICTED), a_test(HOLDS, **OTHER))
    assert (both.at_length.word, both.early.word) == (CONTRADICTED, AGREES)
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


def test_stronger_evidence_with_too_few_seeds_decides_nothing_and_is_mentioned():
    early = claim(a_test(CONTRADICTED, **SHORTER), a_test(TOO_FEW, **LONGER)).early
    assert early.word == DISAGREES
    assert early.text.startswith(
        "disagrees (first 2,500 of 100,000 updates, n=3); 1 of 3 seeds, so far in 1 of 1 pairs"
    )
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
    model = {"of": {"model": "bn_lstm"}, "than": {"model": "lstm"}, "where": {"data": "pmnist"}}
    given = a_test(None, **model, **SHORTER)
    run = 2500 * 2 / 3600  # hours
    assert hours_of(given, tmp_path) == pytest.approx(6 * run - 100 * 2 / 3600), "three seeds of two models, one begun"
    half = dataclasses.replace(given, seeds=(frozenset({"0", "2"}), frozenset({"0", "1", "2"})))
    assert hours_of(half, tmp_path) == pytest.approx(run)
    assert hours_of(a_test(None, **model), tmp_path) == pytest.approx((6 * 100_000 - 100) * 2 / 3600)
    put(tmp_path, TABLE, cell | {"seed": "1"}, {"test/accuracy": 0.9}, records)  # finished, but of no use to the test
    assert hours_of(given, tmp_path) == pytest.approx(6 * run - 100 * 2 / 3600), "seed 3 takes its place"
    assert hours_of(a_test(None, experiment="fig4a", of={"setting": "lstm_reader"}), tmp_path) is None, "never timed"
    analysis = {"rule": "property", "analysis": "fig3b", "experiment": None, "updates": 10283}
    put(tmp_path, "cooijmans2016/table2", {"data": "ptb_char", "model": "lstm", "seed": "7"}, {}, records)
    assert hours_of(a_test(None, **analysis), tmp_path) == pytest.approx(6 * 10283 * 2 / 3600)


def test_the_page_lists_tests_without_enough_seeds(tmp_path):
    model = {"of": {"model": "bn_lstm"}, "than": {"model": "lstm"}, "where": {"data": "pmnist"}}
    text = render([claim(a_test(HOLDS), a_test(TOO_FEW, **model), a_test(None, replaced="x"))], tmp_path)
    missing = text.split("## Tests without enough runs")[1]
    assert missing.count("| C1 |") == 1 and "no similar run has been timed" in missing


def test_a_ratio_of_updates_is_a_bound_if_one_side_never_got_there_and_has_an_interval_if_pairs_differ():
    test = {"rule": "reaches_first", "scope": "paper"}

    def words(effects, *marks):
        return effect_in_words(JudgedTest("C1", "cooijmans2016", test, Outcome(effects, marks=marks)))

    half, third = 0.6931, 1.0986
    assert words((half, third)) == "in 0.41 of the updates", "two pairs have no interval"
    assert words((half, half, third)) == "in 0.44 [0.24, 0.78] of the updates"
    assert words((half, half)) == "in 0.50 of the updates"
    assert words((half, half), rules.NEVER["than"]) == "in at most 0.50 of the updates"
    assert words((half, half), rules.NEVER["of"]) == "in at least 0.50 of the updates"
    assert words((half, half), *rules.NEVER.values()) == "in 0.50 of the updates"


def test_equal_effects_have_a_resolution_in_place_of_an_interval():
    def words(low, high, rule="reaches_first"):
        outcome = Outcome((0.6931,) * 3, resolution=(low, high))
        return effect_in_words(JudgedTest("C1", "cooijmans2016", {"rule": rule, "scope": "paper"}, outcome))

    assert words(0.2877, 1.3863) == "in 0.50 of the updates (resolution: 0.25 to 0.75)"
    assert words(-math.inf, 1.3863) == "in 0.50 of the updates (resolution: at least 0.25)"
    assert words(0.0, math.inf, "larger_rate") == "2 times the learning rate (resolution: at least 1)"


def test_an_interval_that_is_too_wide_is_said_in_words_and_shown_on_the_page_of_the_claim():
    wide, narrow, equal = ((2.0, -3.0, 2.5), (0.02, -0.03, 0.0), (0.0, 0.0, 0.0))
    test = {
        "rule": "ends_better",
        "scope": "paper",
        "metric": "test/accuracy",
        "of": {},
        "than": {},
        "experiment": "table1",
    }

    def judged(effects):
        return JudgedTest("C1", "cooijmans2016", test, Outcome(effects))

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
    counted = summary([both, dataclasses.replace(both, name="C2"), claim(a_test(None))])
    assert "at the paper's length: holds 2, not run 1. Early, or on other data: disagrees 2." in counted
    assert "4 verdicts rest on runs. The rules of 0 were all" in counted and "those of 4 are younger" in counted
    pages = claim_pages([both], tmp_path, measured={"cooijmans2016/table1"})
    assert set(pages) == {tmp_path / "claims.md", tmp_path / "claims/C1.md"}
    assert "- At the paper's length: **holds**" in pages[tmp_path / "claims/C1.md"]
    assert "[cooijmans2016/table1](../cooijmans2016/table1.md)" in pages[tmp_path / "claims/C1.md"]


def test_a_claim_names_the_number_of_updates_at_which_runs_are_compared(tmp_path):
    records = [{"update": update, "valid/accuracy": 0.9} for update in (50, 100)]
    for seed in range(3):
        for model in ("bn_lstm", "lstm"):
            cell = {"data": "pmnist", "model": model, "seed": str(seed)}
            put(tmp_path, TABLE, cell, {"test/accuracy": 0.9}, records)
    cut = {**BETTER, "scope": "shorter", "metric": "valid/accuracy", "updates": 50}
    assert claim(judged(tmp_path, cut)).early.text == "disagrees (first 50 of 100,000 updates, n=3)"


def test_the_short_table_has_the_main_claims():
    main, other = dataclasses.replace(claim(a_test(HOLDS)), is_main=True), claim(a_test(HOLDS))
    assert render_short([main, other]).splitlines()[2:] == [f"| C1 | {main.says} | **holds** | – |"]


def test_an_entry_that_cannot_be_understood_names_its_claim(tmp_path):
    with pytest.raises(BnrnnError, match=r"claim C1: scope is 'all': use paper, shorter, other data"):
        judged(tmp_path, {**BETTER, "scope": "all"})


def test_rates_of_a_test_must_be_swept_and_positive(tmp_path):
    test = {**BETTER, "best_of": "optim.decay"}
    with pytest.raises(BnrnnError, match="claim C1: expected a key for which cooijmans2016/table1 sweeps"):
        judged(tmp_path, test)
    with pytest.raises(BnrnnError, match="positive numbers, found model"):
        judged(tmp_path, {**test, "best_of": "model"})


@cache
def composed(key: str):
    return compose_config(f"experiment={key}")


def exists(key: str, name: str) -> bool:
    """Whether the configuration of a recipe has this value, which may be null."""
    node = composed(key)
    for part in name.split("."):
        if part not in node:
            return False
        node = node[part]
    return True


@cache
def in_campaign(key: str) -> set[str]:
    """The keys that the campaign overrides in an experiment."""
    entries = yaml.safe_load((ROOT / "conf/campaign.yaml").read_text())
    return {o.split("=")[0] for e in entries if e["experiment"] == key for o in e.get("overrides", [])}


def all_tests():
    for path in sorted((ROOT / "experiments").glob("*/claims.yaml")):
        for name, entry in yaml.safe_load(path.read_text()).get("claims", {}).items():
            for k, test in enumerate(entry["tests"]):
                yield pytest.param(path.parent.name, test, id=f"{name}-{k}")


def test_every_claim_of_the_papers_has_an_entry():
    files = [yaml.safe_load((ROOT / f"experiments/{p}/claims.yaml").read_text())["claims"]
             for p in ("cooijmans2016", "laurent2015", "zhang2017")]  # fmt: skip
    expected = [[f"C{k}" for k in range(1, 25)], [f"L{k}" for k in range(1, 8)], [f"Z{k}" for k in range(1, 5)]]
    assert [list(claims) for claims in files] == expected
    final = [name for claims in files for name, entry in claims.items() if entry.get("about") == "quality"]
    assert final == ["C3", "C4", "C11", "C13", "C22", "C24", "L2", "L7", "Z1"]
    for entry in (entry for claims in files for entry in claims.values()):
        assert entry["says"].endswith(".") and entry["where"] and entry["tests"]


@pytest.mark.parametrize(("paper", "test"), list(all_tests()))
def test_every_test_names_a_recipe_a_rule_and_runs_that_could_exist(paper, test):
    assert test["scope"] in SCOPES
    if test["rule"] == rules.PROPERTY:
        assert load_claim(f"{paper}/{test['analysis']}")["analysis"]
        return
    rules.rule_of(test, "here")
    needs = {"ends_better": "margin", "no_worse": "margin", "alike": "margin", "reaches_first": "level",
             "settles_first": "share", "less_stable": "factor", "less_steady": "factor", "larger_rate": "key",
             "learns_at_larger_rate": "level", "trend": "at"}  # fmt: skip
    assert needs.get(test["rule"], "rule") in test and (test["scope"] != "shorter" or "updates" in test)
    entry = load_claim(f"{paper}/{test['experiment']}")
    assert {"shorter": "paper_updates", "other data": "in_place_of"}.get(test["scope"], "title") in entry
    for side in sides_of(test):
        key = f"{paper}/{side.get('experiment', test['experiment'])}"
        assert key in claim_keys()
        wanted = {**test.get("where", {}), **{k: v for k, v in side.items() if k not in OWN}}
        for name, value in wanted.items():
            is_group = (ROOT / "conf" / name).is_dir()
            assert (ROOT / f"conf/{name}/{value}.yaml").exists() if is_group else exists(key, name), f"{key}: {name}"
        grid, free = sweep(key), test.get("best_of") or test.get("key")
        assert free is None or free in grid
        # A run has these overrides only if its sweep or an entry of the campaign does.
        assert all(name in grid or name in in_campaign(key) for name in wanted), f"{key}: {wanted}"
        undecided = [k for k, v in grid.items() if len(v) > 1 and k not in wanted and k not in ("seed", free)]
        assert undecided == [], f"{key} leaves {undecided} open"
        assert all(re.fullmatch(r"(train|valid|test)/\w+", metric) for metric in metrics_of(test, side))


def test_a_rule_is_before_its_runs_if_they_were_begun_with_its_commit_or_a_later_one(tmp_path, monkeypatch):
    def git(*args):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *args], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

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

    def registered(test, *commits):
        return rule_history.registered(JudgedTest("C1", "cooijmans2016", test, Outcome((1.0,)), commits))

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
        given = [JudgedTest("C1", "cooijmans2016", test, Outcome((1.0,)), commits) for test, commits in tests]
        return rule_history.age(given)

    before, after = ({"level": 1}, (first,)), ({"level": 2}, (first,))
    assert age(before) == age(before, before) == rule_history.BEFORE and age(after) == rule_history.AFTER
    assert age(before, after) == age(({"level": 2}, (first, second))) == age((known, (first,))) == rule_history.PARTLY
    assert age(({"level": 3}, (second,))) == rule_history.AFTER and age() == ""
    assert rule_history.has_history()
    for cached in (rule_history.rule_commit, rule_history._history, rule_history._git):
        cached.cache_clear()
