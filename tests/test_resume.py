"""Stopping, killing and resuming a run, and processes that are kept out of it."""

import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from bnrnn.commands import campaign
from bnrnn.errors import BnrnnError
from bnrnn.system.locks import LOCK, Locked, is_being_trained
from bnrnn.train import cli, train
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.log import read_jsonl
from bnrnn.training.loop import Trainer
from bnrnn.training.progress import Entry
from bnrnn.training.results import Result
from bnrnn.training.stop import Interrupted, Stop
from tests.helpers import forked
from tests.test_train import interrupt_at, short, without_time


def test_a_compressed_checkpoint_is_small_and_resumes_as_the_checkpoint_does(tmp_path):
    undisturbed = train(short(), tmp_path / "a")
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path / "b")
    path = tmp_path / "b" / CHECKPOINT
    assert not checkpoint.compress(path, most=100) and not checkpoint.compressed(path).exists()
    assert checkpoint.compress(path, most=10**6)
    assert checkpoint.compressed(path).stat().st_size < path.stat().st_size / 2
    path.unlink()
    assert train(short(), tmp_path / "b").metrics == undisturbed.metrics
    assert without_time(tmp_path / "b") == without_time(tmp_path / "a")
    assert not checkpoint.compressed(path).exists()


def test_of_a_checkpoint_and_its_compressed_copy_the_one_with_more_updates_is_resumed(tmp_path, monkeypatch):
    path = tmp_path / CHECKPOINT
    parts = {part: {} for part in checkpoint.PARTS}
    checkpoint.save(path, parts | {"state": {"update": 60}})
    checkpoint.compress(path, most=10**6)
    newer = checkpoint.compressed(path).read_bytes()
    for update, resumed in ((20, 60), (60, 60), (80, 80)):
        checkpoint.save(path, parts | {"state": {"update": update}})
        assert checkpoint.load(path)["state"]["update"] == resumed
        assert checkpoint.existing(path) == (path if update >= 60 else checkpoint.compressed(path))
    checkpoint.save(path, parts | {"state": {"update": 20}})
    monkeypatch.setattr(
        campaign, "load_entries", lambda *_: [Entry("", "", [], 1.0, False, [Cell([], {}, "", tmp_path)])]
    )
    campaign.compress(campaign.Options())
    assert checkpoint.compressed(path).read_bytes() == newer, "the copy that is ahead remains"
    checkpoint.compressed(path).write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(BnrnnError, match=r"checkpoint.pt.gz is not .*: remove it to resume from the other one"):
        checkpoint.load(path)
    path.unlink()
    with pytest.raises(BnrnnError, match=r"checkpoint.pt.gz is not a checkpoint .*: remove it to start the run again"):
        checkpoint.load(path)


def test_a_checkpoint_of_another_config_stops_too(tmp_path):
    with pytest.raises(SystemExit):
        interrupt_at(2, short(), tmp_path)
    with pytest.raises(BnrnnError, match=r"checkpoint.pt was made with another configuration \(grad_clip"):
        train(short("grad_clip=5"), tmp_path)


def test_sigterm_saves_first_and_the_run_resumes_bit_for_bit(tmp_path):
    cfg = short("data.state_noise=0.1")
    whole = train(cfg, tmp_path / "whole")
    for update in (0, 3, 4):  # before the first record, right at an evaluation, between two records
        run_dir = tmp_path / str(update)
        with pytest.raises(Interrupted, match="SIGTERM: saved") as stopped:
            interrupt_at(update, cfg, run_dir)
        assert stopped.value.status == 143
        assert checkpoint.load(run_dir / CHECKPOINT)["state"]["update"] == update + 1
        resumed = train(cfg, run_dir)
        assert resumed.metrics == whole.metrics
        assert without_time(run_dir) == without_time(tmp_path / "whole")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_after_the_last_check_is_not_lost():
    """It arrives while the result is written: the run is finished, and the sweep ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    with pytest.raises(KeyboardInterrupt), Stop():
        signal.raise_signal(signal.SIGINT)
    stop = Stop()
    stop.received = signal.SIGTERM
    with pytest.raises(Interrupted), stop:  # once is enough
        stop.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_save_that_fails_after_a_signal_is_told(tmp_path, monkeypatch, capsys, number):
    def full(*_):
        raise BnrnnError("no room")

    monkeypatch.setattr(checkpoint, "save", full)
    previous = [signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_at(1, short("model=lstm"), tmp_path / "alone", number)
        assert capsys.readouterr().err == "error: no room\n"
        assert "ended by an error: no room" in (tmp_path / "alone/run.log").read_text()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(("batches", "within"), [(2, "valid"), (4, "population statistics")])
def test_a_signal_within_an_evaluation_or_a_population_pass_is_obeyed_there(tmp_path, monkeypatch, batches, within):
    cfg = short("model=bn_lstm", "population_every=1", "budget.eval_batches=3")
    whole = train(cfg, tmp_path / "whole")
    original, seen = Trainer._limited, []

    def limited(self, total, items, most, what):
        for batch in original(self, total, items, most, what):
            seen.append(what)
            if len(seen) == batches:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(Trainer, "_limited", limited)
    with pytest.raises(SystemExit, match="SIGTERM: saved"):
        train(cfg, tmp_path / "run")
    assert len(seen) == batches and seen[-1] == within
    monkeypatch.setattr(Trainer, "_limited", original)
    assert train(cfg, tmp_path / "run").metrics == whole.metrics
    assert without_time(tmp_path / "run") == without_time(tmp_path / "whole")


def test_slurms_warning_saves_first_and_then_reaches_the_handler_of_submitit(tmp_path, monkeypatch):
    cfg, original, called = short(), Trainer.update, []

    def update_and_warn(self, batch):
        if self.state.update == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGTERM)  # which queuing a job again causes
        return original(self, batch)

    def requeue(number, frame):
        called.append(checkpoint.load(tmp_path / CHECKPOINT)["state"]["update"])
        sys.exit(255)

    monkeypatch.setattr(Trainer, "update", update_and_warn)
    previous = signal.signal(signal.SIGUSR2, requeue)
    try:
        with pytest.raises(SystemExit) as left:
            train(cfg, tmp_path)
        assert signal.getsignal(signal.SIGUSR2) == requeue
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert left.value.code == 255 and called == [4]


def test_a_run_that_another_process_finished_before_we_had_the_lock_is_not_made_again(tmp_path, monkeypatch):
    first = train(short(), tmp_path / "a")

    @contextmanager
    def lock_late(run_dir):
        shutil.copy(tmp_path / "a" / "result.json", run_dir)
        yield

    monkeypatch.setattr("bnrnn.train.locked", lock_late)
    assert train(short(), tmp_path / "b") == first
    assert not (tmp_path / "b" / "metrics.jsonl").exists()


def test_a_lock_that_is_held_for_an_instant_does_not_matter_and_one_that_stays_is_an_error_of_its_own(tmp_path):
    assert not is_being_trained(tmp_path) and list(tmp_path.iterdir()) == []
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_being_trained(tmp_path)
        with pytest.raises(Locked, match="is being trained by another process"):
            train(short(), tmp_path)
    with (tmp_path / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as is_being_trained does
        assert not is_being_trained(tmp_path)
        release = threading.Timer(0.08, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        assert train(short(), tmp_path).status == "finished"
        release.join()


def test_kill_9_at_any_moment_and_start_again_is_as_if_nothing_had_happened(tmp_path, capsys):
    overrides = ("data.state_noise=0.1", "budget.updates=40", "budget.eval_every=7", "log_every=3",
                 "model.hidden_size=16", "checkpoint_seconds=0.05", "population_batch_size=300")  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for num_records in (1, 7, 14):
        process = forked(train, short(*overrides), killed)
        while process.is_alive() and len(read_jsonl(killed / "metrics.jsonl")) < num_records:
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL and not (killed / "result.json").exists()
    capsys.readouterr()
    train(short(*overrides), killed)
    assert "resumed at update" in capsys.readouterr().out
    train(short(*overrides), whole)
    assert without_time(killed) == without_time(whole)
    a, b = (Result.read(d / "result.json") for d in (killed, whole))
    assert a.metrics == b.metrics and a.best_update == b.best_update
    a, b = (checkpoint.load(d / MODEL)["model"] for d in (killed, whole))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_second_process_is_kept_out_of_a_run_that_is_being_trained(tmp_path, monkeypatch, capfd):
    arguments = [f"hydra.run.dir={tmp_path}", "model.hidden_size=16", "budget.updates=100000", "log_every=1"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-train", *arguments])
    first = forked(cli)
    while not read_jsonl(tmp_path / "metrics.jsonl"):
        assert first.is_alive()
        time.sleep(0.02)
    with pytest.raises(SystemExit, match="is being trained by another process"):
        cli()
    os.kill(first.pid, signal.SIGINT)  # Ctrl-C
    first.join()
    assert first.exitcode == 130 and "SIGINT: saved; the same command resumes from here" in capfd.readouterr().err
    assert (tmp_path / CHECKPOINT).exists()
