"""The source of the site: plots have the numbers of the tables, pages say what applies and what is missing."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from bnrnn.config import ROOT
from bnrnn.report.claim_types import Claim
from bnrnn.report.claims import entries, table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.outcome import JudgedTest, Outcome
from bnrnn.report.site import api, claims_table, curves, experiment, front, parts, run_pages, source
from bnrnn.report.style import looks_of
from bnrnn.report.verdicts import JudgedClaim
from bnrnn.system.files import write_text
from tests.report.claim_files import claim_test
from tests.report.test_runs import CELL, WORDS, change, put, train_records

RECORDS = [*train_records(5.0, 4.0, 3.0, 2.0, 2.0), {"update": 100, "seconds": 7200.0, "valid/ppl": 150.0}]


@pytest.fixture
def runs(tmp_path):
    for seed in ("0", "1"):
        put(tmp_path, WORDS, {**CELL, "seed": seed}, {"valid/ppl": 150.0}, RECORDS)
    return Evidence(tmp_path).runs(WORDS)


def test_lines_have_the_series_of_the_tables(runs):
    plot = curves.of_experiment(table_of(WORDS), runs, {run.folder: f"{run.seed}.html" for run in runs})
    for metric in ("valid/ppl", "train/loss", "train/ppl"):
        series = runs[0].series(metric)
        lines = [line for line in plot.lines if line.metric == metric]
        assert series
        assert [(line.member, line.page) for line in lines] == [("0", "0.html"), ("1", "1.html")]
        assert lines[0].x[curves.UPDATES] == list(series)
        assert lines[0].y == pytest.approx(list(series.values()), rel=1e-5)
    assert plot.metrics["train/ppl"] == "training perplexity per word"


def test_epochs_are_an_axis_where_their_length_was_recorded(tmp_path):
    put(tmp_path, "cooijmans2016/table1", {"model": "lstm", "seed": "0", "data": "pmnist"}, {"test/accuracy": 0.9},
        [{"update": 10, "valid/accuracy": 0.5}])  # fmt: skip
    path = next(tmp_path.rglob("result.json"))
    for length, expected in ((None, None), (4, [2.5])):
        change(path, {"updates_per_epoch": length})
        (run,) = Evidence(tmp_path).runs("cooijmans2016/table1")
        assert curves.line_of(run, "valid/accuracy", {10: 0.5}, "", "").x.get(curves.EPOCHS) == expected


def test_the_papers_points_are_those_of_the_claims():
    plot = curves.of_experiment(table_of("cooijmans2016/table1"), [], {})
    assert plot.lines == []
    points = table_of("cooijmans2016/table1").curves[0].points["bn_lstm"]["pmnist"]
    drawn = next(line for line in plot.points if line.row == "BN-LSTM" and "permuted" in line.panel)
    assert dict(zip(drawn.x[curves.UPDATES], drawn.y, strict=True)) == points


def test_a_run_that_diverged_at_once_stays_in_the_legend(tmp_path):
    put(tmp_path, WORDS, CELL, {}, [{"update": 10, "seconds": 1.0, "train/loss": None}])
    change(next(tmp_path.rglob("result.json")), {"status": "diverged"})
    plot = curves.of_experiment(table_of(WORDS), Evidence(tmp_path).runs(WORDS), {})
    assert [(line.y, line.diverged) for line in plot.lines if line.metric == "valid/ppl"] == [([], True)]


def test_a_script_of_a_plot_has_no_value_that_is_not_finite(tmp_path):
    values = [curves.shortened(value) for value in (1.23456789, math.inf, math.nan, None)]
    curves.write(curves.Plot(["x"], {"": "y"}, [curves.Line("a", {"x": [1, 2, 3, 4]}, values)]), tmp_path / "a.js")
    text = (tmp_path / "a.js").read_text()
    stored = json.loads(text.removeprefix("window.bnrnnPlot = ").rstrip(";\n"))
    assert stored["lines"][0]["y"] == [1.23457, None, None, None]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.key)
def test_deviations_of_an_entry_are_in_the_notes(entry):
    listed = list(entry.deviations)
    assert listed or entry.key == "cooijmans2016/fig1b"
    assert len(set(listed)) == len(listed)
    assert re.findall(r"^\| ([A-Z]\d+) \|", experiment.deviations(entry), re.MULTILINE) == listed


def test_missing_runs_have_their_cost(runs, tmp_path):
    text = experiment.missing(table_of(WORDS), Evidence(tmp_path))
    assert "16 of 18 runs of the paper's length are missing." in text
    row = next(line for line in text.splitlines() if "`model=input_bn_lstm` `setting=small`" in line)
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["2", "100", "2.0"]


def test_a_run_page_says_how_to_train_it_again(runs, tmp_path):
    table, evidence = table_of(WORDS), Evidence(tmp_path)
    values = run_pages.context(table, runs[0], evidence)
    own = "model=input_bn_lstm seed=0 setting=small"
    assert values["command"] == f"python -m bnrnn.train experiment={WORDS} budget=paper {own} out_dir=results"
    assert parts.page_of(runs[0], evidence) == f"runs/{WORDS}/paper/model-input_bn_lstm-seed-0-setting-small"
    assert "hidden_size" in values["config"]
    assert values["facts_of_run"]["finished on"] == "not recorded"
    dated = dataclasses.replace(runs[0], result=dataclasses.replace(runs[0].result, date="2026-11-24"))
    assert run_pages.context(table, dated, evidence)["facts_of_run"]["finished on"] == "2026-11-24"


def test_the_provenance_of_an_analysis_has_its_date_if_it_was_recorded():
    result = {"commit": "abc", "environment": {"device": "cpu"}}
    assert "| date | `not recorded` |" in parts.provenance_of(result)
    assert "| date | `2026-11-24` |" in parts.provenance_of({"date": "2026-11-24", **result})


def test_a_gamma_has_one_color_in_the_figure_and_in_the_interactive_plot():
    table = table_of("cooijmans2016/fig6_pmnist")
    plot = curves.of_experiment(table, [], {})
    assert list(plot.colors) == [f"initial gamma {gamma}" for gamma in table.row_names]
    assert list(plot.colors.values()) == [look.color for look in looks_of(table.row_names)]
    models = curves.of_experiment(table_of("cooijmans2016/table1"), [], {})
    assert not models.colors
    assert "plot.colors[row] ||" in (ROOT / "docs/site/static/curves.js").read_text()


def test_a_figure_with_many_panels_is_a_link_below_the_interactive_plot():
    text = experiment.render_page(table_of("cooijmans2016/table1"), Evidence(ROOT / "results"), has_plot=True)
    assert "![" not in text
    assert text.index("## Interactive plot") < text.index("(fig2.")
    text = experiment.render_page(table_of("cooijmans2016/fig6_pmnist"), Evidence(ROOT / "results"), has_plot=True)
    assert text.index("![") < text.index("## Interactive plot")
    assert "| initial gamma |" in text and "model.layer.gamma_init |" not in text


def test_figures_are_vector_graphics_if_there_are_any(tmp_path):
    for name in ("a.png", "b.png", "b.svg"):
        (tmp_path / name).touch()
    assert experiment.with_figures("![A](a.png)\n![B](b.png)\n![C](c.png)", tmp_path) == "![A](a.png)\n![B](b.svg)\n"


def test_figures_stand_where_the_pages_that_show_them_stand(tmp_path, monkeypatch):
    results = tmp_path / "evidence"
    for name in ("cooijmans2016/table1.png", "cooijmans2016/table1.svg", "cooijmans2016/table1.md"):
        write_text(results / name, "a figure")
    monkeypatch.setattr(source, "rendered", lambda *_: "the first page")
    for name in ("copy_documents", "entries", "papers", "write_claims"):
        monkeypatch.setattr(source, name, lambda *_: [])
    source.write(tmp_path / "site", Evidence(results), [])
    copied = sorted(path.name for path in (tmp_path / "site/results/cooijmans2016").iterdir())
    assert copied == ["table1.png", "table1.svg"]


class Rows(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict] = []

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append(dict(attrs))


def test_a_claim_has_a_row_with_what_it_is_filtered_by():
    sides = {"where": {"data": "pmnist"}, "of": {"model": "lstm"}, "than": {"model": "bn_lstm"}}
    test = claim_test({"scope": "shorter", "rule": "diverges", "experiment": "table1", "updates": 500, **sides})
    judged = JudgedTest(test, Outcome((1.0, 1.0, 1.0), unanimous=True), ("abc",))
    claims = [
        JudgedClaim(Claim("C1", "cooijmans2016", "a < b", "section 1", (test,)), (judged,)),
        JudgedClaim(Claim("L2", "laurent2015", "says", "section 2", ()), ()),
    ]
    html, parser = claims_table.claims_table(claims), Rows()
    parser.feed(html)
    assert parser.rows[1:] == [
        {"data-paper": "Cooijmans et al. 2016", "data-length": "not run", "data-early": "agrees"},
        {"data-paper": "Laurent et al. 2015", "data-length": "not run", "data-early": "–"},
    ]
    assert "a &lt; b" in html
    assert 'href="cooijmans2016/table1.html">Table 1</a>' in html
    assert "in 3 of 3 pairs" in html


def test_a_filter_offers_every_value():
    html = parts.filtered_table(
        "t", ["a"], [({"kind": value}, "<tr></tr>") for value in ("y", "x", "y", "<z>")], ["kind"]
    )
    assert re.findall(r'<option value="(.*?)">', html) == ["", "&lt;z&gt;", "x", "y"]


def test_the_front_page_has_the_figure_the_install_lines_the_layer_and_the_numbers_of_the_readme():
    readme, text = (ROOT / "README.md").read_text(), front.render("navigation")
    assert re.findall(r"^!\[.*?\]\((.*?)\)", text, re.MULTILINE) == ["results/cooijmans2016/fig2_pmnist.png"]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "pip install ." in text and "bnrnn.LSTM(" in code
    assert text.startswith("# bnrnn\n") and text.endswith("navigation")
    for key in ("facts", "bench/cpu-quick"):
        sentences = re.search(rf"<!-- begin {key} -->\n(.*)\n", readme)
        assert sentences and sentences[1] in text
    assert "actions/workflows/ci.yaml/badge.svg" in readme and "badge.svg" not in text


def test_verdicts_in_bold_are_colored():
    text = parts.colored("**agrees** (n=3), **differs by part**, **a**")
    assert text == (
        '<span class="verdict agrees">agrees</span> (n=3), '
        '<span class="verdict differs-by-part">differs by part</span>, **a**'
    )


def test_the_reference_has_every_module_of_the_layers():
    found = set(re.findall(r"automodule:: (\S+)", api.pages()["api/bnrnn.layers"]))
    files = (ROOT / "bnrnn" / "layers").glob("*.py")
    assert found == {f"bnrnn.layers.{path.stem}" for path in files if path.stem != "__init__"}
