import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from bnrnn import tables
from bnrnn.evidence import ROOT, Run, compose_config, load_claim, load_runs, sweep
from bnrnn.results import Result, config_hash, config_record

KEY = "cooijmans2016/table1"


def result(budget: str = "paper", test: float = 0.99, status: str = "finished", **overrides: str) -> Result:
    cfg = compose_config(f"experiment={KEY}", f"budget={budget}", *(f"{k}={v}" for k, v in overrides.items()))
    record = config_record(cfg)
    overrides = dict(sorted(overrides.items()))
    metrics = {"valid/accuracy": 0.5, "test/accuracy": test} if status == "finished" else {}
    return Result(
        KEY,
        overrides,
        status,
        cfg.budget.updates,
        1,
        metrics,
        10.0,
        5,
        ["abc"],
        {"device": "cpu"},
        config_hash(record),
        record,
    )


def put(results_dir, run: Result, records: list[dict] | None = None) -> None:
    """Store a run as training does."""
    name = ",".join(f"{k}={v}" for k, v in sorted(run.overrides.items()))
    folder = results_dir / KEY / run.config["budget"]["name"] / name
    folder.mkdir(parents=True)
    run.write(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records or []))


def row(text: str, *cells: str) -> str:
    """The one line of a table that begins with these cells."""
    (line,) = (line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |"))
    return line


def test_mean_spread_count_difference_and_verdict(tmp_path):
    for seed, accuracy in (("0", 0.951), ("1", 0.956)):
        put(tmp_path, result(test=accuracy, model="bn_lstm", data="pmnist", seed=seed))
    put(tmp_path, result(test=0.97, model="lstm", data="smnist", seed="0"))
    text = tables.render_published(KEY, load_claim(KEY), load_runs(KEY, tmp_path))
    assert row(text, "`bn_lstm`", "`pmnist`").endswith(
        "| 95.4 | 95.35 ± 0.35 (n=2 of 3) | -0.05 | reproduced (tolerance 0.5) |"
    )
    assert row(text, "`lstm`", "`smnist`").endswith("| 98.9 | 97.00 (n=1 of 3) | -1.90 | differs (tolerance 0.5) |")
    assert row(text, "`lstm`", "`pmnist`").endswith("| – | – | not run at this length |")
    assert text.count("\n") == 2 + 6


def test_short_runs_are_never_the_tables_number(tmp_path):
    put(tmp_path, result("cpu", 0.954, model="bn_lstm", data="pmnist", seed="0"),
        [{"update": 500, "valid/accuracy": 0.5}, {"update": 2500, "valid/accuracy": 0.75}])  # fmt: skip
    text = tables.render(KEY, tmp_path)
    published, rest = text.split("equal updates")
    assert "95.40" not in published
    assert row(rest, "`bn_lstm`", "`pmnist`", "2,500").endswith("| 0.782 | 0.750 (n=1) | -0.032 |")
    assert "1,000" not in rest.split("## All")[0], "we have no evaluation there"
    assert row(rest, "data=pmnist model=bn_lstm", "cpu", "2,500")


def test_a_result_of_another_recipe_is_stale(tmp_path):
    old = result(model="lstm", data="smnist", seed="0")
    put(tmp_path, dataclasses.replace(old, config_hash="0" * 16))
    text = tables.render_published(KEY, load_claim(KEY), load_runs(KEY, tmp_path))
    assert row(text, "`lstm`", "`smnist`").endswith("| – | – | stale: the recipe has changed since |")


def test_a_diverged_run_has_no_number(tmp_path):
    put(tmp_path, result(status="diverged", model="lstm", data="smnist", seed="0"))
    text = tables.render(KEY, tmp_path)
    assert row(text, "`lstm`", "`smnist`").endswith("| – | – | 1 of 1 diverged |")
    assert "1 diverged" in text.split("## All")[1]


def test_of_two_lengths_of_one_run_the_longer_gives_the_curve(tmp_path):
    for budget, accuracy in (("cpu", 0.1), ("paper", 0.65)):
        put(tmp_path, result(budget, model="bn_lstm", data="pmnist", seed="0"),
            [{"update": 1000, "valid/accuracy": accuracy}])  # fmt: skip
    text = tables.render(KEY, tmp_path)
    assert "0.650 (n=1)" in row(text, "`bn_lstm`", "`pmnist`", "1,000")


def test_training_metrics_are_averaged_between_evaluations():
    records = [{"update": u, "train/loss": float(u)} for u in (10, 20)] + [{"update": 20, "valid/loss": 1.0}]
    records += [{"update": 30, "train/loss": 30.0}, {"update": 30, "valid/loss": 2.0}]
    run = Run({"seed": "0"}, "paper", result(), records, stale=False)
    assert run.series("train/loss") == {20: 15.0, 30: 30.0}
    assert run.series("valid/loss") == {20: 1.0, 30: 2.0}


def test_the_grid_is_the_experiments():
    assert sweep(KEY)["seed"] == ["0", "1", "2"]
    assert list(sweep("cooijmans2016/fig6")) == ["model", "data", "model.layer.gamma_init", "seed"]


def test_a_checkout_whose_tables_are_not_its_results_fails_the_check():
    command = [sys.executable, "scripts/make_tables.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_changed_result_fails_the_check_and_make_tables_mends_it(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, tracked):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    path = next((tmp_path / "results").glob(f"{KEY}/*/*/result.json"))
    changed = Result.read(path)
    changed.metrics["test/accuracy"] = 0.123
    changed.write(path.parent)

    def tables(*args: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "scripts/make_tables.py", *args]
        return subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)

    failed = tables("--check")
    assert failed.returncode == 1
    assert "table1.md. Run `make tables`" in failed.stderr
    assert tables().returncode == 0
    assert tables("--check").returncode == 0
    assert "12.3" in (tmp_path / f"results/{KEY}.md").read_text()
