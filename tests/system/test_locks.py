"""Locks of runs: who holds them, and what makes them useless."""

import errno
import fcntl
import shutil
from pathlib import Path

import pytest

from bnrnn.errors import BnrnnError
from bnrnn.system import locks as lock


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


def mounted(tmp_path: Path, monkeypatch, kind: str, options: str) -> None:
    """Make the mount table say that a folder is on this kind of file system."""
    lines = ("disk / ext4 rw 0 0", f"server:/x {tmp_path} {kind} {options} 0 0", "other /o nfs rw 0 0")
    (tmp_path / "mounts").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(lock, "MOUNTS", tmp_path / "mounts")


@pytest.mark.parametrize(
    ("kind", "options", "wrong", "remedy"),
    [
        ("nfs4", "rw,local_lock=flock", "local_lock=flock", "without the option local_lock"),
        ("nfs", "rw,nolock", "nolock", "without the options nolock and local_lock"),
        ("lustre", "rw,localflock", "localflock", "with the option flock"),
    ],
)
def test_locks_that_hold_only_within_a_machine_are_named(tmp_path, monkeypatch, kind, options, wrong, remedy):
    mounted(tmp_path, monkeypatch, kind, options)
    with pytest.raises(lock.NoLocks, match=f"{kind}, mounted at {tmp_path} with {wrong}: .* Mount it {remedy}"):
        lock.check_locks(tmp_path)
    for kind, options in (("nfs4", "rw,local_lock=none"), ("lustre", "rw,flock"), ("ext4", "rw")):
        mounted(tmp_path, monkeypatch, kind, options)
        lock.check_locks(tmp_path)
