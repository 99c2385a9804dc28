"""The lock of a run: one process trains it, and others can ask whether one does."""

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
    """Keep a second process out of the same cell; a killed process leaves no lock behind.

    A process that only asks whether the lock is held (`is_being_trained`) has it for an instant, so one failure is not
    enough.
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
    """Whether a process holds the lock of the run. The question creates no file, and two that ask do not collide."""
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
