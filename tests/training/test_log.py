import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.train import cli
from bnrnn.training import log, mirror
from bnrnn.training.log import RunLog, read_jsonl
from bnrnn.training.measure import last_lines
from bnrnn.training.results import Result
from tests.helpers import composed

RUN = ("budget=smoke", "log_every=1", "model.hidden_size=16")


@pytest.fixture
def run_command(tmp_path, monkeypatch, capfd):
    """The command of training, in this process. Returns what it and the processes that it starts print."""

    def run(*overrides: str) -> str:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["bnrnn-train", f"out_dir={tmp_path}", *RUN, *overrides])
        capfd.readouterr()
        cli()
        return capfd.readouterr().out

    return run


@pytest.mark.slow
def test_wandbs_own_reader_finds_the_record_in_the_offline_run(tmp_path, run_command):
    run_command("wandb.mode=offline", "seed=5", "model=bn_lstm")
    run_dir = next(tmp_path.glob("default/smoke/*model=*"))
    (wandb_dir,) = run_dir.parent.glob("wandb/offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(wandb_dir)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]

    (run,) = (r["run"] for r in records if r["type"] == "run")
    config = run["config"]["update"]
    config.pop("_wandb")
    assert config == Result.read(run_dir / "result.json").config
    assert run["run_group"] == "default" and run["job_type"] == "train"
    assert run["display_name"] == "hidden_size16-s5-bn_lstm-digits"
    assert re.fullmatch(r"16hidden_size-s5-bn_lstm-digits-[0-9a-f]{4}", run["run_id"])
    assert wandb_dir.name.endswith(run["run_id"])
    assert run["tags"] == ["default", "bn_lstm", "digits"] and run["notes"].startswith("BN-LSTM on ")

    history = {r["history"]["step"]["num"]: r["history"]["item"] for r in records if r["type"] == "history"}
    ours: dict[int, dict[str, float]] = {}
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        ours.setdefault(record.pop("update"), {}).update(record)
    theirs = {u: {k: v for k, v in item.items() if not k.startswith("_")} for u, item in history.items()}
    assert all(item.pop("update") == u for u, item in theirs.items())
    extra = {k: item.pop(k) for item in theirs.values() for k in list(item) if k.startswith(("gamma/", "updates_"))}
    assert extra["gamma/layer.layers.0.bn_c"] == pytest.approx(0.1, abs=0.01) and extra["updates_per_second"] > 0
    last = theirs[max(theirs)]
    image = {k.partition(".")[2]: last.pop(k) for k in list(last) if k.startswith("curves.")}
    assert image["_type"] == "image-file" and (wandb_dir / "files" / image["path"]).read_bytes().startswith(b"\x89PNG")
    assert min(name for item in theirs.values() for name in item) == "Valid/accuracy"  # the first in wandb leet
    assert theirs == {u: mirror.in_wandb(item) for u, item in ours.items()}

    summary = {k: v for r in records if r["type"] == "summary" for k, v in r["summary"].get("update", {}).items()}
    assert summary["status"] == "finished"
    found = {n: max(r[n] for r in ours.values() if n in r) for n in ("valid/accuracy", "train/grad_norm_max")}
    assert found == {
        "valid/accuracy": summary["Valid/accuracy"],
        "train/grad_norm_max": summary["train/grad_norm_max"]["max"],
    }
    assert summary["test/accuracy"] == Result.read(run_dir / "result.json").metrics["test/accuracy"]


SWEEP = ["hydra.mode=MULTIRUN", "seed=4", "wandb.mode=disabled"]


def names(tmp_path: Path) -> list[str]:
    return sorted(path.parent.name for path in tmp_path.glob("default/smoke/*/result.json"))


def test_a_sweep_counts_its_cells_and_skips_the_finished_ones(tmp_path, run_command):
    run_command(*SWEEP, "model=lstm,bn_lstm")
    cells = sorted(tmp_path.glob("default/smoke/*/result.json"))
    assert names(tmp_path) == [f"log_every=1,model.hidden_size=16,model={m},seed=4" for m in ("bn_lstm", "lstm")]
    assert Result.read(cells[0]).overrides["model"] == "bn_lstm"
    written = cells[0].stat().st_mtime_ns
    cells[1].unlink()
    output = run_command(*SWEEP, "model=lstm,bn_lstm")
    assert re.search(r"\[run 1 of 2\] \S+model=lstm,seed=4: from the start", output)
    assert re.search(r"\[run 2 of 2\] \S+model=bn_lstm,seed=4: already finished", output)
    assert cells[0].stat().st_mtime_ns == written


class DeadWandb:
    """A run of wandb whose process has ended."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls, self.summary = broken, [], self

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise ConnectionResetError("Connection lost\nat some place")

    def log(self, values, step) -> None:
        self._call("log")

    def update(self, values) -> None:
        self._call("update")

    def finish(self, exit_code) -> None:
        self._call("finish")


@pytest.mark.parametrize(("broken", "calls"), [("log", 1), ("update", 3), ("finish", 4)])
def test_a_dead_process_of_wandb_is_one_line_of_warning(tmp_path, capsys, broken, calls):
    wandb_run = DeadWandb(broken, "finish")
    with RunLog(tmp_path, "a run:", wandb_run=wandb_run) as log:
        log.record(1, {"train/loss": 1.0})
        log.record(2, {"train/loss": 0.5})
        log.finish("finished", {})
    warning = "warning: wandb has ended (ConnectionResetError: Connection lost); the run continues without it"
    assert capsys.readouterr().out == f"a run: {warning}\n"
    assert len(wandb_run.calls) == calls and len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {re.escape(warning)}\n", (tmp_path / "run.log").read_text())


@pytest.mark.parametrize("system", [False, True])
def test_a_run_that_wandb_cannot_upload_is_recorded_offline(tmp_path, monkeypatch, system):
    modes, warnings = [], []

    class Offline:
        def define_metric(self, *_, **__) -> None:
            pass

    def init(mode, resume, settings, **given):
        modes.append((mode, resume))
        assert settings.x_disable_stats == settings.x_disable_machine_info == (not system)
        if mode == "online":
            raise wandb.errors.UsageError("No API key configured.\nat some place")
        return Offline()

    monkeypatch.setattr(wandb, "init", init)
    cfg = composed("wandb.mode=online", f"wandb.system={system}")
    assert isinstance(mirror.start(cfg, {}, tmp_path, {}, "a", warnings.append), Offline)
    assert modes == [("online", "allow"), ("offline", None)]
    (warning,) = warnings
    assert warning.startswith("warning: wandb cannot upload (No API key configured); it records offline")


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("error", [wandb.errors.CommError("too late"), TimeoutError("too late"), OSError(28, "full")])
def test_a_run_starts_without_wandb_if_wandb_cannot_start(tmp_path, monkeypatch, mode, error):
    def init(**given):
        raise error

    monkeypatch.setattr(wandb, "init", init)
    warnings = []
    assert mirror.start(composed(f"wandb.mode={mode}"), {}, tmp_path, {}, "a", warnings.append) is None
    assert warnings[-1].endswith("; the run continues without it") and len(warnings) == 1 + (mode == "online")


def test_a_figure_that_cannot_be_drawn_for_wandb_is_a_line_of_warning(tmp_path):
    shown = DeadWandb()
    with RunLog(tmp_path, wandb_run=shown) as log:
        log.show("curves", 1, lambda: 1 / 0)
    assert "warning: the figure curves is missing in wandb (ZeroDivisionError" in (tmp_path / "run.log").read_text()
    assert shown.calls  # wandb is still on


def test_a_file_that_cannot_be_closed_does_not_replace_the_reason_for_which_a_run_ends(tmp_path):
    class Full:
        def close(self) -> None:
            raise OSError(28, "No space left on device")

    def end(error: BnrnnError | None) -> None:
        with RunLog(tmp_path) as log:
            log.file.close()
            log.file = Full()
            if error is not None:
                raise error

    with pytest.raises(BnrnnError, match="the reason"):
        end(BnrnnError("the reason"))
    with pytest.raises(BnrnnError, match=r"metrics.jsonl cannot be written"):
        end(None)


def test_wandb_does_not_replace_the_reason_for_which_a_run_ends(tmp_path):
    with pytest.raises(SystemExit, match="saved"), RunLog(tmp_path, wandb_run=DeadWandb("finish")):
        raise SystemExit("saved")


def test_records_after_the_checkpoint_are_dropped_and_a_line_cut_off_by_a_kill_is_no_record(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        for update in (1, 2, 3):
            log.record(update, {"train/loss": 1.0 / update})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "train/lo')
    assert [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    with RunLog(tmp_path, num_records=2) as log:
        log.record(3, {"train/loss": float("nan")})
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["update"] for r in records] == [1, 2, 3]
    assert records[-1]["train/loss"] is None
    monkeypatch.setattr("bnrnn.training.log.MOST", 50)
    with pytest.raises(BnrnnError, match=r"metrics.jsonl is not a file of metrics \(more than 50 bytes\)"):
        read_jsonl(tmp_path / "metrics.jsonl")


def test_a_line_that_nobody_reads_does_not_end_a_run(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(3):
            log.say("a line")
        assert os.fstat(writer).st_rdev == os.stat(os.devnull).st_rdev  # what follows goes nowhere


def test_it_is_quiet_where_there_is_no_terminal(tmp_path, capsys):
    with RunLog(tmp_path, title="[run 1 of 2]") as log:
        assert list(log.track(range(3), 3, "batches")) == [0, 1, 2]
        log.say("one line")
    captured = capsys.readouterr()
    assert captured.out == "[run 1 of 2] one line\n"
    assert captured.err == ""


@pytest.mark.parametrize(("terminal", "variable", "shown"), [(True, "", True), (False, "", False), (True, "1", False)])
def test_a_progress_bar_is_shown_in_a_terminal_unless_others_would_fight_for_its_line(
    tmp_path, monkeypatch, terminal, variable, shown
):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TQDM_DISABLE", variable)
    with RunLog(tmp_path, "[run 1 of 2]") as run_log:
        assert list(run_log.track("abc", 3, "validation")) == ["a", "b", "c"]
    assert ("[run 1 of 2] validation:   0%" in screen.getvalue() and "/3" in screen.getvalue()) == shown
    assert shown or screen.getvalue() == ""


def test_names_in_wandb_begin_with_what_differs_and_spell_models_as_their_files():
    cfg = composed("model.layer.gamma_init=0.3", "seed=1")
    given = {"model.layer.gamma_init": "0.3", "data": "pmnist", "seed": "1", "budget.updates": "3"}
    assert mirror.display_name(cfg, given) == "gamma0.3-s1-bn_lstm-pmnist"
    assert re.fullmatch(r"0\.3gamma-s1-bn_lstm-pmnist-[0-9a-f]{4}", mirror.new_id(cfg, given))
    assert mirror.display_name(cfg, {}) == "bn_lstm-digits-s1"
    assert mirror.display_name(cfg, {"setting": "small", "data": "ptb_word"}) == "small-ptb_word-s1"
    assert mirror.new_id(cfg, given) != mirror.new_id(cfg, given)


def test_the_last_lines_of_a_run_are_a_short_table():
    names = ("valid/loss", "valid/accuracy", "test/loss", "test/accuracy")
    plain = dict(zip(names, (0.5, 0.9, 0.25, 0.875), strict=True))
    assert last_lines("finished", 2000, 1500, plain, "accuracy") == [
        "finished at update 2,000; the model of update 1,500 has:",
        "  split  loss    accuracy",
        "  valid  0.5000  0.9000  ",
        "  test   0.2500  0.8750  ",
    ]
    kinds = {f"{name}_{kind}": value + 1 for kind in ("population_statistics", "batch_statistics", "last")
             for name, value in plain.items()}  # fmt: skip
    lines = last_lines("finished", 2000, 1500, plain | kinds, "accuracy")
    assert lines[0].endswith("; 8 more numbers in result.json:") and len(lines) == 6
    assert lines[3] == "  valid  of the population  1.5000  1.9000  " and lines[5].split()[-2:] == ["0.2500", "0.8750"]
    assert max(map(len, lines)) <= 100
    assert last_lines("diverged", 30, 0, {}, "accuracy") == ["diverged at update 30"]
