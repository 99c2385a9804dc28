"""Locks of runs: who holds them, and what makes them useless."""

import errno
import fcntl
import shutil

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
