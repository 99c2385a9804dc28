"""Runs that can be continued: their curves are shown, and nothing else uses them."""

import json
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from bnrnn.report import plots, tables
from bnrnn.report.claims import table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.judging import judge_claims
from bnrnn.report.site import curves
from bnrnn.report.style import LOOKS
from bnrnn.report.summary import summarize
from bnrnn.training import checkpoint
from bnrnn.training.cells import expand
from bnrnn.training.results import FILE, config_record
from bnrnn.training.state import TrainState
from tests.report.test_runs import put

TABLE = "cooijmans2016/table1"
CELL = {"data": "pmnist", "model": "bn_lstm", "seed": "0"}


def begin(results_dir: Path, accuracies: list[float], kept: int, **changes) -> Path:
    """Store an unfinished run with an evaluation every 500 updates, and a checkpoint that belongs to `kept` records."""
    (cell,) = expand([f"experiment={TABLE}", f"out_dir={results_dir}", *(f"{k}={v}" for k, v in CELL.items())])
    records = [
        {"update": 500 * k, "seconds": 250.0 * k, "valid/accuracy": value} for k, value in enumerate(accuracies, 1)
    ]
    state = TrainState("run", ["abc"], update=500 * kept + 20, num_records=kept, seconds=250.0 * kept)
    state.pieces = [{"update": 0, "device": "cpu", "hardware": "x86_64", "backend": "cpu"}]
    record = config_record(cell.cfg) | changes
    parts = {"state": asdict(state), "model": {}, "optimizer": {}, "random": {}, "config": record}
    cell.folder.mkdir(parents=True)
    checkpoint.save(cell.folder / checkpoint.CHECKPOINT, parts)
    (cell.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return cell.folder


def test_an_unfinished_run_has_the_records_of_its_checkpoint(tmp_path):
    begin(tmp_path, [0.5, 0.6, 0.7, 0.8], kept=3)
    (run,) = Evidence(tmp_path).unfinished(TABLE)
    assert run.series("valid/accuracy") == {500: 0.5, 1000: 0.6, 1500: 0.7}
    assert (run.result.status, run.result.updates, run.seconds_per_update) == ("unfinished", 1520, 750 / 1520)
    assert run.overrides == CELL and not run.stale and not Evidence(tmp_path).runs(TABLE)


def test_the_main_metric_of_a_run_without_result_is_that_of_its_records():
    result = {"name": TABLE, "overrides": {}, "config": {"seed": 0}, "environment": {}, "metrics": {}}
    found = summarize(result | {"status": "unfinished", "updates": 5}, [{"update": 5, "valid/bpc": 1.5}], "")
    assert found.metric == "bpc" and found.curve == {5: 1.5}


def test_the_page_compares_an_unfinished_run_with_the_papers_curve_and_with_nothing_else(tmp_path):
    begin(tmp_path, [0.5, 0.6123, 0.7], kept=3)
    page = tables.render(TABLE, Evidence(tmp_path))
    assert r"| `bn_lstm` | `pmnist` | 0 to 1,000 | 0.600 (points: 2) | 0.556 (n=1) \* | -0.044 |" in page
    listed = page.split("## Unfinished runs")[1].split("## All finished runs")[0]
    shown = "| 1,520 | accuracy 70.0 at update 1,500 | 0.493 | cpu on x86_64 |"
    assert f"| data=pmnist model=bn_lstm seed=0 {shown}" in listed
    assert "| `bn_lstm` | `pmnist` | 95.4 |\n" in page and "Not run yet at the paper's length." in page
    assert "No run has finished yet." in page
    tested = [test for claim in judge_claims(Evidence(tmp_path)) for test in claim.tested if test.test.key == TABLE]
    assert tested and not any(test.outcome for test in tested)


def test_figures_draw_an_unfinished_run_after_the_end_of_a_shorter_one(tmp_path):
    begin(tmp_path, [0.5, 0.6, 0.7, 0.8], kept=4)
    short = [{"update": 500 * k, "seconds": 10.0 * k, "valid/accuracy": 0.5} for k in (1, 2)]
    for seed in "01":
        put(tmp_path, TABLE, CELL | {"seed": seed}, {"valid/accuracy": 0.5}, short, budget="cpu")
    unfinished, finished = Evidence(tmp_path).unfinished(TABLE), Evidence(tmp_path).runs(TABLE)
    pages = {run.folder: "page.html" for run in finished}
    plot = curves.of_experiment(table_of(TABLE), [*finished, *unfinished], pages)
    of_seed = {line.member: line for line in plot.lines if line.metric == "valid/accuracy"}
    assert (of_seed["0"].x[curves.UPDATES], of_seed["0"].page) == ([500, 1000, 1500, 2000], "")
    assert (of_seed["1"].x[curves.UPDATES], of_seed["1"].page) == ([500, 1000], "page.html")
    path = tmp_path / "fig2.png"
    plots.draw_curve(table_of(TABLE), table_of(TABLE).curves[0], Evidence(tmp_path), path)
    assert path.exists()


def test_the_line_of_a_seed_that_was_trained_longer_is_stronger_after_the_end_of_the_others(tmp_path):
    begin(tmp_path, [0.5, 0.6, 0.7, 0.8], kept=4)
    for seed in "12":
        records = [{"update": 500 * k, "valid/accuracy": 0.5} for k in (1, 2)]
        put(tmp_path, TABLE, CELL | {"seed": seed}, {"valid/accuracy": 0.5}, records)
    runs = [*Evidence(tmp_path).runs(TABLE), *Evidence(tmp_path).unfinished(TABLE)]
    fig, ax = plt.subplots()
    assert plots.draw_runs(ax, runs, "valid/accuracy", LOOKS[0], "ours", None) == 2000
    drawn = [(line.get_alpha(), list(map(float, line.get_xdata()))) for line in ax.get_lines()]
    plt.close(fig)
    thin, strong, thick = 0.35, 0.45, 0.5  # pale, because it was evaluated in the order of the file
    longer = [(thin, [500, 1000, 1500, 2000]), (strong, [1000, 1500, 2000])]
    assert drawn == [(thin, [500, 1000])] * 2 + longer + [(thick, [500, 1000])]


def test_runs_that_are_stale_damaged_or_finished_are_no_unfinished_runs(tmp_path, capsys):
    folder = begin(tmp_path, [0.5, 0.6], kept=2, grad_clip=12345.0)
    (run,) = Evidence(tmp_path).unfinished(TABLE)
    assert run.stale and "No run has reached" in tables.render(TABLE, Evidence(tmp_path))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    assert Evidence(tmp_path).unfinished(TABLE) == []
    assert f"left out: {folder / 'metrics.jsonl'} has other records" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / FILE).write_text("{}")
    assert Evidence(tmp_path).unfinished(TABLE) == []


@pytest.mark.parametrize("key", ["laurent2015/table1", "cooijmans2016/table2"])
def test_an_experiment_without_checkpoints_has_no_unfinished_run(key, tmp_path):
    assert Evidence(tmp_path).unfinished(key) == []
