"""The lock of a run: only one process may train it, and other processes can check whether one does."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bnrnn.errors import BnrnnError
from bnrnn.files import writing

LOCK = "run.lock"


class Locked(BnrnnError):
    """Another process is training the run."""


@contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run. The system releases the lock of a killed process. The file says who holds it.

    Yields a function that raises BnrnnError if the lock is no longer ours: the folder was moved, the file was deleted,
    or another machine took the lock, because the file system does not share locks between machines. Another process
    may then train there, so nothing may be written any more. `is_being_trained` also takes the lock for an instant, so
    several attempts are made. Raises Locked if another process trains the run, and
    BnrnnError if the file system has no locks.
    """
    path = run_dir / LOCK
    with writing(path):
        file = path.open("a+b")
    with file:
        for attempt in range(5):
            if attempt > 0:
                time.sleep(0.05)
            if _take(file, fcntl.LOCK_EX, path):
                break
        else:
            raise Locked(f"{run_dir} is being trained by another process{_holder(path)}: wait for it or stop it")

        holder = f"process {os.getpid()} on {socket.gethostname()}\n".encode()

        def check() -> None:
            if not _is_at(file, path):
                raise BnrnnError(
                    f"{run_dir} was moved, or its {LOCK} deleted, while this process trained there: stopped without "
                    "writing there again. The same command resumes from the last checkpoint, wherever it now is"
                )
            if path.read_bytes() != holder:
                raise BnrnnError(
                    f"{path} was taken{_holder(path)}: its file system does not share locks between machines. Stopped "
                    "without writing there again, so that the other process can train on. Start a run on one machine"
                )

        with writing(path):
            file.truncate(0)
            file.write(holder)
            file.flush()
        check()
        yield check


def is_being_trained(run_dir: Path) -> bool:
    """Whether a process holds the lock of the run. Creates no file; several processes can call it at the same time.

    Raises BnrnnError if the file system has no locks.
    """
    path = run_dir / LOCK
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        return not _take(file, fcntl.LOCK_SH, path)


def _take(file: IO[bytes], kind: int, path: Path) -> bool:
    """Try to take a lock. Returns whether it succeeded."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise BnrnnError(
            f"{path} cannot be locked ({error.strerror}): its file system has no locks (flock). Use an out_dir on "
            "another one, so that two processes never train the same run"
        ) from error
    return True


def _holder(path: Path) -> str:
    """Who holds the lock, as its file says: in brackets, or empty if it does not say."""
    try:
        text = path.read_bytes()[:200].decode(errors="replace").strip()
    except OSError:
        return ""
    return f" ({text})" if text else ""


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
