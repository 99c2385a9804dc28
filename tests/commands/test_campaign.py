"""The campaign: real workers on tiny runs, stopped, killed and started again."""

import fcntl
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bnrnn.commands import campaign, workers
from bnrnn.commands.campaign import Options, in_order, parse, render, run_campaign
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.system.locks import LOCK
from bnrnn.train import train
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.loop import Trainer
from bnrnn.training.progress import FIELDS, load_entries, load_known, total_updates
from bnrnn.training.results import Result
from tests.helpers import cuda_untouched
from tests.test_config import EXPERIMENTS
from tests.test_train import interrupt_at, without_time

TINY = ["model.hidden_size=8", "budget.eval_every=20", "budget.eval_batches=1", "budget.population_batches=1",
        "log_every=5"]  # fmt: skip


def entry(*overrides: str, updates: int | str = 5, **keys: object) -> dict[str, object]:
    given = {"experiment": "quickstart", "overrides": [*TINY, f"budget.updates={updates}", *overrides], "seeds": "0"}
    return given | {"claims": ["Q1"], "hours": 0.5} | keys


def write(folder: Path, *entries: dict[str, object]) -> Options:
    """The options of a campaign with these entries, in this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "campaign.yaml").write_text(yaml.safe_dump(list(entries)))
    return Options(hours=1.0, file=folder / "campaign.yaml", out_dir=folder / "results")


def cells_of(options: Options) -> list:
    return in_order(load_entries(options.file, options.out_dir), "")


def hold(folder: Path):
    """An open file that holds the lock of a run, like a process that trains the run."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_a_folder_may_have_an_apostrophe_in_its_name(tmp_path):
    (cell,) = cells_of(write(tmp_path / "o'b", entry("model=lstm")))
    assert cell.folder.is_relative_to(tmp_path / "o'b/results") and cell.cfg.out_dir == str(tmp_path / "o'b/results")


def test_workers_train_the_entries_of_the_other_lane_last(tmp_path):
    given = [entry("model=lstm"), entry("model=bn_lstm", lane="long"), entry("model=lstm", seeds="1", lane="short"),
             entry("model=lstm", seeds="2")]  # fmt: skip
    options = write(tmp_path, *given)
    titles = {lane: [c.title for c in in_order(load_entries(options.file, options.out_dir), lane)]
              for lane in ("", "long", "short")}  # fmt: skip
    first, long, short, last = titles[""]
    assert titles["long"] == [first, long, last, short]
    assert titles["short"] == [first, short, last, long]


@pytest.mark.slow
def test_two_workers_share_the_runs_a_failed_one_is_listed_last_and_the_status_is_1(tmp_path, capfd):
    options = write(tmp_path, entry(f"data_dir={tmp_path}", "data=smnist", "model=lstm"), entry(seeds="0"))
    options.jobs = 2
    assert run_campaign(options) == 1
    output = capfd.readouterr().out
    cells = cells_of(options)
    assert all((cell.folder / "result.json").exists() for cell in cells[1:])
    for cell in cells[1:]:
        assert output.count(f"{cell.title}: ") and output.count("from the start") == 2
        assert output.count(f"{cell.title}: finished") == 1
    assert "resumed" not in output and "Traceback" not in output
    *_, before, last = output.splitlines()
    assert last.startswith(f"{cells[0].title} failed: ") and "run `make data`" in last
    assert "2 of 3 runs are done" in before


@pytest.mark.slow
def test_stopped_when_its_time_is_over_it_resumes_bit_for_bit(tmp_path, monkeypatch, capfd):
    recipe = entry("model=bn_lstm", "data.state_noise=0.1", updates=60)
    whole, stopped = (write(tmp_path / name, recipe) for name in ("whole", "stopped"))
    (reference,), (cell,) = cells_of(whole), cells_of(stopped)

    def now() -> float:
        """The clock jumps past the end as soon as the run waits."""
        return 1e9 if (tmp_path / "waits").exists() else 0.0

    def update(self, batch):
        """Update 30 waits for the signal: a run of 60 updates may be faster than the team looks at its workers."""
        if self.state.update == 30:
            (tmp_path / "waits").touch()
            while self.stop.received is None:
                time.sleep(0.01)
        return original(self, batch)

    original = Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(workers, "time", SimpleNamespace(sleep=time.sleep, monotonic=now))
        patch.setattr(Trainer, "update", update)  # the worker is a fork
        assert run_campaign(stopped) == 0
    output = capfd.readouterr().out
    assert "SIGTERM: saved" in output and f"begun: {cell.title}, " in output and "0 of 1 runs are done" in output
    assert (cell.folder / CHECKPOINT).exists() and not (cell.folder / "result.json").exists()

    assert run_campaign(stopped) == 0
    output = capfd.readouterr().out
    assert f"{cell.title}: " in output and "resumed at update" in output and "1 of 1 runs are done" in output
    undisturbed = train(reference.cfg, reference.folder, reference.overrides)
    assert without_time(cell.folder) == without_time(reference.folder)
    resumed = Result.read(cell.folder / "result.json")
    assert (resumed.metrics, resumed.best_update) == (undisturbed.metrics, undisturbed.best_update)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_workers_and_is_the_exit_status(tmp_path, monkeypatch, capfd, number):
    options = write(tmp_path, entry("model=lstm", seeds="0,1"))
    options.jobs, parent, first, sent = 2, os.getpid(), cells_of(options)[0], tmp_path / "sent"

    def train_until_stopped(cfg, folder, *_):
        with hold(folder):
            if folder == first.folder and not sent.exists():  # once: a second SIGINT interrupts at once
                sent.touch()
                os.kill(parent, number)
            time.sleep(60)

    monkeypatch.setattr(workers, "train", train_until_stopped)
    with pytest.raises(SystemExit) as stopped:
        run_campaign(options)
    assert stopped.value.code == 128 + number
    output = capfd.readouterr().out
    assert output.count("SIGTERM: stopped between two updates or runs") >= 1 and output.endswith("not measured.\n")


def test_the_device_of_a_campaign_is_that_of_its_runs(tmp_path):
    options = write(tmp_path, entry("model=lstm"))
    assert parse(["hours=1", f"file={options.file}", "device=cpu"]).device == "cpu"
    (cell,) = in_order(load_entries(options.file, options.out_dir, "cpu"), "")
    assert cell.cfg.device == "cpu" and cell.folder == cells_of(options)[0].folder
    with pytest.raises(BnrnnError, match="device=tpu is not valid"):
        parse(["hours=1", "device=tpu"])


def test_progress_is_known_without_a_length_and_beside_a_damaged_run(tmp_path, capsys):
    options = write(tmp_path, entry("model=lstm", "+budget.epochs=1", updates="null"))
    (cell,) = cells_of(options)
    assert total_updates(cell, []) is None
    (cell.folder.parent / "data=digits").mkdir(parents=True)
    (cell.folder.parent / "data=digits" / "metrics.jsonl").write_text("{\n")
    assert load_known(cell.folder.parent.parent) == []
    assert "left out: " in capsys.readouterr().err


def test_cuda_is_not_initialized_in_the_process_that_forks_the_workers(tmp_path, monkeypatch, capsys):
    options = write(tmp_path, entry("model=lstm"))
    given = [f"file={options.file}", f"out_dir={options.out_dir}"]
    monkeypatch.setattr(workers, "run_worker", lambda *_: 0)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    for arguments in (["hours=1", "jobs=2", "device=cuda"], ["status"], ["compress"]):
        monkeypatch.setattr(sys, "argv", ["campaign", *arguments, *given])
        with cuda_untouched(), pytest.raises(SystemExit) if arguments[0] == "hours=1" else nullcontext() as ended:
            campaign.main()
        assert ended is None or ended.value.code == 0
    assert capsys.readouterr().out.count("0 of 1 runs are done") == 2


def test_a_killed_worker_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workers, "run_worker", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert run_campaign(write(tmp_path, entry("model=lstm"))) == 1
    assert capsys.readouterr().out.endswith("a worker ended with exit status -9: see its message above\n")


def test_begun_runs_leave_compressed_checkpoints_for_another_checkout(tmp_path, monkeypatch, capsys):
    options = write(tmp_path, entry("model=lstm", seeds="0,1", updates=20))
    first, second = cells_of(options)
    with pytest.raises(SystemExit):
        interrupt_at(11, first.cfg, first.folder)
    campaign.compress(options)
    small = first.folder / f"{CHECKPOINT}.gz"
    assert small.exists() and f"{small}: compressed" in capsys.readouterr().out and not second.folder.exists()
    (first.folder / CHECKPOINT).unlink()
    assert f"begun: {first.title}" in render(load_entries(options.file, options.out_dir), options.out_dir)
    train(first.cfg, first.folder, first.overrides)
    train(first.cfg, tmp_path / "undisturbed", first.overrides)
    assert without_time(first.folder) == without_time(tmp_path / "undisturbed") and not small.exists()
    monkeypatch.setattr(campaign, "LARGEST", 10)
    with pytest.raises(SystemExit):
        interrupt_at(11, second.cfg, second.folder)
    campaign.compress(options)
    assert "more than 10 bytes, not compressed" in capsys.readouterr().out


def test_the_page_shows_finished_running_begun_and_left_runs(tmp_path):
    options = write(tmp_path, entry("model=lstm", seeds="0,1,2,3", updates=20), entry("model=rnn", updates=20, why="x"),
                    entry("model=bn_lstm", "optim.lr=1e37", updates=20))  # fmt: skip
    finished, running, begun, left, other, diverged = cells_of(options)
    for cell in (finished, diverged):
        train(cell.cfg, cell.folder, cell.overrides)
    for cell in (running, begun):
        with pytest.raises(SystemExit):
            interrupt_at(11, cell.cfg, cell.folder)
    with hold(running.folder):
        page = render(load_entries(options.file, options.out_dir), options.out_dir)
    first, second, third = page.splitlines()[2:5]
    assert "| 1 of 4 | seed=1 10/20 | 1 | 1 | 0.0 |" in first and "model=lstm" in first and first.endswith("| Q1 |")
    assert "| 0 of 1 | – | 0 | 1 | 0.0 |" in second, "the speed of the other models"
    assert "| 1 of 1 (1 diverged) | – | 0 | 0 | 0.0 |" in third
    assert f"running: {running.title}, 10/20 updates, 0.0 hours left" in page
    assert f"begun: {begun.title}, 10/20 updates, 0.0 hours left" in page
    assert left.title not in page and other.title not in page
    assert "2 of 6 runs are done. The others take 0.0 core hours" in page
    assert not (left.folder).exists() and not (other.folder).exists()


def test_without_a_measured_speed_the_hours_are_those_of_the_file_and_marked(tmp_path):
    options = write(tmp_path, entry("model=lstm", seeds="0,1", hours=3), entry("model=bn_lstm", hours=40))
    page = render(load_entries(options.file, options.out_dir), options.out_dir)
    assert "| 0 of 2 | – | 0 | 2 | ~3.0 |" in page and "The others take ~43.0 core hours" in page


def test_the_campaign_of_this_repository_is_well_formed(tmp_path):
    entries = yaml.safe_load((ROOT / "conf" / "campaign.yaml").read_text())
    assert all(set(given) <= set(FIELDS) for given in entries)
    existing = [given for given in entries if given["experiment"] in EXPERIMENTS]
    options = write(tmp_path, *existing)
    loaded = load_entries(options.file, options.out_dir)
    assert len(loaded) == len(existing) > 5 and all(e.cells for e in loaded)
    folders = [cell.folder for e in loaded for cell in e.cells]
    assert len(set(folders)) == len(folders), "no run is in two entries"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hours=abc"], "hours=abc is not valid: expected a number of hours above 0"),
        (["hours=-1"], "hours=-1 is not valid"),
        (["hours=0"], "hours=0 is not valid"),
        (["hours=1", "jobs=0"], "jobs=0 is not valid: expected the number of runs at a time"),
        (["hours=1", "file=nowhere.yaml"], "file=nowhere.yaml is not valid: expected a file that exists"),
        (
            ["hours=1", "gobs=2"],
            "gobs=2 is not an option of `train`: use hours=..., jobs=..., device=..., file=..., out_dir=...",
        ),
        (["jobs=1"], "hours=... is missing"),
        (["stats"], "stats is not a command of bnrnn-campaign: use hours=3 jobs=2, status or compress"),
        (["status", "hours=1"], "hours=1 is not an option of `status`: use since=..., file=..., out_dir=..."),
        (["status", "since=today"], "since=today is not valid: expected a time, such as since=2026-11-24T09:00"),
    ],
)
def test_an_impossible_option_is_named(arguments, message):
    with pytest.raises(BnrnnError) as caught:
        parse(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (entry(gpu=1), "entry 1 has the unknown keys gpu: use experiment, seeds"),
        ({"experiment": "quickstart"}, "entry 1 has no seeds: add it"),
        (entry(seeds="0-3"), "entry 1 has seeds: '0-3', expected such as"),
        (entry(claims="C2"), "entry 1 has claims: 'C2', expected a list"),
        (entry(hours=0), "entry 1 has hours: 0, expected a number above 0"),
        (entry(lane="wide"), "entry 1 has lane: 'wide', expected long or short, or left out"),
        (entry("seed=3"), "entry 1 has the override seed=3: use the key"),
        (entry("model"), "entry 1: "),
        (
            entry(experiment="cooijmans2016/table9"),
            "experiment=cooijmans2016/table9 is unknown: conf/experiment/cooijmans2016/table9.yaml",
        ),
    ],
)
def test_what_is_wrong_in_a_campaign_file_is_named(tmp_path, given, message):
    options = write(tmp_path, given)
    with pytest.raises(BnrnnError) as caught:
        load_entries(options.file, options.out_dir)
    assert message in str(caught.value) and str(options.file) in str(caught.value)


def test_a_campaign_file_that_is_no_list_is_named(tmp_path):
    (tmp_path / "campaign.yaml").write_text("experiment: quickstart\n")
    with pytest.raises(BnrnnError, match="must be a list of entries"):
        load_entries(tmp_path / "campaign.yaml", tmp_path)
    (tmp_path / "campaign.yaml").write_text("- [unclosed")
    with pytest.raises(BnrnnError, match="cannot be read"):
        load_entries(tmp_path / "campaign.yaml", tmp_path)


def test_training_has_the_lowest_priority(monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", ["bnrnn-campaign", "hours=1"])
    monkeypatch.setattr(os, "setpriority", lambda *priority: given.append(priority))
    monkeypatch.setattr(campaign, "run_campaign", lambda options: given.append(options.hours))
    with pytest.raises(SystemExit):
        campaign.cli()
    assert given == [(os.PRIO_PROCESS, 0, 19), 1.0]


def test_an_error_of_the_command_is_one_line_without_a_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bnrnn-campaign", "jobs=many"])
    with pytest.raises(SystemExit) as ended:
        campaign.cli()
    assert ended.value.code == "error: jobs=many is not valid: expected the number of runs at a time, such as jobs=2"
