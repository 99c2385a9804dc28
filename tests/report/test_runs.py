"""Tables of language models: several published numbers, lengths in epochs, other metrics, random searches."""

import json
import shutil
from math import exp

import pytest

from bnrnn.errors import BnrnnError
from bnrnn.report import evidence, pages, plots, tables
from bnrnn.report.claims import in_grid, table_of
from bnrnn.report.evidence import Evidence, run_files
from bnrnn.report.run import Run, longest
from bnrnn.report.run_tables import render_summary
from bnrnn.report.trained import trained_runs
from bnrnn.system.files import read_record, write_record
from bnrnn.training import results
from bnrnn.training.cells import expand
from bnrnn.training.checkpoint import MODEL
from bnrnn.training.results import FILE, Result, config_record
from bnrnn.training.search import apply_trial
from bnrnn.training.states import check_results
from tests.helpers import composed

WORDS = "laurent2015/table2"
CELL = {"model": "input_bn_lstm", "seed": "0", "setting": "small"}


def put(results_dir, key: str, overrides: dict, metrics: dict, records: list[dict] | None = None, budget="paper"):
    """Store a finished run in the same way as training."""
    cfg = composed(f"experiment={key}", f"budget={budget}", *(f"{k}={v}" for k, v in overrides.items() if k != "seed"))
    cfg.seed = int(overrides.get("seed", cfg.seed))
    record = config_record(apply_trial(cfg))
    environment = {"device": "cpu", "hardware": "x86_64", "backend": "cpu"}
    result = Result(key, overrides, "finished", 100, 50, metrics, 10.0, 5, ["abc"], environment, record, "a text")
    store(results_dir, result, records)


def store(results_dir, result: Result, records: list[dict] | None = None) -> None:
    """Store a result and its records in the folder of its run."""
    name = ",".join(f"{k}={v}" for k, v in sorted(result.overrides.items()))
    folder = results_dir / result.name / result.config["budget"]["name"] / name
    folder.mkdir(parents=True)
    result.write(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records or []))


def put_one(results_dir, key: str, *args, **options) -> Run:
    """Store a finished run, and read it."""
    put(results_dir, key, *args, **options)
    (run,) = Evidence(results_dir).runs(key)
    return run


def change(path, changes: dict) -> None:
    """Store a result with other values, and the checksum that belongs to them."""
    write_record(path, read_record(path, "") | {k: v for k, v in changes.items() if k != "sha256"})


def change_recipe(path) -> None:
    """Change the recipe of a stored result: no recipe has this gradient clipping."""
    stored = json.loads(path.read_text())
    stored["config"]["grad_clip"] = 12345.0
    change(path, stored)


def train_records(*losses: float) -> list[dict]:
    """Two epochs of 50 updates, a record every 20: the third straddles them."""
    updates = (20, 40, 60, 80, 100)
    records = [{"update": u, "train/loss": loss} for u, loss in zip(updates, losses, strict=True)]
    return [*records[:2], {"update": 50, "valid/loss": 5.0}, *records[2:], {"update": 100, "valid/loss": 4.8}]


def test_a_training_curve_has_each_update_once(tmp_path):
    run = put_one(tmp_path, WORDS, CELL, {"valid/ppl": 120.0}, train_records(6.0, 5.0, 4.0, 4.0, 3.0))
    assert run.series("train/loss") == {50: pytest.approx(5.5), 100: pytest.approx((4 + 4 + 3) / 3)}
    assert run.series("train/ppl")[50] == pytest.approx(exp(5.5))
    assert run.measured("train/ppl") == pytest.approx(exp(11 / 3))


def test_a_training_curve_ends_where_the_loss_is_not_a_number(tmp_path):
    records = train_records(6.0, 5.0, 4.0, 4.0, 3.0)
    records[3]["train/loss"] = records[-1]["valid/loss"] = None
    run = put_one(tmp_path, WORDS, CELL, {"valid/ppl": 120.0}, records)
    assert run.series("train/loss") == {50: pytest.approx(5.5)} and run.series("valid/loss") == {50: 5.0}


def test_both_published_numbers_are_compared_and_valid_with_population_statistics(tmp_path):
    metrics = {"valid/ppl": 150.0, "valid/ppl_population_statistics": 121.0, "test/ppl": 115.0}
    put(tmp_path, WORDS, CELL, metrics, train_records(5.0, 5.0, 4.1, 4.1, 4.1))
    sections = tables.sections(table_of(WORDS), Evidence(tmp_path).runs(WORDS), [])
    valid, train = sections.values()
    row, end = "| `input_bn_lstm` | `small` |", "tolerance, n=1 (tolerance 2.0) |"
    assert f"{row} 120.9 | 121.0 (n=1 of 3) | +0.1 | within {end}" in valid
    assert f"{row} 62.5 | 60.3 (n=1 of 3) | -2.2 | outside {end}" in train
    assert valid.count("not run") == train.count("not run") == 5


def test_a_run_of_another_length_or_with_something_else_changed_is_no_reproduction(tmp_path):
    for changed in ({"budget.epochs": "14"}, {"optim.lr": "2.0"}):
        put(tmp_path, WORDS, CELL | changed, {"valid/ppl": 120.0}, train_records(5.0, 5.0, 4.0, 4.0, 4.0))
    table, runs = table_of(WORDS), Evidence(tmp_path).runs(WORDS)
    text = tables.render_published(table, table.published[0], runs)
    assert text.endswith("\nNot run yet at the paper's length.\n")
    assert {in_grid(WORDS, run.overrides) for run in runs if "optim.lr" in run.overrides} == {False}


def test_a_shorter_run_counts_at_equal_updates_unless_something_else_was_changed(tmp_path):
    key, cell = "cooijmans2016/table2", {"data": "ptb_char", "model": "lstm"}
    records = [{"update": 791, "valid/bpc": 2.2}]
    put(tmp_path, key, cell | {"seed": "0"}, {"valid/bpc": 2.2}, records, budget="cpu")
    for seed, option, bpc in (("1", {"budget.epochs": "1"}, 2.4), ("2", {"model.hidden_size": "8"}, 9.0)):
        put(tmp_path, key, cell | {"seed": seed} | option, {"valid/bpc": bpc}, [{"update": 791, "valid/bpc": bpc}])
    text = tables.render_windows(table_of(key), table_of(key).curves[0], Evidence(tmp_path).runs(key))
    assert "| `lstm` | `ptb_char` | 0 to 791 | 2.223 (points: 1) | 2.300 ± 0.141 (n=2) | +0.077 |" in text


def test_the_summary_has_the_main_metric_and_leaves_out_unmeasured_ones(tmp_path):
    metrics = {"valid/ppl": 150.0, "valid/ppl_shared_statistics": 123.4, "test/ppl": 115.0, "test/accuracy": 0.2}
    put(tmp_path, WORDS, CELL, metrics)
    text = render_summary(Evidence(tmp_path).runs(WORDS))
    assert "perplexity per word" in text and "Data: a text." in text
    header = next(line for line in text.splitlines() if line.startswith("| run"))
    assert "valid, shared over time" in header and "one sequence" not in header and "%" not in header
    assert "| 150.0 (n=1) | 123.4 (n=1) | 115.0 (n=1) |" in text


def test_a_trial_of_a_search_is_shown_with_what_it_drew_and_is_not_stale(tmp_path):
    key = "laurent2015/table3_search"
    run = put_one(
        tmp_path, key, {"data": "ptb_char", "model": "rnn", "search.trial": "3", "seed": "0"}, {"valid/bpc": 2.0}
    )
    assert not run.stale and set(run.drawn) == {"optim.lr", "optim.momentum", "batch_size"}
    assert f"lr={run.drawn['optim.lr']} momentum={run.drawn['optim.momentum']}" in render_summary([run])


def test_a_run_whose_folder_is_deeper_because_of_a_group_path_is_found(tmp_path):
    run = put_one(tmp_path, "zhang2017/flickr8k", {"model": "captioner/lstm", "seed": "0"}, {"valid/ppl": 30.0})
    assert run.overrides["model"] == "captioner/lstm" and run.budget == "paper" and not run.stale
    assert "| model=captioner/lstm | paper | 100 |" in render_summary([run])


def test_a_run_whose_folder_is_a_link_is_found(tmp_path):
    put(tmp_path / "results", WORDS, CELL, {"valid/ppl": 100.0})
    (path,) = run_files(tmp_path / "results" / WORDS)
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    assert run_files(tmp_path / "results" / WORDS) == [path] and path.exists()


def test_a_result_that_no_longer_composes_is_stale_and_stops_no_page(tmp_path):
    put(tmp_path, WORDS, CELL, {"valid/ppl": 120.0})
    path = next(tmp_path.rglob("result.json"))
    change(path, {"overrides": CELL | {"model.renamed_since": "3"}})
    path.parent.rename(path.parent.with_name(f"{path.parent.name},model.renamed_since=3"))
    (run,) = Evidence(tmp_path).runs(WORDS)
    assert run.stale
    assert "| stale |" in tables.render(WORDS, Evidence(tmp_path))


def test_a_run_without_the_override_of_its_column_is_in_no_panel(tmp_path):
    key = "cooijmans2016/table2"
    records = [{"update": 791, "seconds": 1.0, "valid/bpc": 2.2}]
    run = put_one(tmp_path, key, {"model": "lstm"}, {"valid/bpc": 2.2}, records)
    assert in_grid(key, run.overrides) and run.seed == "0"
    plots.draw_curve(table_of(key), table_of(key).curves[0], Evidence(tmp_path), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_a_run_with_a_deleted_key_is_not_stale(tmp_path):
    key = "cooijmans2016/table1"
    arguments = [f"experiment={key}", "budget=paper", "~optim.momentum"]
    put(tmp_path, key, {"model": "lstm", "seed": "0"}, {"valid/accuracy": 0.2})
    path = next(tmp_path.rglob("result.json"))
    record = config_record(composed(*arguments, "model=lstm"))
    change(path, {"overrides": {"model": "lstm", "~optim.momentum": ""}, "config": record})
    path.parent.rename(path.parent.with_name("model=lstm,~optim.momentum=null"))
    (run,) = Evidence(tmp_path).runs(key)
    assert not run.stale
    (cell,) = expand([*arguments, "model=lstm", "data=pmnist", "seed=0"])
    assert cell.folder.name == "data=pmnist,model=lstm,seed=0,~optim.momentum=null"  # as in a multirun
    assert "momentum" not in cell.cfg.optim


def test_a_search_shows_its_best_beside_the_papers_and_a_dot_for_each_trial(tmp_path):
    key = "laurent2015/table3_search"
    for trial, loss in (("3", 1.5), ("4", 1.2), ("5", 1.9), ("6", 0.7)):
        cell = {"data": "ptb_char", "model": "rnn", "search.trial": trial, "seed": "0"}
        records = [{"update": u, "seconds": 1.0, "valid/loss": v} for u, v in ((50, loss), (100, loss + 0.5))]
        selected = {"valid/loss": 2.0 - loss, "valid/bpc": 1.0}  # of the model with the highest accuracy
        put(tmp_path, key, cell, selected, records)
    (path,) = tmp_path.rglob("*search.trial=6*/result.json")
    change_recipe(path)  # the best of them, but stale
    runs = Evidence(tmp_path).runs(key)
    assert [run.overrides["search.trial"] for run in runs if run.stale] == ["6"]
    best = next(run for run in runs if run.overrides["search.trial"] == "4").drawn
    page = tables.render(key, Evidence(tmp_path))
    assert "| `rnn` | paper | 0.42 | 0.95 | 32 | 1.1 |" in page
    drawn = " | ".join(f"{best[k]:g}" for k in ("optim.lr", "optim.momentum", "batch_size"))
    assert f"ours, 100 updates (3 trials, 0 diverged) | {drawn} | 1.200 |" in page
    assert "(table3_search.png)" in page
    table = table_of(key)
    plots.draw_search(table, table.search, Evidence(tmp_path), tmp_path / "search.png")
    assert (tmp_path / "search.png").stat().st_size > 10_000


def test_analyses_take_the_longest_runs_with_a_model_that_are_not_stale(tmp_path):
    where = {k: v for k, v in CELL.items() if k != "seed"}
    for seed in "012":
        put(tmp_path, WORDS, CELL | {"seed": seed}, {"valid/ppl": 120.0})
    put(tmp_path, WORDS, CELL | {"seed": "3", "optim.lr": "2.0"}, {"valid/ppl": 120.0})  # beyond the grid
    of_seed = {folder.name.partition("seed=")[2][0]: folder for folder in (tmp_path / WORDS / "paper").iterdir()}
    folders = [of_seed[seed] for seed in "0123"]
    for folder, updates in zip(folders, (100, 200, 300, 400), strict=True):
        (folder / MODEL).touch()
        result = json.loads((folder / FILE).read_text())
        result["updates"] = updates
        change(folder / FILE, result)
    change_recipe(folders[2] / FILE)
    assert [run.stale for run in Evidence(tmp_path).runs(WORDS)] == [False, False, True, False]
    assert [run.seed for run in trained_runs(WORDS, Evidence(tmp_path), **where)] == ["1"]
    for folder in (folders[1], folders[3]):
        (folder / MODEL).unlink()
    assert [run.seed for run in trained_runs(WORDS, Evidence(tmp_path), **where)] == ["0"]
    (folders[0] / MODEL).unlink()
    with pytest.raises(BnrnnError, match="no finished run with its model: train laurent2015/table2 first"):
        trained_runs(WORDS, Evidence(tmp_path), **where)


def test_analyses_take_the_greatest_length_that_all_models_have(tmp_path):
    def trained(model, updates, seed):
        budget = {"budget.epochs": str(updates)} if updates < 300 else {}
        put(tmp_path, TABLE, {"data": "ptb_char", "model": model, "seed": str(seed), **budget}, {"test/bpc": 1.5})
        (folder,) = (f for f in (tmp_path / TABLE / "paper").iterdir() if not (f / MODEL).exists())
        (folder / MODEL).touch()
        result = json.loads((folder / FILE).read_text())
        change(folder / FILE, result | {"updates": updates})

    def found(**where):
        runs = trained_runs(TABLE, Evidence(tmp_path), **where)
        return [(run.overrides["model"], run.result.updates, run.seed) for run in runs]

    TABLE = "cooijmans2016/table2"
    trained("lstm", 300, 0)
    assert found() == [("lstm", 300, "0")]
    trained("bn_lstm", 100, 0)
    with pytest.raises(BnrnnError, match=r"no models of equal length \(updates of .*lstm.*: \[300\]; .*: \[100\]\)"):
        found()
    assert found(model="lstm") == [("lstm", 300, "0")]
    for model, seed in (("lstm", 0), ("bn_lstm", 1)):
        trained(model, 100, seed)
    assert sorted(found()) == [("bn_lstm", 100, "0"), ("bn_lstm", 100, "1"), ("lstm", 100, "0")]


def test_a_copied_folder_is_no_run_of_another_seed(tmp_path, capsys):
    key, cell = "cooijmans2016/table1", {"data": "pmnist", "model": "lstm", "seed": "0"}
    put(tmp_path, key, cell, {"test/accuracy": 0.9})
    (folder,) = (tmp_path / key / "paper").iterdir()
    shutil.copytree(folder, folder.with_name(folder.name.replace("seed=0", "seed=1")))
    assert [run.seed for run in Evidence(tmp_path).runs(key)] == ["0"]
    assert "seed=1 has the result of another run (data=pmnist, model=lstm, seed=0)" in capsys.readouterr().err
    shutil.copytree(folder, tmp_path / WORDS / "paper" / folder.name)
    assert Evidence(tmp_path).runs(WORDS) == [], "nor of another experiment"
    cells = expand([f"experiment={key}", "data=pmnist", "model=lstm", "seed=0,1", f"out_dir={tmp_path}"])
    with pytest.raises(BnrnnError, match=r"seed=1/result.json is the result of another run"):
        check_results(cells)
    check_results(cells[:1])


@pytest.mark.parametrize(("folder", "named"), [
    ("data=pmnist,model=lstm,seed=0", True),
    ("+data=pmnist,++model=lstm,seed=0", True),
    ("data=pmnist,model=lstm,seed=0,~optim.momentum=null", True),
    ("data=pmnist,model=lstm,seed=1", False),
    ("budget.updates=500,data=pmnist,model=lstm,seed=0", False),
    ("data=pmnist,seed=0", False),
])  # fmt: skip
def test_a_folder_is_named_by_all_overrides_of_its_result_and_by_no_others(folder, named):
    overrides = {"data": "pmnist", "model": "lstm", "seed": "0"} | ({"~optim.momentum": ""} if "~" in folder else {})
    assert evidence.is_named_by(folder, overrides) is named


def test_a_damaged_configuration_is_an_error_and_makes_no_result_stale(tmp_path, monkeypatch):
    key, cell = "cooijmans2016/table1", {"data": "pmnist", "model": "lstm", "seed": "0"}
    put(tmp_path, key, cell, {"test/accuracy": 0.9})

    def broken(*overrides):
        raise BnrnnError("a file is damaged")

    monkeypatch.setattr(results, "_recipe", broken)
    monkeypatch.setattr(results, "check_files", broken)
    (run,) = Evidence(tmp_path).runs(key)
    with pytest.raises(BnrnnError, match="a file is damaged"):
        assert run.stale


def test_of_runs_that_differ_only_in_their_length_the_longest_counts_once(tmp_path):
    key, cell = "cooijmans2016/table1", {"data": "pmnist", "model": "lstm"}
    short = {"budget.updates": "50"}
    for seed, budget in (("0", {}), ("0", short), ("1", short)):
        put(tmp_path, key, cell | {"seed": seed} | budget, {"test/accuracy": 0.9})
    (path,) = tmp_path.rglob("*budget.updates=50*seed=0/result.json")
    change(path, json.loads(path.read_text()) | {"updates": 50})
    kept = longest(Evidence(tmp_path).runs(key))
    assert sorted((run.seed, run.result.updates) for run in kept) == [("0", 100), ("1", 100)]


def test_a_damaged_or_foreign_result_is_reported_and_left_out_and_the_others_are_read(tmp_path, capsys):
    for seed in range(5):
        put(tmp_path, WORDS, CELL | {"seed": str(seed)}, {"valid/ppl": 120.5}, [{"update": 1, "valid/ppl": 120.5}])
    paths = sorted((tmp_path / WORDS).glob(f"*/*/{FILE}"))
    paths[0].write_text(paths[0].read_text().replace("120.5", "120.7"))
    paths[1].write_bytes(b"\xff\xfe")
    paths[2].write_text("[1, 2]")
    (paths[3].parent / "metrics.jsonl").write_text('{"update": 1}\n5\n')
    assert [run.seed for run in Evidence(tmp_path).runs(WORDS)] == ["4"]
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 4 and all(line.startswith(f"left out: {tmp_path}") for line in reported)
    assert "metrics.jsonl, line 2: expected a record" in reported[3]


def test_a_figure_that_would_be_empty_is_neither_drawn_nor_shown(tmp_path):
    key, cell = "cooijmans2016/fig6_pmnist", {"data": "pmnist", "model": "bn_lstm", "seed": "0"}
    records = [{"update": 50, "train/loss": 1.0}, {"update": 50, "valid/loss": 1.0}]
    for gamma, figures in (("0.02", 0), ("0.001", 2), ("0.3", 2)):  # the figure shows some values besides the paper's
        put(tmp_path, key, {**cell, "model.layer.gamma_init": gamma}, {"test/accuracy": 0.5}, records)
        paths = pages.draw(key, Evidence(tmp_path))
        assert [path.exists() for path in paths] == [True] * figures
        assert tables.render(key, Evidence(tmp_path)).count("![") == figures
