"""The runs that a test of a claim uses, the evidence that decides the verdict, and the page."""

import dataclasses
import re
import subprocess
from functools import cache

import pytest
import yaml

from bnrnn.config import ROOT, compose_config, sweep
from bnrnn.errors import BnrnnError
from bnrnn.files import read_record, write_record
from bnrnn.report import rule_history, rules
from bnrnn.report.claims import claim_keys, load_claim
from bnrnn.report.claims_page import (
    effect_in_words,
    render,
    render_overview,
    render_short,
    rests_on,
    verdict_in_words,
)
from bnrnn.report.outcomes import CONTRADICTED, CONTRADICTED_IN_PART, HOLDS, IN_PART, NOT_SHOWN, Outcome
from bnrnn.report.runs import load_runs
from bnrnn.report.verdicts import OWN, SCOPES, Claim, JudgedTest, hours_of, judge, metrics_of, serves, sides_of
from bnrnn.training.cells import expand
from tests.report.test_runs import change_recipe, put

TABLE = "cooijmans2016/table1"
BETTER = {"scope": "paper", "rule": "ends_better", "experiment": "table1", "where": {"data": "pmnist"}, "margin": 0.01,
          "metric": "test/accuracy", "of": {"model": "bn_lstm"}, "than": {"model": "lstm"}}  # fmt: skip


def a_test(verdict: str | None, **test) -> JudgedTest:
    effects = {HOLDS: (1.0, 1.0, 1.0), CONTRADICTED: (-1.0, -1.0, -1.0), NOT_SHOWN: (1.0,)}
    entry = {"scope": "paper", "rule": "diverges", "experiment": "table1", "of": {"model": "lstm"}, "than": {}, **test}
    outcome = Outcome(effects[verdict]) if verdict else None
    return JudgedTest("C1", "cooijmans2016", entry, outcome, updates=entry.get("updates"))


def claim(*tests: JudgedTest) -> Claim:
    return Claim("C1", "cooijmans2016", "A claim.", "section 1", list(tests))


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
    assert found.outcome.effects == pytest.approx((0.05, 0.06, 0.04)) and found.verdict == HOLDS
    assert effect_in_words(found) == "+5.0 [+2.5, +7.5] points" and found.commits == ("abc",)


def test_what_has_not_been_run_is_not_shown(tmp_path):
    put_cell(tmp_path, 0, "bn_lstm", 0.95)
    found = judged(tmp_path, BETTER)
    assert found.outcome is None and (found.verdict, verdict_in_words(found)) == (NOT_SHOWN, "not run")
    put_cell(tmp_path, 0, "lstm", 0.90)
    assert verdict_in_words(judged(tmp_path, BETTER)) == "not shown (n=1, agrees)"
    assert effect_in_words(judged(tmp_path, BETTER)) == "+5.0 points"


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


def test_the_paper_s_data_and_length_decide_and_lesser_evidence_judges_in_part():
    shorter, other = {"scope": "shorter", "updates": 10}, {"scope": "other data"}
    assert claim(a_test(HOLDS), a_test(CONTRADICTED, **shorter)).verdict == HOLDS
    assert claim(a_test(CONTRADICTED), a_test(HOLDS, **shorter)).verdict == CONTRADICTED
    assert claim(a_test(None), a_test(HOLDS, **shorter)).verdict == IN_PART
    assert claim(a_test(NOT_SHOWN), a_test(HOLDS, **shorter)).verdict == IN_PART
    assert claim(a_test(None), a_test(CONTRADICTED, **other)).verdict == CONTRADICTED_IN_PART
    assert claim(a_test(None), a_test(NOT_SHOWN, **shorter), a_test(HOLDS, **other)).verdict == IN_PART
    assert claim(a_test(None), a_test(None, **shorter)).verdict == NOT_SHOWN
    assert claim(a_test(HOLDS), a_test(None)).verdict == IN_PART  # a claim of two parts


def test_of_shorter_runs_the_longest_that_show_something_count():
    long, short = {"scope": "shorter", "updates": 30000}, {"scope": "shorter", "updates": 2500}
    assert claim(a_test(CONTRADICTED, **short), a_test(HOLDS, **long)).verdict == IN_PART
    rests = claim(a_test(HOLDS, **short), a_test(NOT_SHOWN, **long))
    assert rests.verdict == IN_PART and rests_on(rests) == "paper's data, shorter, 2,500 updates, n=3"


def test_a_test_that_was_replaced_is_shown_and_does_not_count():
    both = claim(a_test(CONTRADICTED, replaced="a better one"), a_test(HOLDS))
    assert both.verdict == HOLDS and "replaced: a better one" in render([both], [])


def test_the_page_lists_what_was_not_run_with_its_cost():
    cells = expand([f"experiment={TABLE}", "data=pmnist", "seed=0,1"])
    planned = [(cell, 2.5) for cell in cells]  # lstm, which the test needs, and bn_lstm, two seeds each
    text = render([claim(a_test(HOLDS), a_test(None, where={"data": "pmnist"}, than={"model": "rnn"}))], planned)
    missing = text.split("## Tests that have not been run")[1]
    assert "| C1 | paper | `diverges`" in missing and "| 5.0 |" in missing and "in 3 of 3 pairs" not in missing
    assert "| not in the campaign |" in render([claim(a_test(None, where={"data": "smnist"}))], planned)


def test_the_cost_of_a_test_counts_each_missing_run_once_with_its_shortest_length():
    def planned(hours, *arguments):
        return [(cell, hours) for cell in expand([f"experiment={TABLE}", "data=pmnist", *arguments])]

    model = {"of": {"model": "bn_lstm"}, "than": {"model": "lstm"}, "where": {"data": "pmnist"}}
    given = a_test(None, **model, scope="shorter", updates=2500)
    runs = planned(1.0, "seed=0,1", "budget.updates=2500") + planned(8.0, "seed=0,2", "budget.updates=30000")
    assert hours_of(given, runs) == 1 + 1 + 1 + 1 + 8 + 8  # two models; seed 2 has only long runs
    half = dataclasses.replace(given, seeds=(frozenset({"0", "2"}), frozenset()))  # BN-LSTM has runs of seeds 0 and 2
    assert hours_of(half, runs) == 1 + 1 + 1 + 8


def test_a_cell_serves_a_test_if_it_is_chosen_and_long_enough():
    def hours(key, arguments, **test):
        given = a_test(None, **test)
        return sum(serves(cell, given) for cell in expand([f"experiment={key}", *arguments]))

    model = {"of": {"model": "bn_lstm"}, "than": {"model": "lstm"}, "where": {"data": "pmnist"}}
    arguments = ["data=pmnist", "seed=0"]
    assert hours(TABLE, arguments, **model) == 2
    assert hours(TABLE, arguments, **model, experiment="table2") == 0
    shorter = [*arguments, "budget.updates=30000"]
    assert hours(TABLE, shorter, **model) == 0  # the paper's length is needed
    assert hours(TABLE, shorter, **model, scope="shorter", updates=30000) == 2
    assert hours(TABLE, shorter, **model, scope="shorter", updates=30001) == 0
    by_epoch = ["seed=0", "budget.epochs=13"]
    language = {"of": {"model": "bn_lstm"}, "than": {"model": "lstm"}, "experiment": "table2"}
    assert hours("cooijmans2016/table2", by_epoch, **language) == 0
    assert hours("cooijmans2016/table2", by_epoch, **language, scope="shorter", updates=10283) == 2
    analysis = {"rule": "property", "analysis": "fig3b", "experiment": None}
    assert hours("cooijmans2016/table2", ["seed=0"], **analysis) == 2


def test_a_ratio_of_updates_is_a_bound_if_one_side_never_got_there_and_has_an_interval_if_pairs_differ():
    test = {"rule": "reaches_first", "scope": "paper"}

    def words(effects, *marks):
        return effect_in_words(JudgedTest("C1", "cooijmans2016", test, Outcome(effects, marks=marks)))

    half, third = 0.6931, 1.0986
    assert words((half, third)) == "in 0.41 [0.03, 5.37] of the updates"
    assert words((half, half)) == "in 0.50 of the updates"
    assert words((half, half), rules.NEVER["than"]) == "in at most 0.50 of the updates"
    assert words((half, half), rules.NEVER["of"]) == "in at least 0.50 of the updates"
    assert words((half, half), *rules.NEVER.values()) == "in 0.50 of the updates"


def test_the_page_says_what_each_claim_rests_on():
    text = render_overview([claim(a_test(HOLDS), a_test(None)), claim(a_test(None))])
    assert "paper's data and length, n=3; 1 of its tests not run | in 3 of 3 pairs | [table1](cooijmans2016/" in text
    assert "| **not shown** | not run | – | – |" in text


def test_a_claim_names_the_length_of_its_runs_or_the_number_of_updates_at_which_they_are_compared(tmp_path):
    records = [{"update": update, "valid/accuracy": 0.9} for update in (50, 100)]
    for seed in range(3):
        for model in ("bn_lstm", "lstm"):
            cell = {"data": "pmnist", "model": model, "seed": str(seed)}
            put(tmp_path, TABLE, cell, {"test/accuracy": 0.9}, records)
    whole = {**BETTER, "scope": "other data"}
    assert rests_on(claim(judged(tmp_path, whole))) == "other data, 100 updates, n=3"
    cut = {**whole, "metric": "valid/accuracy", "updates": 50}
    assert rests_on(claim(judged(tmp_path, cut))) == "other data, 50 updates, n=3"


def test_the_short_table_has_a_line_for_each_claim_with_runs_and_one_line_for_the_others():
    run, left = claim(a_test(HOLDS)), dataclasses.replace(claim(a_test(None)), name="C2")
    table, others = render_short([run, left, dataclasses.replace(left, name="C3")]).split("\n\n")
    assert table.splitlines()[2:] == [f"| C1 | {run.says} | **holds** | paper's data and length, n=3 |"]
    assert others == "Not run yet: C2, C3.\n"
    assert "Not run yet" not in render_short([run])


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
    expected = [[f"C{k}" for k in range(1, 21)], [f"L{k}" for k in range(1, 7)], [f"Z{k}" for k in range(1, 5)]]
    assert [list(claims) for claims in files] == expected
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
             "settles_first": "share", "less_stable": "factor", "larger_rate": "key",
             "learns_at_larger_rate": "level"}  # fmt: skip
    assert needs.get(test["rule"], "rule") in test and (test["scope"] != "shorter" or "updates" in test)
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
    assert rule_history.has_history()
    for cached in (rule_history.rule_commit, rule_history._history, rule_history._git):
        cached.cache_clear()
