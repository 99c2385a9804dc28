"""Faults of the machine around a run: other machines, and folders and files in which nothing can be written."""

import fcntl
import os
import socket
import subprocess
from pathlib import Path

import pytest

from bnrnn.errors import BnrnnError
from bnrnn.system import locks as lock
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.failures import FAILED, failure
from bnrnn.training.log import LOG
from bnrnn.training.loop import Trainer
from tests.test_train import interrupt_at, short


def mounted(*arguments: str) -> bool:
    """Whether this machine lets us mount a file system."""
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


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
