"""The lock of a run: only one process may train it, and other processes can check whether one does."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bnrnn.errors import BnrnnError

LOCK = "run.lock"


class Locked(BnrnnError):
    """Another process is training the run."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run. The system releases the lock of a killed process.

    `is_being_trained` also takes the lock for an instant, so several attempts are made. Raises Locked if another
    process trains the run.
    """
    with (run_dir / LOCK).open("w") as file:
        for attempt in range(5):
            if attempt > 0:
                time.sleep(0.05)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        else:
            raise Locked(f"{run_dir} is being trained by another process: wait for it or stop it")
        yield


def is_being_trained(run_dir: Path) -> bool:
    """Whether a process holds the lock of the run. Creates no file; several processes can call it at the same time."""
    try:
        file = (run_dir / LOCK).open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
