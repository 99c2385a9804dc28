"""The short form of `make stress`, and single faults of runs: checkpoints, records, locks and pieces."""

import errno
import fcntl
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.system import locks as lock
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, MODEL
from bnrnn.training.log import METRICS
from bnrnn.training.options import check_options
from bnrnn.training.results import Result
from bnrnn.training.state import Clock, TrainState
from bnrnn.training.stop import Stop
from tests.test_train import interrupt_at, short


@pytest.mark.slow
def test_killed_trainings_end_as_undisturbed_ones_and_damaged_inputs_are_named():
    """In a process of its own: it replaces the checksums of the published corpora by those of tiny ones."""
    command = [sys.executable, "-m", "tests.stress", "kills=2", "inputs=22", "seed=1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {name: int(number) for number, name in re.findall(r"^ *(\d+) (.+)$", run.stdout, re.MULTILINE)}
    assert counts["kills"] == 2 and counts["equal"] >= 1
    assert counts["named"] >= 15 and sum(v for k, v in counts.items() if ": named" in k) == counts["named"]
    kinds = {name.rpartition(": ")[0] for name in counts if ": " in name}
    assert len(kinds) == 22


def test_no_flipped_bit_of_a_checkpoint_is_accepted_and_old_files_are(tmp_path):
    path, rng = tmp_path / MODEL, random.Random(0)
    saved = {"model": {"w": torch.arange(100.0)}, "config": {}}
    checkpoint.save(path, saved)
    good = path.read_bytes()
    assert torch.load(path, weights_only=True)["config"] == {}  # still an ordinary file of torch
    for _ in range(300):
        bit = rng.randrange(8 * len(good))
        path.write_bytes(good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :])
        with pytest.raises(BnrnnError, match=r"model.pt is not a checkpoint \(.*\): remove it to start the run again"):
            checkpoint.load(path)
    torch.save(saved, path)  # from before there were checksums
    assert torch.equal(checkpoint.load(path)["model"]["w"], torch.arange(100.0))
    old = path.read_bytes()
    position = old.index(torch.arange(100.0).numpy().tobytes()) + 200
    path.write_bytes(old[:position] + b"\x55" + old[position + 1 :])
    with pytest.raises(BnrnnError, match=r"model.pt is not a checkpoint"):
        checkpoint.load(path)
    path.write_bytes(good.replace(b"bnrnn 1 sha256", b"bnrnn 2 sha256"))
    with pytest.raises(BnrnnError, match=r"does not have its checksum|newer bnrnn"):
        checkpoint.load(path)


def test_a_model_in_the_place_of_a_checkpoint_is_named(tmp_path):
    checkpoint.save(tmp_path / CHECKPOINT, {"model": {}, "config": {}})
    with pytest.raises(BnrnnError, match=r"checkpoint.pt is not a checkpoint \(expected state, model, optimizer"):
        checkpoint.load(tmp_path / CHECKPOINT)


def test_records_that_are_not_those_of_the_checkpoint_stop_the_run(tmp_path):
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path)
    path = tmp_path / METRICS
    good = path.read_bytes()
    for damaged in (good[: good.index(b"\n") + 1], good.replace(b"2.", b"3.", 1)):
        path.write_bytes(damaged)
        with pytest.raises(BnrnnError, match=r"metrics.jsonl is damaged: it has .*to which the checkpoint belongs"):
            train(short(), tmp_path)
        assert path.read_bytes() == damaged and (tmp_path / CHECKPOINT).exists()


def test_a_piece_that_differs_is_refused_unless_it_is_asked_for_and_all_are_listed(tmp_path):
    with pytest.raises(SystemExit):
        interrupt_at(4, short("backend=cpu"), tmp_path)
    with pytest.raises(BnrnnError, match=r"begun in another way \(backend: cpu there, reference now\)"):
        train(short("backend=reference"), tmp_path)
    result = train(short("backend=reference", "resume=changed"), tmp_path)
    assert [(p["update"], p["backend"]) for p in result.pieces] == [(0, "cpu"), (5, "reference")]
    assert Result.read(tmp_path / "result.json") == result


def test_a_run_begun_before_there_were_pieces_resumes(tmp_path):
    whole = train(short(), tmp_path / "a")
    with pytest.raises(SystemExit):
        interrupt_at(4, short(), tmp_path / "b")
    saved = checkpoint.load(tmp_path / "b" / CHECKPOINT)
    del saved["records_sha256"], saved["state"]["pieces"], saved["state"]["cpu_seconds"]
    torch.save(saved, tmp_path / "b" / CHECKPOINT)
    result = train(short(), tmp_path / "b")
    assert result.metrics == whole.metrics and result.cpu_seconds is None and whole.cpu_seconds is not None
    assert [piece["update"] for piece in result.pieces] == [5]


def test_a_checkpoint_left_beside_a_result_is_removed_by_the_next_start(tmp_path):
    train(short(), tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"left behind")
    train(short(), tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_folder_that_moves_or_a_deleted_lock_stops_the_run_before_it_writes(tmp_path):
    for spoil in (lambda run: shutil.move(run, tmp_path / "moved"), lambda run: (run / lock.LOCK).unlink()):
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        with lock.locked(run) as check:
            check()
            spoil(run)
            with pytest.raises(BnrnnError, match=r"run was moved, or its run.lock deleted"):
                check()


def test_the_lock_says_who_holds_it_and_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    refused = pytest.raises(lock.Locked, match=r"by another process \(process \d+ on .+\): wait")
    with lock.locked(tmp_path), refused, lock.locked(tmp_path):
        pass

    def unsupported(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for use in (lambda: lock.locked(tmp_path).__enter__(), lambda: lock.is_being_trained(tmp_path)):
        with pytest.raises(BnrnnError, match=r"run.lock cannot be locked \(No locks available\): the file system"):
            use()


def test_the_time_for_which_a_process_was_stopped_does_not_count():
    with Stop() as stop:
        for expected, signals in ((0.05, ()), (0.0, (signal.SIGCONT,))):
            state, clock = TrainState("", []), Clock(stop)
            time.sleep(0.05)
            for number in signals:
                signal.raise_signal(number)
            clock.add_to(state)
            assert state.seconds == pytest.approx(state.cpu_seconds) if signals else state.seconds >= expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("budget.updates=2.5", "budget.updates=2.5 is not valid: expected a whole number from 1, or null"),
        ("budget.updates=-3", "budget.updates=-3 is not valid"),
        ("budget.eval_every=0", "budget.eval_every=0 is not valid"),
        ("batch_size=0", "batch_size=0 is not valid: expected a whole number from 1"),
        ("num_threads=100000", "num_threads=100000 is not valid: expected a whole number from 1 to 512"),
        ("seed=abc", "seed=abc is not valid: expected a whole number from 0"),
        ("checkpoint_seconds=abc", "checkpoint_seconds=abc is not valid: expected a number from 0"),
        ("wandb.mode=loud", "wandb.mode=loud is not valid: expected offline or online or disabled"),
        ("optim.lr=-1", "optim.lr=-1 is not valid: expected a number above 0"),
        ("resume=maybe", "resume=maybe is not valid: expected same or changed"),
        ("+budget.updatez=3", "budget.updatez is no option: did you mean budget.updates"),
        ("+batchsize=3", "batchsize is no option: did you mean batch_size"),
    ],
)
def test_an_option_that_cannot_be_trained_is_refused_before_anything_starts(override, message):
    with pytest.raises(BnrnnError) as error:
        check_options(short(override))
    assert message in str(error.value)
