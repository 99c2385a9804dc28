"""A claims.yaml that no program would understand is refused with file and line, and evidence is read once."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.report import evidence, pages, tables
from bnrnn.report.claim_tests import as_override, claims_of, same
from bnrnn.report.claim_types import Side
from bnrnn.report.claims import read_paper, table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.judging import is_chosen, judge, judge_claims
from bnrnn.report.site import curves
from bnrnn.report.tables import render
from bnrnn.training.results import Result
from tests.report.claim_files import claim_test
from tests.report.test_runs import CELL, WORDS, put

TABLE = "cooijmans2016/table1"
GOOD = """\
paper: Cooijmans et al. 2016, Recurrent Batch Normalization
needs:
  fig2: [table1]
table1:
  title: Table 1
  rows: model
  cols: data
  paper_updates: 100000
  published:
    - {what: accuracy, metric: test/accuracy, digits: 2, tolerance: 0.5, cells: {lstm: {pmnist: 90.2}}}
  curves:
    - {figure: fig2, title: Fig. 2, metric: valid/accuracy, reach: {pmnist: [0.5, 1]}}
fig3b: {title: Fig. 3b, analysis: fig3b.py, models: cooijmans2016/table2, numbers: {anything: 1}}
claims:
  C1:
    says: BN-LSTM is better.
    where: Table 1
    tests:
      - {scope: shorter, updates: 2500, rule: ends_better, experiment: table1, metric: test/accuracy,
         margin: 0.01, where: {data: pmnist}, of: {model: bn_lstm}, than: {model: lstm}}
      - {scope: paper, rule: property, analysis: fig3b, property: longer_is_no_worse}
"""


def read(folder: Path, text: str, points: dict | None = None):
    """The paper and the claims of a text, as if it were that of Cooijmans et al., whose recipes it may name."""
    path = folder / "cooijmans2016/claims.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.with_name("points.json").write_text(json.dumps(points or {}))
    read_paper.cache_clear()
    paper = read_paper(path)
    return paper, claims_of(paper)


def test_a_file_of_claims_becomes_types(tmp_path):
    points = {"fig2": {"lstm": {"pmnist": [[500, 0.1], [1000, 0.2]]}}}
    paper, claims = read(tmp_path, GOOD, points)
    table, (first, second) = paper.entries["table1"], claims["C1"].tests
    assert table.curves[0].points == {"lstm": {"pmnist": {500: 0.1, 1000: 0.2}}} and table.paper_updates == 100_000
    assert [side.overrides for side in first.sides] == [{"data": "pmnist", "model": m} for m in ("bn_lstm", "lstm")]
    assert first.parameters == {"margin": 0.01} and first.sides[0].metrics == ("test/accuracy",)
    assert (second.key, second.property_name) == ("cooijmans2016/fig3b", "longer_is_no_worse")
    without = re.sub(r"  curves:\n.*\n", "", GOOD)
    assert read(tmp_path, without)[0].entries["table1"].curves == ()


def test_an_entry_without_curves_has_a_page_and_no_figure(tmp_path, monkeypatch):
    table = dataclasses.replace(table_of(TABLE), curves=())
    for module in (pages, evidence, tables):
        monkeypatch.setattr(module, "table_of", lambda key: table)
    put(tmp_path, TABLE, {"data": "pmnist", "model": "lstm", "seed": "0"}, {"test/accuracy": 0.9})
    assert "![" not in render(TABLE, Evidence(tmp_path)) and pages.draw(TABLE, Evidence(tmp_path)) == []
    assert curves.of_experiment(table, [], {}) is None


@pytest.mark.parametrize(("found", "changed", "line", "message"), [
    ("updates: 2500", "updatess: 2500", 19, "the key updatess is unknown, expected one of "),
    (", of: {model: bn_lstm}", ", of: {modle: bn_lstm}", 20, "modle is bn_lstm, expected an option of cooijmans2016"),
    (", of: {model: bn_lstm}", ", of: {model: bn_lsmt}", 20, "model is bn_lsmt, expected one of lstm, bn_lstm"),
    ("where: {data: pmnist}, ", "", 20, "the side leaves data open, expected one of smnist, pmnist"),
    ("         margin: 0.01, ", " " * 9, 19, "margin is missing, expected a key margin, which the rule ends_better"),
    ("margin: 0.01", "margin: much", 20, 'margin is "much", expected a whole number or a number'),
    ("margin: 0.01", "margin: 0.01, level: 2", 20, "the key level is unknown"),
    ("ends_better", "wins", 19, "claim C1 has the rule wins, expected one of ends_better, ends_better_in_all"),
    ("metric: test/accuracy,\n", "\n", 19, "metric is missing, expected a key metric"),
    ("experiment: table1, metric: test/acc", "experiment: table1, metric: test/ac", 19, "metric is test/accuracy"[:14]),
    ("experiment: table1", "experiment: tabel1", 19, "experiment is tabel1, expected one of table1"),
    ("scope: shorter", "scope: short", 19, 'scope is "short", expected paper or shorter or other data'),
    ("scope: shorter, updates: 2500", "scope: shorter", 19, "the scope is shorter, expected updates here and paper_up"),
    ("scope: shorter", "scope: other data", 19, "the scope is other data, expected in_place_of in table1"),
    (", than: {model: lstm}", "", 19, "than is missing, expected a key than"),
    ("than: {model: lstm}}", "than: {model: lstm}, best_of: model}", 20, "best_of is model, expected a key for which"),
    ("analysis: fig3b, ", "analysis: table1, ", 21, "analysis is table1, expected one of fig3b"),
    ("says: BN-LSTM is better.", "sais: x", 16, "the key sais is unknown, expected one of "),
    ("    where: Table 1\n", "", 16, "where is missing, expected a key where with text"),
    ("digits: 2, ", "", 10, "digits is missing, expected a key digits with a whole number"),
    ("digits: 2", "digits: 2.5", 10, "digits is 2.5, expected a whole number"),
    ("digits: 2", "digits: 2, digits: 3", 10, "digits stands here twice, expected each key once"),
    ("digits: 2", "digits: 2, best: least", 10, 'best is "least", expected max or min'),
    ("cells: {lstm:", "cells: {lstmm:", 9, "published has the row lstmm, expected one of the grid: lstm, bn_lstm"),
    ("lstm: {pmnist:", "lstm: {pmnits:", 9, "published has the column pmnits, expected one of the grid: "),
    ("reach: {pmnist", "reach: {mnist", 11, "curves has the column mnist, expected one of the grid: "),
    ("  cols: data\n", "  cols: data\n  enough_updates: 100001\n", 8,
     "enough_updates is 100001, expected at most paper_updates"),
    ("  paper_updates: 100000\n", "  enough_updates: 9\n", 8, "enough_updates is 9, expected at most paper_updates"),
    ("rows: model", "rows: modle", 6, "rows is modle, expected an option of the grid: model, data, seed"),
    ("valid/accuracy", "valid/acuracy", 12, "metric is valid/acuracy, expected <split>/<metric>"),
    ("curves:\n", "curves: [5]\n  x:\n", 11, "curves is [5], expected a list, each keys and values"),
    ("tests:\n", "tests: [5]\n    x:\n", 18, "tests is [5], expected a list, each keys and values"),
    ("fig2: [table1]", "fig2: [tabel1]", 3, "fig2 needs tabel1, expected one of table1, fig3b"),
    ("table1:\n", "tabel1:\n", 5, "experiment=cooijmans2016/tabel1 is unknown: "),
    ("  cols: data\n", "  cols: data\n  borrows: {lstmm: {experiment: cooijmans2016/table2}}\n", 8,
     "borrows has the row lstmm, expected one of the grid"),
    ("  cols: data\n", "  cols: data\n  borrows: {lstm: {data: pmnist}}\n", 8, "lstm names no experiment, expected"),
    ("  cols: data\n", "  cols: data\n  search: {figure: f, title: t, x: optim.lr, metric: valid/loss, published: "
     "{gru: {}}}\n", 8, "search has the row gru, expected one of the grid"),
    ("  cols: data\n", "  cols: data\n  cited: [{model: m, what: w, values: {mnist: 1}}]\n", 8,
     "cited has the column mnist, expected one of the grid"),
    ("rule: ends_better", "order: [], rule: ends_better", 19, "the key order is unknown"),
    ("rule: ends_better", "rule: ranking", 20, "the key margin is unknown"),
    ("numbers: {", "numbers: [", 13, "did not find expected ',' or ']'"),
    ("numbers: {", "nubers: {", 13, "the key nubers is unknown"),
])  # fmt: skip
def test_what_no_program_would_understand_is_refused_with_its_line(tmp_path, found, changed, line, message):
    assert found in GOOD
    with pytest.raises(BnrnnError) as error:
        read(tmp_path, GOOD.replace(found, changed, 1))
    place = f"{tmp_path / 'cooijmans2016/claims.yaml'}, line {line}: "
    assert str(error.value).startswith(place + message), str(error.value)
    assert str(error.value).endswith(": correct it, or restore the file with git")


@pytest.mark.parametrize(("points", "message"), [
    ({"fig9": {}}, "points.json has points of fig9, which is no figure"),
    ({"fig2": {"gru": {}}}, "curves has the row gru, expected one of the grid"),
    ({"fig2": {"lstm": {"mnist": []}}}, "curves has the column mnist, expected one of the grid"),
    ({"fig2": 5}, "points.json is not a file of points"),
])  # fmt: skip
def test_points_belong_to_a_figure_and_to_cells(tmp_path, points, message):
    with pytest.raises(BnrnnError, match=message):
        read(tmp_path, GOOD, points)


@pytest.mark.parametrize(
    "text", ["", "5", "[a]", "paper: [", "paper: 5\n", GOOD.replace("table1:\n", "table1: 5\nx:\n")]
)
def test_a_file_without_sections_is_refused(tmp_path, text):
    with pytest.raises(BnrnnError, match=r"claims.yaml.*: correct it, or restore the file with git"):
        read(tmp_path, text)


def test_a_property_has_the_arguments_of_its_function():
    given = {"scope": "paper", "rule": "property", "analysis": "fig5", "property": "settles", "by": 20, "within": 0.2}
    assert judge(claim_test(given), Evidence(ROOT / "missing")).outcome is None
    for changed in ({"property": "setles"}, {"byy": 20}):
        with pytest.raises(BnrnnError, match=r"claims.yaml, line 1: the property is .*, expected a function of exper"):
            judge(claim_test({**given, **changed}), Evidence(ROOT / "missing"))


def test_a_trend_has_a_value_for_each_side():
    given = {"scope": "paper", "rule": "trend", "experiment": "fig6_pmnist", "metric": "train/loss", "at": [0.3, 1],
             "sides": [{"model.layer.gamma_init": 0.3}, {"model.layer.gamma_init": 1.0}]}  # fmt: skip
    assert claim_test(given).parameters == {"at": (0.3, 1)}
    with pytest.raises(BnrnnError, match=r"line \d+: at has 3 values, expected one for each of the 2 sides"):
        claim_test({**given, "at": [0.3, 0.5, 1]})


def test_overrides_are_compared_as_hydra_writes_them():
    assert [as_override(value) for value in (True, False, None, 0.5, 1, "lstm")] == [
        "true", "false", "null", "0.5", "1", "lstm"
    ]  # fmt: skip
    assert same("0.10", "0.1") and same("true", as_override(True)) and same("null", as_override(None))
    assert not same("null", "0") and not same("true", "1")
    side = Side(TABLE, {"model": "lstm", "data": "pmnist", "model.layer.bias": as_override(None)}, (), "")
    run = {"model": "lstm", "data": "pmnist", "model.layer.bias": "null", "seed": "0", "budget.updates": "null"}
    assert is_chosen(run, side, "") and not is_chosen({**run, "model.layer.bias": "true"}, side, "")


def test_a_length_that_was_set_to_null_stops_no_page(tmp_path):
    records = [{"update": 100, "seconds": 1.0, "valid/accuracy": 0.5}]
    cell = {"data": "pmnist", "model": "lstm", "seed": "0", "budget.updates": "null"}
    put(tmp_path, TABLE, cell, {"test/accuracy": 0.9}, records)
    put(tmp_path, WORDS, CELL | {"budget.epochs": "null"}, {"valid/ppl": 90.0}, records)
    found = Evidence(tmp_path)
    for key in (TABLE, WORDS):
        (run,) = found.runs(key)
        assert curves.updates_per_epoch(run) is None and "=null" in render(key, found)
    assert judge_claims(found)


def test_every_result_is_read_once(tmp_path, monkeypatch, capsys):
    for seed in "012":
        for model in ("lstm", "bn_lstm"):
            records = [{"update": 100, "seconds": 1.0, "valid/accuracy": 0.5}]
            cell = {"data": "pmnist", "model": model, "seed": seed}
            put(tmp_path / "results", TABLE, cell, {"test/accuracy": 0.9, "valid/accuracy": 0.9}, records)
    reads = Counter[Path]()
    original = Result.read
    monkeypatch.setattr(Result, "read", lambda path: (reads.update([path]), original(path))[1])
    shared = Evidence(tmp_path / "results")
    pages.show(TABLE, shared)
    assert len(reads) == 6 and set(reads.values()) == {1}, "the page and the figures of Table 1"
    assert "Figure: file://" in capsys.readouterr().out
    pages.texts(shared)
    assert len(reads) == 6 and set(reads.values()) == {1}, "all pages, verdicts and estimates of cost"
