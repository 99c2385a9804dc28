"""The failure of a run: its message stands in a file of the run's folder, so that all workers and people see it."""

import os
from pathlib import Path

from bnrnn.system.files import atomic_write, open_regular

FAILED = "failed.txt"
MOST = 1 << 16  # letters of a message


def record_failure(run_dir: Path, message: str) -> None:
    """Write the message of a failed run. Raises BnrnnError if the system refuses to write."""
    with atomic_write(run_dir / FAILED) as file:
        file.write(f"{message}\n".encode())


def failure(run_dir: Path, since: float = 0.0) -> str | None:
    """The message of a run that failed at this time (seconds since 1970) or later; None if it did not."""
    path = run_dir / FAILED
    try:
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            return file.read(MOST).strip() if os.fstat(file.fileno()).st_mtime >= since else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def clear_failure(run_dir: Path) -> None:
    """Remove the message, because the run is tried again."""
    (run_dir / FAILED).unlink(missing_ok=True)
