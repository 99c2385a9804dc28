"""The figure and the sentences at the top of README.md follow from the runs."""

from dataclasses import replace

import pytest

from bnrnn.report import readme
from bnrnn.report.claims import table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.run import Run
from tests.report.test_tables import curve, result, store


@pytest.fixture
def runs(monkeypatch, tmp_path):
    def run(model: str, accuracy: float) -> Run:
        overrides = {"data": "pmnist", "model": model, "seed": "0"}
        records = [{"update": u, "valid/accuracy": accuracy if u > 10_000 else 0.2} for u in range(500, 20_001, 500)]
        return Run(tmp_path, overrides, "paper", result(**overrides), records)

    found = [run("lstm", 0.853), run("bn_lstm", 0.917)]
    monkeypatch.setattr(readme, "of_full_length", lambda _: found)
    return found


def test_the_last_window_that_a_run_has_passed_is_compared(runs, monkeypatch):
    monkeypatch.setattr(Run, "file_order_until", 0.0)
    text = readme.curve_in_words(runs)
    points = table_of(readme.KEY).curves[0].points["lstm"]["pmnist"]
    within = [value for update, value in points.items() if 15_000 < update <= 20_000]
    paper = 100 * sum(within) / len(within)
    assert f"our LSTM has 85.3 % in 1 run (the paper: {paper:.1f} %) from update 15,000 to 20,000" in text
    assert "our BN-LSTM has 91.7 % in 1 run" in text
    begun = replace(runs[0], records=runs[0].records[:30], result=replace(runs[0].result, updates=15_000))
    assert readme.curve_in_words([begun, *runs]) == readme.curve_in_words([*runs, begun]) == text


def test_the_mean_is_over_all_runs_of_a_model_that_have_passed_the_window(runs, monkeypatch):
    monkeypatch.setattr(Run, "file_order_until", property(lambda self: 17_000 * (self.overrides["seed"] == "2")))
    better = [{**record, "valid/accuracy": record["valid/accuracy"] + 0.02} for record in runs[0].records]
    second = replace(runs[0], records=better)
    in_file_order = replace(runs[0], records=better, overrides={**runs[0].overrides, "seed": "2"})
    text = readme.curve_in_words([*runs, second, in_file_order])
    assert "our LSTM has 86.3 % in 2 runs" in text and "our BN-LSTM has 91.7 % in 1 run" in text


def test_only_runs_on_the_figures_data_with_the_papers_updates_are_shown(tmp_path):
    """Runs on the other order of pixels and shorter budgets have curves of their own."""
    stored = [("paper", "pmnist", "bn_lstm"), ("paper", "pmnist", "lstm"), ("paper", "smnist", "lstm"),
              ("cpu", "pmnist", "lstm")]  # fmt: skip
    for budget, data, model in stored:
        store(tmp_path, result(budget, data=data, model=model, seed="0"), curve((500, 1.0, 0.5)))
    shown = [
        (run.overrides["model"], run.overrides["data"], run.budget) for run in readme.of_full_length(Evidence(tmp_path))
    ]
    assert shown == [("lstm", "pmnist", "paper"), ("bn_lstm", "pmnist", "paper")]


def test_evaluations_in_another_order_are_not_compared(runs, monkeypatch):
    monkeypatch.setattr(Run, "file_order_until", property(lambda self: 17_000 * (self.overrides["model"] == "bn_lstm")))
    assert "BN-LSTM" not in readme.curve_in_words(runs)


def test_the_figure_says_how_far_the_runs_are(runs, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(readme, "save", lambda figure, path: figures.append(figure))
    readme.draw(Evidence(tmp_path))
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    updates = f"{runs[0].result.updates:,} of 100,000 updates, seed 0"
    assert f"LSTM, ours: {updates}" in labels and f"BN-LSTM, ours: {updates}" in labels
    assert {"LSTM, the paper", "BN-LSTM, the paper"} <= set(labels)
