"""The lock of a run: only one process may train it, and other processes can check whether one does."""

import errno
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bnrnn.errors import BnrnnError
from bnrnn.system.files import open_regular, writing

LOCK = "run.lock"


MOUNTS = Path("/proc/mounts")
REMEDIES = {  # what makes the locks of a file system hold between machines
    "lustre": "Mount it with the option flock",
    "nfs": "Mount it without the options nolock and local_lock",
    "nfs4": "Mount it without the option local_lock",
    "beegfs": "Set tuneUseGlobalFileLocks = true in its client's configuration",
}


class Locked(BnrnnError):
    """Another process is training the run."""


class NoLocks(BnrnnError):
    """The locks of a file system do not work, so that nothing may be trained there."""


@contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run. The system releases the lock of a killed process. The file says who holds it.

    Yields a function that raises BnrnnError if the lock is no longer ours: the folder was moved, the file was deleted,
    or another machine took the lock, because the file system does not share locks between machines. Another process
    may then train there, so nothing may be written any more. `is_being_trained` also takes the lock for an instant, so
    several attempts are made. Raises Locked if another process trains the run, and NoLocks if the file system has no
    locks.
    """
    path = run_dir / LOCK
    with writing(path):
        file = open_regular(path, "a+b", buffering=0)  # with a buffer, closing it on a full disk would fail once more
    with file:
        for attempt in range(5):
            if attempt > 0:
                time.sleep(0.05)
            if _take(file, fcntl.LOCK_EX, path):
                break
        else:
            found = f" ({text})" if (text := holder(run_dir)) else ""
            raise Locked(f"{run_dir} is being trained by another process{found}: wait for it or stop it")

        own = f"{this_process(os.getpid())}\n".encode()

        def check() -> None:
            if not _is_at(file, path):
                raise BnrnnError(
                    f"{run_dir} was moved, or its {LOCK} deleted, while this process trained there: stopped without "
                    "writing there again. Move the folder back, and the same command resumes from its last checkpoint"
                )
            if path.read_bytes() != own:
                raise BnrnnError(
                    f"{path} was taken ({holder(run_dir)}): its file system does not share locks between machines. "
                    "Stopped without writing there again, so that the other process can continue. Train a run on one "
                    "machine only, or use an out_dir on a file system that shares locks"
                )

        with writing(path):
            file.truncate(0)
            if file.write(own) < len(own):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        check()
        yield check


def is_being_trained(run_dir: Path) -> bool:
    """Whether a process holds the lock of the run. Creates no file; several processes can call it at the same time.

    Raises NoLocks if the file system has no locks, and OSError if the lock is no regular file.
    """
    path = run_dir / LOCK
    try:
        file = open_regular(path, "rb")
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
        system, point, _ = _mount(path)
        raise NoLocks(
            f"{path} cannot be locked ({error.strerror}): the file system {system} at {point} has no locks (flock). "
            f"{_remedy(system)}, so that two processes never train the same run"
        ) from error
    return True


def check_locks(folder: Path) -> None:
    """Raise NoLocks if locks in this folder do not work, or hold only within one machine by the mount's options.

    For tasks of a cluster, which train on several machines. The folder must exist.
    """
    kind, point, options = _mount(folder)
    local = {"nolock", "local_lock=flock", "local_lock=all", "localflock"} & options
    if local:
        raise NoLocks(
            f"{folder} is on the file system {kind}, mounted at {point} with {', '.join(sorted(local))}: its locks "
            f"hold only within one machine. {_remedy(kind)}, so that two machines never train the same run"
        )
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".lock") as file:
        _take(file.file, fcntl.LOCK_EX, Path(file.name))


def _remedy(kind: str) -> str:
    """What to do about a file system whose locks do not work, as the beginning of a sentence."""
    return f"{REMEDIES[kind]}, or use another out_dir" if kind in REMEDIES else "Use an out_dir on another one"


def _mount(path: Path) -> tuple[str, str, set[str]]:
    """The kind of the file system of a path, where it is mounted, and its options. Unknown outside Linux."""
    found, path = ("of this folder", str(path), set[str]()), path.resolve()
    if not MOUNTS.exists():
        return found
    for line in MOUNTS.read_text(errors="replace").splitlines():
        _, point, kind, options, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and (found[2] == set() or len(point) >= len(found[1])):
            found = kind, point, set(options.split(","))
    return found


def this_process(number: int) -> str:
    """How a lock names a process of this machine, with the Slurm job if it belongs to one."""
    return f"process {number} on {socket.gethostname()}" + (f", Slurm job {job}" if (job := slurm_job()) else "")


def slurm_job() -> str:
    """The Slurm job of this process, such as 12, or 12_0 for a task of an array; it is also known to squeue. Or ""."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def holder(run_dir: Path) -> str:
    """The process that holds the lock of a run, or held it last. Empty if the file does not say."""
    try:
        with open_regular(run_dir / LOCK, "rb") as file:
            return file.read(200).decode(errors="replace").strip()
    except OSError:
        return ""


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
