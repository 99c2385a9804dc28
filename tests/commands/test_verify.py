"""Does a run agree with the stored ones? Runs that do, that do not, and that cannot be compared."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
from scipy.stats import t as student

from bnrnn.commands import verify
from bnrnn.config import ROOT
from bnrnn.data.base import sha256
from bnrnn.metrics import READ
from bnrnn.report import summary
from bnrnn.report.agreement import CONSISTENT, DIFFERS, ITSELF, LEVEL, NOTHING, Finding
from bnrnn.report.outcome import student_interval
from bnrnn.report.stored import Stored, load_new, summary_of
from bnrnn.system.files import read_record, write_record
from bnrnn.training.log import read_jsonl
from tests.report.test_runs import put
from tests.report.test_unfinished import begin

KEY, SEEDS = "quickstart", range(5)
RESULTS = ROOT / "results"
TABLE, CELL = "cooijmans2016/table1", {"data": "pmnist", "model": "bn_lstm", "seed": "0"}


def folder_of(results: Path, seed: int, model: str) -> Path:
    return results / KEY / "paper" / f"data=digits,model={model},seed={seed}"


def stored_values(name: str, model: str) -> list[float]:
    paths = [folder_of(RESULTS, seed, model) / "result.json" for seed in SEEDS]
    return [json.loads(path.read_text())["metrics"][name] for path in paths]


def add(results: Path, seed: int = 7, model: str = "lstm", until: int = 400, metrics: dict | None = None, **changes):
    """Store a new run: the run of seed 1 with another seed, other times and some other content."""
    source, target = folder_of(RESULTS, 1, model), folder_of(results, seed, model)
    shutil.copytree(source, target)
    records = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    kept = [record | {"seconds": record["seconds"] + 1} for record in records if record["update"] <= until]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    (target / "metrics.jsonl").write_text(text)
    content = read_record(source / "result.json", "")
    content["overrides"]["seed"], content["config"]["seed"] = str(seed), seed
    content["environment"] |= changes.pop("environment", {})
    content["config"] |= changes.pop("config", {})
    content |= {"records_sha256": sha256(text.encode()), "updates": min(until, content["updates"])} | changes
    content["metrics"] = {} if content["status"] == "diverged" else content["metrics"] | (metrics or {})
    write_record(target / "result.json", content)
    return target


def some_stored(results: Path, seeds, model: str = "lstm") -> Stored:
    for seed in seeds:
        shutil.copytree(folder_of(RESULTS, seed, model), folder_of(results, seed, model))
    results.mkdir(exist_ok=True)
    return Stored(results)


def found(results: Path, stored: Stored | None = None) -> Finding:
    """The finding of the only cell of a folder."""
    runs, damaged = load_new(results)
    ((_, finding),) = verify.findings(runs, stored or Stored(RESULTS))
    assert not damaged
    return finding


def run_command(monkeypatch, capsys, *arguments: object) -> tuple[int, list[str], str]:
    """The exit status, the printed lines and the error of the command."""
    monkeypatch.setattr(sys, "argv", ["bnrnn-verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        verify.cli()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out.splitlines(), printed.err


@pytest.mark.parametrize(("values", "quantile", "level"), [
    ([1.0, 2.0, 3.0, 4.0, 5.0], 2.776445, 0.95),  # quantiles of Student's t from printed tables
    ([1.0, 2.0, 3.0, 4.0, 5.0], 4.604095, 0.99),
    ([2.0, 3.0, 7.0], 4.302653, 0.95),
])  # fmt: skip
def test_the_prediction_interval_has_the_quantile_of_a_printed_table(values, quantile, level):
    half = quantile * stdev(values) * (1 + 1 / len(values)) ** 0.5
    assert student_interval(values, level, of_next=True) == pytest.approx(
        (mean(values) - half, mean(values) + half), rel=1e-6
    )


@pytest.mark.parametrize(("share", "state"), [(0.99, CONSISTENT), (-0.99, CONSISTENT), (1.01, DIFFERS)])
def test_the_intervals_of_three_quantities_have_95_percent_together(tmp_path, share, state):
    values = stored_values("test/accuracy", "lstm")
    half = student.ppf(1 - 0.05 / 3 / 2, 4) * stdev(values) * (1 + 1 / 5) ** 0.5
    add(tmp_path, metrics={"test/accuracy": mean(values) + share * half})
    finding = found(tmp_path)
    assert finding.state == state and finding.distance == pytest.approx(abs(share), rel=1e-6)
    assert "test/accuracy" in finding.why and "5 stored seeds at 400 updates" in finding.why


def test_runs_that_agree_are_counted_and_the_exit_status_is_0(tmp_path, monkeypatch, capsys):
    for seed, model in ((7, "lstm"), (8, "lstm"), (7, "bn_lstm")):
        add(tmp_path, seed, model)
    status, lines, _ = run_command(monkeypatch, capsys, tmp_path, "--results", RESULTS)
    assert status == 0 and len(lines) == 3
    assert lines[0].startswith(f"{CONSISTENT:25}quickstart paper data=digits model=bn_lstm: test/accuracy, ")
    assert "model=lstm: 2 seeds, the furthest is seed " in lines[1]
    assert lines[2] == "2 cells: 2 consistent, 0 differ, 0 nothing to compare with"


def test_a_difference_names_the_quantity_how_far_it_is_and_what_differs_beside(tmp_path, monkeypatch, capsys):
    add(tmp_path, 7)
    add(tmp_path, 8, metrics={"test/accuracy": 0.2}, environment={"precision": "bfloat16", "torch": "9.9"})
    status, (line, last), _ = run_command(monkeypatch, capsys, tmp_path, "--results", RESULTS)
    values = stored_values("test/accuracy", "lstm")
    low, high = student_interval(values, 1 - 0.05 / 3, of_next=True)
    torch = read_record(folder_of(RESULTS, 0, "lstm") / "result.json", "")["environment"]["torch"]
    assert status == 1 and last == "1 cell: 0 consistent, 1 differ, 0 nothing to compare with"
    assert line.startswith(
        f"{DIFFERS:25}quickstart paper data=digits model=lstm: 1 of 2 seeds, the furthest is seed 8: "
    )
    assert f"test/accuracy 0.2 is {low - 0.2:.2g} outside of {low:.4g} to {high:.4g}" in line
    assert line.endswith(f"; check first: precision bfloat16 here, float32 there, torch 9.9 here, {torch} there")


def test_a_difference_without_a_reason_says_so_and_another_digest_of_the_data_is_one(tmp_path):
    add(tmp_path, metrics={"test/accuracy": 0.2})
    assert found(tmp_path).why.endswith("; nothing that is recorded differs")
    path = folder_of(tmp_path, 7, "lstm") / "result.json"
    content = read_record(path, "")
    content["pieces"][-1]["data"] = "0123456789abcdef"
    write_record(path, content)
    assert re.search(r"check first: data digest 0123456789abcdef here, \w{16} there$", found(tmp_path).why)


def test_the_stored_run_itself_confirms_nothing(tmp_path, monkeypatch, capsys):
    shutil.copytree(RESULTS / KEY, tmp_path / KEY, ignore=shutil.ignore_patterns("*bn_lstm*"))
    status, (line, last), _ = run_command(monkeypatch, capsys, tmp_path)
    assert status == 0 and line.startswith(f"{ITSELF}  quickstart") and line.endswith("seed 0, 1, 2, 3, 4")
    assert last == "1 cell: 0 consistent, 0 differ, 0 nothing to compare with, 1 the stored run itself"
    path = folder_of(tmp_path, 2, "lstm") / "result.json"
    content = read_record(path, "")
    write_record(path, content | {"metrics": content["metrics"] | {"test/accuracy": 0.2}})
    assert found(tmp_path).state == DIFFERS  # its records alone do not make it the stored run


def test_equal_records_of_another_seed_are_not_the_stored_run(tmp_path):
    target = add(tmp_path)
    shutil.copy(folder_of(RESULTS, 1, "lstm") / "metrics.jsonl", target)
    content, records = read_record(target / "result.json", ""), (target / "metrics.jsonl").read_bytes()
    write_record(target / "result.json", content | {"records_sha256": sha256(records)})
    assert found(tmp_path).state == CONSISTENT


def test_of_several_seeds_that_differ_the_line_names_the_furthest(tmp_path):
    for seed, accuracy in ((7, 0.2), (8, 0.1), (9, 0.15)):
        add(tmp_path, seed, metrics={"test/accuracy": accuracy})
    assert found(tmp_path).why.startswith("3 seeds, the furthest is seed 8: test/accuracy 0.1 is ")


def test_a_new_run_of_a_stored_seed_is_compared_with_all_stored_ones(tmp_path):
    add(tmp_path, seed=1)
    assert found(tmp_path).state == CONSISTENT and "5 stored seeds" in found(tmp_path).why


def test_fewer_than_three_stored_seeds_give_a_difference_and_no_verdict(tmp_path):
    add(tmp_path / "new")
    finding = found(tmp_path / "new", some_stored(tmp_path / "stored", (1, 2)))
    curves = [dict(summary_of(run).curve) for run in load_new(tmp_path / "stored")[0]]
    difference = curves[0][400] - mean(curve[400] for curve in curves)
    expected = f"only 2 stored seeds at update 400, difference {difference:+.3g} in valid/accuracy"
    assert finding == Finding(NOTHING, expected)
    add(tmp_path / "new", 8)
    of_two = found(tmp_path / "new", some_stored(tmp_path / "stored_again", (1, 2)))
    assert of_two.why.startswith("2 seeds, for example seed 7: only 2 stored seeds")  # none of them is the furthest


@pytest.mark.parametrize(("accuracy", "state"), [(0.951, CONSISTENT), (0.947, DIFFERS)])
def test_without_stored_seeds_a_run_of_the_papers_length_is_compared_with_the_paper(tmp_path, accuracy, state):
    put(tmp_path, TABLE, CELL, {"test/accuracy": accuracy, "valid/accuracy": 0.95})
    finding = found(tmp_path, some_stored(tmp_path / "stored", ()))
    assert finding.state == state
    assert f"test accuracy (%): {100 * accuracy:.4g}, the paper's is 95.4 with the tolerance 0.5" in finding.why


def test_a_shorter_run_is_compared_with_the_curves_of_longer_ones(tmp_path):
    target = add(tmp_path / "new", until=200)
    finding = found(tmp_path / "new")
    records = [read_jsonl(folder_of(RESULTS, seed, "lstm") / "metrics.jsonl") for seed in SEEDS]
    values = [r["valid/accuracy"] for of_run in records for r in of_run if r["update"] == 200 and "valid/accuracy" in r]
    low, high = student_interval(values, LEVEL, of_next=True)
    assert finding.state == CONSISTENT
    assert f"is in {low:.4g} to {high:.4g}, the interval of 5 stored seeds at update 200" in finding.why
    text = (target / "metrics.jsonl").read_text().splitlines()
    changed = "".join(json.dumps(json.loads(line) | {"valid/accuracy": 0.99}) + "\n" for line in text)
    (target / "metrics.jsonl").write_text(changed)
    content = read_record(target / "result.json", "")
    write_record(target / "result.json", content | {"records_sha256": sha256(changed.encode())})
    assert found(tmp_path / "new").state == DIFFERS
    assert found(tmp_path / "new").why.startswith("valid/accuracy 0.99 is ")


def test_the_curve_of_an_unfinished_run_counts_as_one_stored_seed(tmp_path):
    begin(tmp_path / "stored", [0.5, 0.6, 0.7], kept=3)
    records = [{"update": 50 * k, "seconds": 1.0, "valid/accuracy": 0.01 * k} for k in (10, 20, 25)]
    put(tmp_path / "new", TABLE, CELL | {"budget.updates": "100"}, {"valid/accuracy": 0.25}, records)
    finding = found(tmp_path / "new", Stored(tmp_path / "stored"))
    assert finding == Finding(NOTHING, "only 1 stored seed at update 1,000, difference -0.4 in valid/accuracy")


def test_a_diverged_run_differs_from_finished_ones_and_agrees_with_diverged_ones(tmp_path):
    add(tmp_path / "new", until=40, status="diverged")
    finding = found(tmp_path / "new")
    assert finding.state == DIFFERS and "it diverged at update 40, and none of 5 stored seeds did" in finding.why
    for seed in (11, 12, 13):
        add(tmp_path / "stored", seed, until=20, status="diverged")
    stored = Stored(tmp_path / "stored")
    finding = found(tmp_path / "new", stored)
    assert finding == Finding(CONSISTENT, "it diverged at update 40, as 3 of 3 stored seeds did")
    add(tmp_path / "finished")
    finding = found(tmp_path / "finished", stored)
    assert finding.state == DIFFERS and "it did not diverge, and 3 stored seeds did" in finding.why


@pytest.mark.parametrize("model", ["lstm", "bn_lstm"])
def test_batch_statistics_of_another_evaluation_order_are_not_compared(tmp_path, model):
    path = add(tmp_path, model=model, metrics={"valid/accuracy": 0.1}) / "result.json"
    assert found(tmp_path).state == DIFFERS  # in the same order
    content = read_record(path, "")
    for part in (content["environment"], *content["pieces"]):
        part["evaluation_order"] = "file"
    write_record(path, content | {"config": content["config"] | {"evaluation_order": "file"}})
    finding = found(tmp_path)
    if model == "bn_lstm":
        assert finding.state == CONSISTENT and "test/accuracy, train/loss as in 5 stored seeds" in finding.why
        told = "; valid/accuracy cannot be compared: evaluated in the order file here, shuffled there"
        assert finding.why.endswith(told)
    else:
        assert finding.state == DIFFERS and finding.why.startswith("valid/accuracy 0.1 is ")
        assert "; check first: evaluation order file here, shuffled there" in finding.why


@pytest.mark.parametrize(("model", "points"), [("lstm", range(40, 401, 40)), ("bn_lstm", range(160, 401, 40))])
def test_points_of_a_curve_in_an_earlier_evaluation_order_are_left_out(tmp_path, model, points):
    content = read_record(add(tmp_path, model=model) / "result.json", "")
    records = load_new(tmp_path)[0][0].records
    content["pieces"] = [{"update": 0}, content["pieces"][0] | {"update": 120}]
    assert list(summary.summarize(content, records, "").curve) == list(points)


def test_a_curve_of_another_evaluation_order_is_not_compared(tmp_path):
    path = add(tmp_path, model="bn_lstm", until=200) / "result.json"
    assert found(tmp_path).state == CONSISTENT
    content = read_record(path, "")
    write_record(path, content | {"environment": content["environment"] | {"evaluation_order": "file"}})
    assert found(tmp_path) == Finding(NOTHING, "evaluated in the order file here, shuffled there")


def test_a_result_that_names_no_evaluation_order_was_evaluated_in_the_order_of_the_files():
    content = json.loads((folder_of(RESULTS, 0, "lstm") / "result.json").read_text())
    assert summary.summarize(content, [], "").order == "shuffled"
    content["environment"].pop("evaluation_order")
    assert summary.summarize(content, [], "").order == "file"


def test_a_quantity_that_is_equal_in_all_stored_seeds_is_not_compared(tmp_path):
    for seed in (11, 12, 13):
        add(tmp_path / "stored", seed, metrics={"valid/accuracy": 1.0, "test/accuracy": 0.6 + 0.01 * seed})
    add(tmp_path / "new", metrics={"valid/accuracy": 0.99, "test/accuracy": 0.72})
    finding = found(tmp_path / "new", Stored(tmp_path / "stored"))
    assert finding.state == CONSISTENT and finding.why.startswith("test/accuracy, train/loss as in 3")


def test_another_recipe_is_not_compared_and_the_line_says_what_differs(tmp_path, monkeypatch, capsys):
    add(tmp_path, config={"grad_clip": 12345.0})
    status, (line, last), _ = run_command(monkeypatch, capsys, tmp_path, "--results", RESULTS)
    assert status == 0 and last == "1 cell: 0 consistent, 0 differ, 1 nothing to compare with"
    assert line.endswith(": the stored runs have another recipe: grad_clip 12345 here, 1 there")
    assert found(tmp_path, some_stored(tmp_path / "none", ())).why == "no run of quickstart is stored"


def test_damaged_results_and_those_in_other_folders_are_reported_and_fail(tmp_path, monkeypatch, capsys):
    for seed in (7, 8, 9):
        add(tmp_path, seed)
    path = folder_of(tmp_path, 8, "lstm") / "result.json"
    path.write_text(path.read_text().replace('"updates": 400', '"updates": 401'))
    (tmp_path / "copied").mkdir()
    shutil.move(folder_of(tmp_path, 9, "lstm"), tmp_path / "copied" / "mine")
    status, lines, _ = run_command(monkeypatch, capsys, tmp_path, "--results", RESULTS)
    assert status == 1 and lines[-1] == "1 cell: 1 consistent, 0 differ, 0 nothing to compare with, 2 damaged"
    assert lines[1].startswith(f"{'damaged':25}{tmp_path}/copied/mine/result.json is a result of quickstart, and is in")
    assert lines[2].startswith(f"{'damaged':25}{path} ") and "checksum" in lines[2]


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_finished_runs_has_the_exit_status_2(tmp_path, monkeypatch, capsys, folder):
    (tmp_path / "notes.txt").write_text("something else")
    status, lines, error = run_command(monkeypatch, capsys, tmp_path / folder)
    assert status == 2 and not lines
    assert error.startswith(f"error: {tmp_path / folder} has no finished runs: train some")


def test_stored_runs_that_are_missing_or_damaged_have_the_exit_status_2(tmp_path, monkeypatch, capsys):
    add(tmp_path / "new")
    status, _, error = run_command(monkeypatch, capsys, tmp_path / "new", "--results", tmp_path / "missing")
    assert status == 2 and "missing does not exist: give a folder of stored runs with --results" in error
    (tmp_path / "evidence.jsonl").write_text('{"key": 5')
    status, _, error = run_command(monkeypatch, capsys, tmp_path / "new", "--results", tmp_path / "evidence.jsonl")
    assert status == 2 and "evidence.jsonl is not a file of stored runs" in error


def test_a_run_is_found_from_any_folder_above_it(tmp_path, monkeypatch):
    target = add(tmp_path)
    monkeypatch.chdir(target.parent)
    assert [found(folder).state for folder in (target, Path("."), tmp_path)] == [CONSISTENT] * 3


@pytest.mark.parametrize("content", [{}, {"metrics": {"test/accuracy": 0.2}}, {"until": 200}, {"until": None}])
def test_the_package_gives_the_same_findings_as_the_stored_folder(tmp_path, content):
    lines = summary.summary_lines(RESULTS / KEY)
    (tmp_path / "evidence.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if content.get("until", 400) is None:
        shutil.copytree(folder_of(RESULTS, 3, "lstm"), folder_of(tmp_path, 3, "lstm"))
    else:
        add(tmp_path, **content)
    of_folder, of_package = found(tmp_path), found(tmp_path, Stored(tmp_path / "evidence.jsonl"))
    assert (of_package.state, of_package.why) == (of_folder.state, of_folder.why)


def test_a_long_curve_keeps_evenly_spaced_points_and_its_end_in_the_package():
    whole = summary_of(load_new(folder_of(RESULTS, 0, "lstm"))[0][0])
    curve = {10 * k: k / 3 for k in range(1, 102)}
    kept = summary.Summary.of_line(replace(whole, curve=curve).line())
    assert kept.curve == {update: float(f"{curve[update]:.6g}") for update in range(20, 1011, 30)}
    assert replace(kept, curve=curve, numbers=whole.numbers) == replace(whole, curve=curve)


def test_the_summary_has_the_main_metric_and_the_training_loss_of_the_pages():
    assert summary.MAIN == READ
    runs, _ = load_new(RESULTS / "laurent2015")
    assert {run.result.status for run in runs} == {"finished", "diverged"}
    for run in runs:
        new, losses = summary_of(run), list(run.series("train/loss").values())
        assert new.numbers.get("train/loss") == (losses[-1] if losses else None)
        assert new.status == "diverged" or new.metric == run.metric
        assert (new.normalizes, new.order) == (run.has_batch_norm, run.result.evaluation_order)
