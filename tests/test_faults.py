"""Faults of the machine around a run: other machines, killed parents, a full disk, and folders that are read-only."""

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.system import locks as lock
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.failures import FAILED, failure
from bnrnn.training.log import LOG, read_jsonl
from bnrnn.training.loop import Trainer
from bnrnn.training.results import METRICS
from tests.test_train import interrupt_at, short, without_time


def mounted(*arguments: str) -> bool:
    """Whether this machine lets us mount a file system."""
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path):
    """A folder, and functions that fill its disk and make room again.

    It is a small file system where we may mount one; elsewhere, no file may then have more than 50 kB.
    """
    folder, limits = tmp_path / "disk", resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.mkdir()
    is_mount, filler = mounted("-t", "tmpfs", "-o", "size=1m", "bnrnn-test", str(folder)), folder / "filler"

    def fill() -> None:
        if not is_mount:
            return resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free() -> None:
        filler.unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    yield folder, fill, free
    free()
    if is_mount:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def read_only(tmp_path):
    """A folder in which nothing can be written. For root it is a file system that is read-only, or is no real one."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
    elif mounted("-t", "tmpfs", "-o", "ro", "bnrnn-test", str(folder)):
        yield folder
        subprocess.run(["umount", folder], check=True)
    else:
        yield Path("/proc")


def test_a_full_disk_is_one_message_and_the_run_resumes_when_there_is_room(disk, tmp_path, monkeypatch):
    folder, fill, free = disk
    cfg, run, original = short("checkpoint_seconds=0"), folder / "run", Trainer.update
    whole = train(cfg, tmp_path / "whole")

    def update(self, batch):
        if self.state.update == 4:
            fill()
        return original(self, batch)

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(BnrnnError, match=r"disk/run/.+ cannot be written \(.+\): make room"):
        train(cfg, run)
    assert checkpoint.load(run / CHECKPOINT)["state"]["update"] == 4
    with pytest.raises(BnrnnError, match=r"disk/run/.+ cannot be written \(.+\): make room"):
        train(cfg, run)
    free()
    monkeypatch.undo()
    assert train(cfg, run).metrics == whole.metrics
    assert without_time(run) == without_time(tmp_path / "whole")
    assert {p.name for p in run.iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_a_read_only_folder_is_one_message(read_only):
    with pytest.raises(BnrnnError, match=r"run cannot be written \(.+\): make room or make it writable"):
        train(short(), read_only / "run")
    assert not (read_only / "run").exists()


def on_another_machine(action) -> int:
    """Fork a process in which this machine has another name. Returns its id."""
    child = os.fork()
    if child == 0:
        socket.gethostname = lambda: "node7"
        try:
            action()
        finally:
            os._exit(0)
    return child


def test_a_second_start_on_another_machine_is_refused_and_says_where_the_first_runs(tmp_path):
    def hold():
        with lock.locked(tmp_path):
            time.sleep(60)

    child = on_another_machine(hold)
    while b"node7" not in (tmp_path / lock.LOCK).read_bytes() if (tmp_path / lock.LOCK).exists() else True:
        time.sleep(0.005)
    try:
        with pytest.raises(lock.Locked, match=rf"another process \(process {child} on node7\): wait for it or stop it"):
            train(short(), tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert train(short(), tmp_path).status == "finished"  # a killed process holds no lock, whatever its file says


def test_where_machines_do_not_share_locks_the_first_process_stops_before_it_writes(tmp_path, monkeypatch):
    whole = train(short(), tmp_path / "whole")
    run, original = tmp_path / "run", Trainer.update

    def update(self, batch):
        if self.state.update == 3:
            with monkeypatch.context() as patch:  # the other machine does not see our lock, and saves a checkpoint
                patch.setattr(fcntl, "flock", lambda *_: None)
                patch.setattr(Trainer, "update", original)
                os.waitpid(on_another_machine(lambda: interrupt_at(4, short(), run)), 0)
        return original(self, batch)

    monkeypatch.setattr(Trainer, "update", update)
    with pytest.raises(
        BnrnnError, match=r"run.lock was taken \(process \d+ on node7\): its file system does not share"
    ):
        train(short("checkpoint_seconds=0"), run)
    monkeypatch.undo()
    assert checkpoint.load(run / CHECKPOINT)["state"]["update"] == 5  # the other machine's
    assert train(short(), run).metrics == whole.metrics


def test_kill_9_of_a_sweep_with_two_jobs_leaves_no_worker(tmp_path):
    command = [sys.executable, "-m", "bnrnn.commands.sweep", "jobs=2", "experiment=quickstart", "model=lstm",
               "seed=0,1", "budget.updates=1000000", "model.hidden_size=8", f"out_dir={tmp_path}"]  # fmt: skip
    sweep = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runs, end = [], time.monotonic() + 120
    while len(runs) < 2:
        runs = [path.parent for path in tmp_path.glob(f"quickstart/*/*/{METRICS}") if read_jsonl(path)]
        assert sweep.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    assert all(lock.is_being_trained(run) for run in runs)
    sweep.kill()
    sweep.wait()
    end = time.monotonic() + 10
    while any(lock.is_being_trained(run) for run in runs):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
@pytest.mark.parametrize("name", [lock.LOCK, LOG])
def test_a_lock_or_log_that_is_no_regular_file_is_one_message_and_nothing_behind_it_changes(tmp_path, name, kind):
    run, target, path = tmp_path / "run", tmp_path / "target", tmp_path / "run" / name
    run.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("of another")
    with pytest.raises(BnrnnError, match=rf"run/{name} cannot be written \((it is|Is a dir).*\): make room or make it"):
        train(short(), run)
    assert target.read_text() == "of another" if kind == "link" else not target.exists()
    if name == lock.LOCK:
        with pytest.raises(OSError, match=r"it is|Is a directory"):
            lock.is_being_trained(run)
        assert lock.holder(run) == ""


def test_a_message_of_failure_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / FAILED)
    with pytest.raises(OSError, match="it is no regular file"):
        failure(tmp_path)
