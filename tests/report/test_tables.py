import dataclasses
import re
import runpy
import shutil
import sys

import pytest

from bnrnn.config import ROOT, compose_config, label, sweep
from bnrnn.errors import BnrnnError
from bnrnn.report import agreement, pages, plots, style, tables
from bnrnn.report.claim_types import Quantity
from bnrnn.report.claims import entries, entry_of, in_grid, papers, table_of
from bnrnn.report.claims import tables as all_tables
from bnrnn.report.evidence import Evidence
from bnrnn.report.pages import render_index
from bnrnn.report.run import Run, order_in_words
from bnrnn.report.run_tables import render_summary
from bnrnn.training.results import Result, config_record
from tests.report.test_runs import store

KEY = "cooijmans2016/table1"
TABLE = table_of(KEY)


def result(
    budget: str = "paper", test: float = 0.99, status: str = "finished", env: dict | None = None, **overrides: str
) -> Result:
    cfg = compose_config(f"experiment={KEY}", f"budget={budget}", *(f"{k}={v}" for k, v in overrides.items()))
    record = config_record(cfg)
    overrides = dict(sorted(overrides.items()))
    metrics = {"valid/accuracy": 0.5, "test/accuracy": test} if status == "finished" else {}
    environment = {"device": "cpu", "evaluation_order": "shuffled", **(env or {})}
    return Result(KEY, overrides, status, cfg.budget.updates, 1, metrics, 10.0, 5, ["abc"], environment, record)


def curve(*points: tuple[int, float, float]) -> list[dict]:
    """The records of evaluations: update, seconds, accuracy."""
    return [{"update": u, "seconds": s, "valid/accuracy": a} for u, s, a in points]


def reach(results_dir) -> str:
    """The table of time to each level."""
    return tables.render_reach(TABLE, TABLE.curves[0], Evidence(results_dir).runs(KEY))


def published(results_dir) -> str:
    """The table of the paper's numbers and ours."""
    return tables.render_published(TABLE, TABLE.published[0], Evidence(results_dir).runs(KEY))


def row(text: str, *cells: str) -> str:
    """The only row of a table that begins with these cells."""
    (line,) = (line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |"))
    return line


def test_mean_spread_count_difference_and_verdict(tmp_path):
    for seed, accuracy in (("0", 0.951), ("1", 0.956)):
        store(tmp_path, result(test=accuracy, model="bn_lstm", data="pmnist", seed=seed))
    store(tmp_path, result(test=0.97, model="lstm", data="smnist", seed="0"))
    for seed, accuracy in (("0", 0.989), ("1", 0.990), ("2", 0.991)):
        store(tmp_path, result(test=accuracy, model="bn_lstm", data="smnist", seed=seed))
    text = published(tmp_path)
    for cell, shown in {
        ("`bn_lstm`", "`pmnist`"): "| 95.4 | 95.35 ± 0.35 (n=2 of 3) | -0.05 | within tolerance, n=2 (tolerance 0.5) |",
        ("`lstm`", "`smnist`"): "| 98.9 | 97.00 (n=1 of 3) | -1.90 | outside tolerance, n=1 (tolerance 0.5) |",
        ("`bn_lstm`", "`smnist`"): "| 99.0 | 99.00 ± 0.10 (n=3) | +0.00 | reproduced (tolerance 0.5) |",
        ("`lstm`", "`pmnist`"): "| – | – | not run |",
    }.items():
        assert row(text, *cell).endswith(shown)
    assert text.count("\n") == 2 + 6


def test_a_published_best_is_compared_with_the_best_of_the_curve(tmp_path):
    store(tmp_path, result(model="lstm", data="smnist", seed="0"), curve((500, 1.0, 0.7), (1000, 2.0, 0.6)))
    runs = Evidence(tmp_path).runs(KEY)
    for best, shown in ((None, "50.00"), ("max", "70.00"), ("min", "60.00")):
        part = dataclasses.replace(TABLE.published[0], metric="valid/accuracy", best=best)
        text = tables.render_published(TABLE, part, runs)
        assert f"| 98.9 | {shown} (n=1 of 3) |" in row(text, "`lstm`", "`smnist`")


def test_numbers_of_other_papers_are_marked_as_quoted(tmp_path):
    text = tables.render(KEY, Evidence(tmp_path))
    ours, quoted = text.split("quoted from the paper, not ours")
    assert "iRNN" not in ours
    assert row(quoted, "iRNN", "`pmnist`") == "| iRNN | `pmnist` | test accuracy (%) | 82.0 |"
    assert "quoted" not in render_index([KEY], Evidence(tmp_path))
    fig4a = tables.render("cooijmans2016/fig4a", Evidence(tmp_path))
    assert row(fig4a, "BN-e**", "`cnn_qa_top4`").endswith("| 9,000 |")


def test_short_runs_are_never_the_tables_number(tmp_path):
    store(tmp_path, result("cpu", 0.954, model="bn_lstm", data="pmnist", seed="0"),
        curve((500, 100.0, 0.5), (2500, 500.0, 0.75)))  # fmt: skip
    text = tables.render(KEY, Evidence(tmp_path))
    published, rest = text.split("equal updates")
    assert "95.40" not in published
    first = row(rest, "`bn_lstm`", "`pmnist`", "0 to 1,000")
    assert first.endswith("| 0.600 (points: 2) | 0.500 (n=1) | -0.100 |"), "the mean of .545 and .656"
    assert "0.750 (n=1)" in row(rest, "`bn_lstm`", "`pmnist`", "1,000 to 2,500")
    assert "2,500 to 5,000" not in rest.split("## All")[0], "the run has not passed this window"
    assert row(rest, "data=pmnist model=bn_lstm", "cpu", "2,500")


@pytest.mark.parametrize(("given", "best_update", "counts"), [
    ({"budget.updates": "10283"}, 9492, True),
    ({"budget.epochs": "13"}, 9492, True),
    ({"budget.updates": "10282"}, 9492, False),
    ({"budget.updates": "10283"}, 10283, False),  # a longer run would have gone on to better models
    ({"budget.updates": "10283", "budget.eval_every": "100"}, 9492, False),  # selected among other models
    ({"budget": "cpu", "budget.updates": "10283"}, 9492, False),
])  # fmt: skip
def test_a_table_may_admit_runs_of_enough_updates_whose_validation_got_worse(tmp_path, given, best_update, counts):
    key, cell = "cooijmans2016/table2", {"data": "ptb_char", "model": "lstm", "seed": "0"}
    record = config_record(compose_config(f"experiment={key}", *(f"{k}={v}" for k, v in (given | cell).items())))
    updates = int(given.get("budget.updates", 10283))
    overrides = {k: v for k, v in sorted((given | cell).items()) if k != "budget"}
    store(tmp_path, Result(key, overrides, "finished", updates, best_update, {"test/bpc_one_sequence": 1.379}, 10.0, 5,
                           ["abc"], {"device": "cpu"}, record))  # fmt: skip
    (run,) = Evidence(tmp_path).runs(key)
    table = table_of(key)
    text = tables.render_published(table, table.published[0], [run])
    shown = "| -0.001 | within tolerance, n=1 (tolerance 0.01), 10,283 of 39,550 updates |"
    assert ((shown in text), ("Not run yet" in text)) == (counts, not counts)
    assert bool(agreement.published(run)) == counts
    if counts:  # the same run with the paper's length replaces it
        config = {**record, "budget": record["budget"] | {"updates": None, "epochs": 50}}
        longer = Result(key, cell, "finished", 39550, 20000, {"test/bpc_one_sequence": 1.35}, 9.0, 5, ["abc"],
                        {"device": "cpu"}, config)  # fmt: skip
        store(tmp_path, longer)
        both = tables.render_published(table, table.published[0], Evidence(tmp_path).runs(key))
        assert "| -0.030 | outside tolerance, n=1 (tolerance 0.01) |" in both
    of_whole_runs = dataclasses.replace(table, enough_updates=None)
    assert "Not run yet" in tables.render_published(of_whole_runs, table.published[0], [run])


def test_a_result_of_another_recipe_is_stale(tmp_path):
    old = result(model="lstm", data="smnist", seed="0")
    store(tmp_path, dataclasses.replace(old, config=old.config | {"batch_size": 7}), curve((500, 100.0, 0.9)))
    assert reach(tmp_path) == "No run has reached one of these levels.\n"
    store(tmp_path, result(model="lstm", data="smnist", seed="1"))  # the mean would mix two recipes
    text = published(tmp_path)
    assert row(text, "`lstm`", "`smnist`").endswith("| – | – | stale: the recipe has changed since |")


def test_a_diverged_run_has_no_number(tmp_path):
    store(tmp_path, result(status="diverged", model="lstm", data="smnist", seed="0"))
    text = tables.render(KEY, Evidence(tmp_path))
    assert row(text, "`lstm`", "`smnist`").endswith("| – | – | 1 of 1 diverged |")
    assert "1 diverged" in text.split("## All")[1]


def test_of_two_lengths_of_one_run_the_longer_gives_the_curve_and_the_time(tmp_path):
    for budget, seconds, accuracy in (("cpu", 100.0, 0.6), ("paper", 90.0, 0.65)):
        store(tmp_path, result(budget, model="bn_lstm", data="pmnist", seed="0"), curve((1000, seconds, accuracy)))
    text = tables.render(KEY, Evidence(tmp_path))
    assert "0.650 (n=1)" in row(text, "`bn_lstm`", "`pmnist`", "0 to 1,000")
    assert row(text, "`pmnist`", "reference on cpu", "0.5").endswith("| not run | 90 (n=1) |")


def test_the_papers_curves_have_the_points_that_were_read_off_before():
    """Values of the figures that were read off twice, by different programs (update: value)."""
    read = {
        ("table1", "lstm", "smnist"): {500: 0.137, 20000: 0.429, 100000: 0.988},
        ("table1", "lstm", "pmnist"): {500: 0.326, 10000: 0.776, 100000: 0.902},
        ("table1", "bn_lstm", "smnist"): {500: 0.639, 20000: 0.979, 100000: 0.989},
        ("table1", "bn_lstm", "pmnist"): {500: 0.545, 10000: 0.894, 100000: 0.944},
        ("table2", "lstm", "ptb_char"): {791: 2.223, 10283: 1.486},
        ("table2", "bn_lstm", "ptb_char"): {791: 1.674, 7910: 1.470},
        ("fig4a", "bn_e_star_star", "cnn_qa_top4"): {10000: 0.558, 67000: 0.440},
        ("table4", "bn_e_star_star_full", "cnn_qa"): {1000: 0.681, 67000: 0.391},
        ("fig6_pmnist", "0.1", "pmnist"): {2500: 0.71, 50000: 0.111},
        ("fig6_ptb", "1.0", "ptb_char"): {12656: 0.841},
    }
    for (table, row_name, col), points in read.items():
        curve = table_of(f"cooijmans2016/{table}").curves[0]
        found = curve.points[row_name][col]
        assert {u: found[u] for u in points} == pytest.approx(points, abs=0.005), (table, row_name)
        assert list(curve.windows) == sorted(set(curve.windows))
    assert all(levels[0] > 0 and levels[-1] < 1 and list(levels) == sorted(set(levels))
               for levels in TABLE.curves[0].reach.values())  # fmt: skip
    counts = [len(TABLE.curves[0].points[m][d]) for m in ("lstm", "bn_lstm") for d in ("smnist", "pmnist")]
    assert min(counts) >= 190, "about one point for each of 200 epochs"


def test_a_row_shows_the_runs_that_it_borrows(tmp_path):
    """Gamma 0.1 of Fig. 6 is the BN-LSTM of Table 1."""
    store(tmp_path, result("cpu", model="bn_lstm", data="pmnist", seed="0"), curve((500, 1.0, 0.5)))
    store(tmp_path, result("cpu", model="bn_lstm", data="smnist", seed="0"), curve((500, 1.0, 0.5)))
    store(tmp_path, result("cpu", model="lstm", data="pmnist", seed="0"), curve((500, 1.0, 0.5)))
    (run,) = Evidence(tmp_path).shown("cooijmans2016/fig6_pmnist")
    assert run.overrides == {"data": "pmnist", "model": "bn_lstm", "seed": "0", "model.layer.gamma_init": "0.1"}
    assert in_grid("cooijmans2016/fig6_pmnist", run.overrides) and not run.stale
    assert len(Evidence(tmp_path).shown(KEY)) == 3, "Table 1 borrows none"


def test_time_to_accuracy_is_the_first_evaluation_that_has_it(tmp_path):
    store(tmp_path, result("cpu", model="lstm", data="pmnist", seed="0"),
        [{"update": 10, "seconds": 2.0, "train/loss": 2.3}, *curve((500, 100.0, 0.49), (1000, 210.5, 0.5)),
         *curve((1500, 300.0, 0.4), (2000, 400.0, 0.7))])  # fmt: skip
    store(tmp_path, result("cpu", model="bn_lstm", data="pmnist", seed="0"), curve((500, 1400.0, 0.76)))
    text, engine = reach(tmp_path), "reference on cpu"
    assert row(text, "`pmnist`", engine, "0.5").endswith("| 1,000 (n=1) | 500 (n=1) | 210 (n=1) | 1,400 (n=1) |")
    assert row(text, "`pmnist`", engine, "0.6").endswith("| 2,000 (n=1) | 500 (n=1) | 400 (n=1) | 1,400 (n=1) |")
    assert row(text, "`pmnist`", engine, "0.75").endswith("| – (n=0 of 1) | 500 (n=1) | – (n=0 of 1) | 1,400 (n=1) |")
    assert text.count("| `pmnist` |") == 3, "no line for what nobody reached"
    assert "`lstm`, updates in steps of 500 | `bn_lstm`, updates in steps of 500 | `lstm`, seconds" in text


def test_an_interval_of_evaluation_that_no_run_shows_is_not_named(tmp_path, monkeypatch):
    """A run by epochs has its interval from its first evaluation; one without an evaluation has none."""
    monkeypatch.setattr(Run, "stale", False)
    for seed, points in (("0", curve((500, 10.0, 0.95))), ("1", [{"update": 100, "seconds": 1.0, "train/loss": 2.0}])):
        found = result(model="lstm", data="pmnist", seed=seed)
        budget = found.config["budget"] | {"eval_every": None}
        store(tmp_path, dataclasses.replace(found, config=found.config | {"budget": budget}), points)
    assert "`lstm`, updates in steps of 500 |" in reach(tmp_path)


def test_time_to_accuracy_says_how_many_seeds_got_there(tmp_path):
    for seed, points in enumerate((curve((500, 100.0, 0.8)), curve((1000, 300.0, 0.7)), curve((1000, 310.0, 0.1)))):
        store(tmp_path, result("cpu", model="bn_lstm", data="smnist", seed=str(seed)), points)
    text = reach(tmp_path)
    seven = row(text, "`smnist`", "reference on cpu", "0.7")
    assert seven.endswith("| not run | 750 ± 354 (n=2 of 3) | not run | 200 ± 141 (n=2 of 3) |")
    assert row(text, "`smnist`", "reference on cpu", "0.8").endswith("| 500 (n=1 of 3) | not run | 100 (n=1 of 3) |")


def test_numbers_of_batch_statistics_in_the_order_of_the_file_are_marked(tmp_path):
    """Only those of a model with batch normalization whose data is shuffled now, and only those of batch statistics."""
    before = {"evaluation_order": "file"}
    for model in ("lstm", "bn_lstm"):
        store(tmp_path, result("cpu", env=before, model=model, data="pmnist", seed="0"), curve((500, 100.0, 0.5)))
    store(tmp_path, result("cpu", model="bn_lstm", data="smnist", seed="0"), curve((500, 100.0, 0.5)))
    by_cell = {(run.overrides["data"], run.overrides["model"]): run for run in Evidence(tmp_path).runs(KEY)}
    lstm, bn, shuffled = (by_cell[c] for c in (("pmnist", "lstm"), ("pmnist", "bn_lstm"), ("smnist", "bn_lstm")))
    assert (lstm.in_file_order, bn.in_file_order, shuffled.in_file_order) == (False, True, False)
    marked = row(reach(tmp_path), "`pmnist`", "reference on cpu", "0.5")
    assert marked.endswith(r"| 500 (n=1) | 500 (n=1) \* | 100 (n=1) | 100 (n=1) \* |")
    text = render_summary([bn])
    assert r"50.0 (n=1) \* | 99.0 (n=1) |" in text and r"\* evaluated in the order of the file" in text
    assert r"\*" not in render_summary([lstm, shuffled])
    assert order_in_words(bn) == "file" and order_in_words(shuffled) == "shuffled"
    pieces = [{"update": 0}, {"update": 70, "evaluation_order": "shuffled"}]
    changed = dataclasses.replace(bn, result=dataclasses.replace(shuffled.result, pieces=pieces))
    assert changed.in_file_order and order_in_words(changed) == "shuffled, in the order of the file before update 70"
    config = bn.result.config | {"data": {"_target_": "bnrnn.data.babi.BAbI", "task": 1}}
    readers = dataclasses.replace(bn, result=dataclasses.replace(bn.result, config=config))
    assert not readers.in_file_order, "their released code reads the file in order"


def test_seconds_of_engines_hardware_and_threads_are_not_averaged(tmp_path):
    h100, h200 = ({"device": "cuda", "hardware": f"NVIDIA {name}", "backend": "triton"} for name in ("H100", "H200"))
    for seed, env, seconds in (("0", {}, 1000.0), ("1", {"backend": "cpu"}, 400.0), ("2", {"num_threads": 2}, 700.0)):
        store(tmp_path, result("cpu", env=env, model="lstm", data="smnist", seed=seed), curve((500, seconds, 0.9)))
    for seed, env, seconds in (("0", h100, 20.0), ("1", h100, 30.0), ("2", h200, 10.0)):
        store(tmp_path, result("paper", env=env, model="lstm", data="smnist", seed=seed), curve((1000, seconds, 0.95)))
    text = reach(tmp_path)
    lines = {line.split(" | ")[1]: line.split(" | ")[5] for line in text.splitlines() if " | 0.9 | " in line}
    assert lines == {
        "cpu on cpu": "400 (n=1)", "reference on cpu": "1,000 (n=1)", "reference on cpu, 2 threads": "700 (n=1)",
        "triton on NVIDIA H100": "25 ± 7 (n=2)", "triton on NVIDIA H200": "10 (n=1)",
    }  # fmt: skip


def test_results_without_a_published_number_have_no_verdict(tmp_path):
    store(tmp_path, result("cpu", 0.25, model="lstm", data="smnist", seed="0"))
    store(tmp_path, result("cpu", 0.75, model="lstm", data="smnist", seed="1"))
    store(tmp_path, result("paper", 0.85, model="lstm", data="smnist", seed="1"))
    store(tmp_path, result("cpu", status="diverged", model="bn_lstm", data="smnist", seed="0"))
    stale = result("paper", 0.99, model="lstm", data="smnist", seed="2")
    store(tmp_path, dataclasses.replace(stale, config=stale.config | {"batch_size": 7}))
    table = dataclasses.replace(TABLE, measured=(Quantity("accuracy", "test/accuracy", digits=2),))
    text = tables.render_measured(table, Evidence(tmp_path).runs(KEY))
    short, long = [line for line in text.splitlines() if line.startswith("| `lstm` | `smnist` |")]
    assert short.endswith("| 0.50 ± 0.35 (n=2 of 3) |") and long.endswith("| 0.85 (n=1 of 3) |")
    assert row(text, "`bn_lstm`", "`smnist`").endswith("| diverged |")


def test_a_loss_is_reached_from_above_and_steady_near_its_own_lowest():
    run = a_run("lstm", {5: 4.0, 10: 3.04, 15: 3.0, 20: 3.5})
    assert run.reached("valid/loss", 3.2) == (10, 1.0) and run.reached("valid/loss", 2.9) is None
    assert a_run("lstm", {}).steady("valid/loss", 0.01) is None, "diverged before any evaluation"
    assert run.steady("valid/loss", 0.02) == (10, 1.0) and run.steady("valid/loss", 0.01) == (15, 1.5)


def test_the_index_has_rows_of_runs_and_one_line_for_the_cells_without(tmp_path):
    store(tmp_path, result(test=0.97, model="lstm", data="smnist", seed="0"))
    title = "**Test accuracy (%): published and ours at the paper's length**"
    assert (
        render_index([KEY], Evidence(tmp_path / "none"))
        .split(title)[1]
        .split("**")[0]
        .strip()
        .startswith("Not run (published): `lstm` on `smnist` (98.9)")
    ), "without any run, the table is this line alone"
    text = render_index([KEY], Evidence(tmp_path))
    assert row(text, "`lstm`", "`smnist`").endswith("| -1.90 | outside tolerance, n=1 (tolerance 0.5) |")
    assert "Not run (published): `bn_lstm` on `smnist` (99.0), `lstm` on `pmnist` (90.2)" in text
    page = tables.render(KEY, Evidence(tmp_path))
    assert "not run |" not in text and "not run |" in page, "the page keeps a row for every cell"
    assert "time to each level" not in text and "time to each level" in page


def test_the_index_names_every_paper_and_what_has_no_runs_at_all(tmp_path):
    text = render_index([KEY, "cooijmans2016/fig1a"], Evidence(tmp_path))
    for paper in papers():
        assert f"## {paper.title}\n" in text
    assert "### [Table 1, pixel-by-pixel MNIST](cooijmans2016/table1.md)\n" in text
    assert f"\n- [{entry_of('cooijmans2016/fig1a').title}](cooijmans2016/fig1a.md)\n" in text
    lines = [line for line in text.splitlines() if line.startswith("Tables and figures without any run: ")]
    missing = [entry.name for entry in entries() if entry.key not in (KEY, "cooijmans2016/fig1a")]
    assert [name for line in lines for name in re.findall(r"`(\w+)`", line)] == missing


def test_the_panel_of_time_shows_the_engine_that_ran_both_models(tmp_path):
    for seed in ("0", "1", "2"):
        store(tmp_path, result("cpu", env={"backend": "cpu"}, model="lstm", data="smnist", seed=seed))
    for model in ("lstm", "bn_lstm"):
        store(tmp_path, result("paper", model=model, data="smnist", seed="0"))
    engine, runs = plots.commonest_engine(Evidence(tmp_path).runs(KEY), "model")
    assert engine == "reference on cpu"
    assert [run.overrides["model"] for run in runs] == ["lstm", "bn_lstm"]


def test_the_figure_has_a_second_row_against_time(tmp_path, monkeypatch):
    for seed, minutes in (("0", 1.0), ("1", 3.0)):
        run = dataclasses.replace(result("cpu", model="lstm", data="smnist", seed=seed), seconds=240.0)
        store(tmp_path, run, curve((500, 60 * minutes, 0.2), (1000, 120 * minutes, 0.4)))
    store(
        tmp_path, result("cpu", env={"backend": "cpu"}, model="lstm", data="smnist", seed="2"), curve((500, 1.0, 0.9))
    )
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    plots.draw_curve(TABLE, TABLE.curves[0], Evidence(tmp_path), tmp_path / "fig.png")
    (figure,) = figures
    updates, time = figure.axes
    plots.plt.close(figure)
    assert (updates.get_xlabel(), time.get_xlabel()) == ("updates", "minutes of training updates, evaluation excluded")
    assert time.get_title() == "our runs, engine reference on cpu"
    (mean,) = (line for line in time.get_lines() if line.get_label() == "LSTM (n=2)")
    assert mean.get_xdata() == pytest.approx([2.0, 4.0])
    assert mean.get_ydata() == pytest.approx([0.2, 0.4])


def a_run(model: str, values: dict[int, float], metric: str = "valid/loss", status: str = "finished") -> Run:
    records = [{"update": u, "seconds": u / 10, metric: v} for u, v in values.items()]
    return Run(ROOT, {"model": model}, "paper", dataclasses.replace(result(), status=status), records)


def panel(runs: list[Run], *models: str, metric: str = "valid/loss", **options) -> plots.Axes:
    """A panel of runs, with one row for each model."""
    figure, ax = plots.plt.subplots()
    rows = {name: label("model", name) for name in models}
    plots.draw_panel(ax, runs, rows, lambda run, row: run.overrides["model"] == row, metric, {}, **options)
    plots.plt.close(figure)
    return ax


@pytest.mark.parametrize("metric", ["valid/loss", "valid/ppl"])
def test_an_exploding_loss_has_a_logarithmic_axis_that_others_determine_and_the_table_shows_its_order_of_magnitude(
    metric: str,
):
    runs = [a_run("lstm", {0: 4.0, 1: 3.0, 2: 2.0}, metric), a_run("bn_lstm", {0: 5.0, 1: 3e17, 2: 2e17}, metric)]
    ax = panel(runs, "lstm", "bn_lstm", metric=metric)
    assert ax.get_yscale() == "log" and ax.get_ylim() == pytest.approx((0.9 * 2.0, 1.1 * 1000 * 2.0))
    assert tables.spread([3e17], 1) == "3e+17 (n=1)" and tables.spread([123456.0], 1) == "123,456.0 (n=1)"


def test_a_run_that_diverged_before_its_first_evaluation_is_in_the_legend():
    runs = [a_run("lstm", {}, status="diverged"), a_run("lstm", {}, status="diverged"),
            a_run("bn_lstm", {10: 2.0, 20: 1.0}), a_run("bn_lstm", {10: 2.0}, status="diverged")]  # fmt: skip
    ax = panel(runs, "lstm", "bn_lstm", "rnn")
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    crosses = [line for line in ax.get_lines() if line.get_marker() == "X" and len(line.get_xdata())]
    assert texts == ["LSTM (n=2, 2 diverged)", "BN-LSTM (n=2, 1 diverged)"]
    assert [float(cross.get_ydata()[0]) for cross in crosses] == [0.97, 0.97, 2.0]  # at the top, or at the last point
    assert crosses[2].get_transform() == ax.transData != crosses[0].get_transform()


def test_a_run_that_did_not_measure_what_is_drawn_is_not_in_the_legend():
    ax = panel([a_run("lstm", {10: 2.0, 20: 1.0}), a_run("bn_lstm", {10: 0.5}, "train/loss")], "lstm", "bn_lstm")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["LSTM (n=1)"]


def test_a_panel_shows_the_interval_of_three_seeds_the_level_of_guessing_and_no_exaggerated_difference():
    def shown(seeds: int, updates: int) -> plots.Axes:
        values = [dict.fromkeys(range(updates), 0.12 + seed / 100) for seed in range(seeds)]
        runs = [a_run("lstm", of_seed, "valid/accuracy") for of_seed in values]
        return panel(runs, "lstm", metric="valid/accuracy", chance=0.1)

    ax = shown(3, 4)
    low, high = ax.get_ylim()
    assert high - low == pytest.approx(plots.SPAN) and low < 0.1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["LSTM (n=3)", "guessing"]
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.13 - 0.02484, 0.13 + 0.02484), abs=1e-4)  # t = 4.303, n = 3
    means = {n: next(line for line in shown(2, n).get_lines() if line.get_label() == "LSTM (n=2)") for n in (4, 40)}
    assert [line.get_marker() for line in means.values()] == ["o", "None"]


def test_no_experiment_has_more_rows_than_there_are_colors():
    for table in all_tables():
        if table.curves:
            assert len(sweep(table.key)[table.rows]) <= len(style.LOOKS), table.key


@pytest.mark.slow
def test_a_changed_result_fails_the_check_and_make_tables_updates_the_page(tmp_path, monkeypatch):
    """Uses a copy with the runs of only one table, because composing the configurations of all runs takes long."""
    shutil.copytree(ROOT / "results" / KEY, tmp_path / "results" / KEY)
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "results" / "bench", tmp_path / "results" / "bench")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "layer.md", tmp_path / "docs")
    path = next((tmp_path / "results").glob(f"{KEY}/*/*/result.json"))
    changed = Result.read(path)
    changed.metrics["test/accuracy"] = 0.123
    changed.write(path.parent)
    monkeypatch.setattr(pages, "has_history", lambda: False)
    script = runpy.run_path(str(ROOT / "scripts" / "make_tables.py"))["main"]

    def make_tables(*args: str) -> None:
        monkeypatch.setattr(sys, "argv", ["make_tables.py", "--results", str(tmp_path / "results"), *args])
        script()

    page = tmp_path / "results" / f"{KEY}.md"
    shutil.copy(ROOT / "results" / f"{KEY}.md", page)
    make_tables("--seal")
    with pytest.raises(BnrnnError, match=r"do not match the results: run `make tables`") as failed:
        make_tables("--check")
    assert str(page) in str(failed.value)
    make_tables()
    make_tables("--check")
    assert page.read_text() != (ROOT / "results" / f"{KEY}.md").read_text()
