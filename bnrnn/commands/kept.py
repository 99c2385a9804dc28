"""How much of the time that the processors had since a moment was spent on updates of runs that are kept."""

import os
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

from bnrnn.errors import BnrnnError
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT, compressed
from bnrnn.training.results import FILE, METRICS, Result


def render_kept(out_dir: Path, since: datetime) -> str:
    """One line: the core hours of updates that were added to the runs in a folder since a moment, of those there were.

    The last commit before the moment tells what the runs had then. Raises BnrnnError outside a git repository, or if
    there is no such commit.
    """
    begun = since.timestamp()
    commit = _git(out_dir, "rev-list", "-1", f"--before={begun:.0f}", "HEAD").decode().strip()
    if not commit:
        raise BnrnnError(f"since={since.isoformat()} is before the first commit: give a later time")
    seconds = 0.0
    for path in out_dir.rglob(METRICS):
        if path.stat().st_mtime >= begun:
            seconds += _seconds(path.parent) - _seconds_at(commit, path.parent)
    there_were = (time.time() - begun) * (os.cpu_count() or 1)
    return (
        f"Since {since:%Y-%m-%d %H:%M}: {seconds / 3600:.1f} core hours of updates were kept, of "
        f"{there_were / 3600:.1f} that the {os.cpu_count()} cores had ({seconds / there_were:.0%})."
    )


def _seconds(folder: Path) -> float:
    """The time of all updates of a run, from its result or its checkpoint; 0 if it has neither.

    It is processor time or, for runs of which a part did not record that, the time on the clock.
    """
    if (folder / FILE).exists():
        result = Result.read(folder / FILE)
        return result.seconds if result.cpu_seconds is None else result.cpu_seconds
    saved = checkpoint.load(folder / CHECKPOINT)
    if saved is None:
        return 0.0
    cpu = saved["state"].get("cpu_seconds")
    return saved["state"]["seconds"] if cpu is None else cpu


def _seconds_at(commit: str, folder: Path) -> float:
    """The same at a commit."""
    names = (FILE, compressed(Path(CHECKPOINT)).name)
    listed = _git(folder, "ls-tree", "--name-only", commit, "./").decode().splitlines()
    with tempfile.TemporaryDirectory() as copy:
        for name in {Path(line).name for line in listed} & set(names):
            Path(copy, name).write_bytes(_git(folder, "show", f"{commit}:./{name}"))
        return _seconds(Path(copy))


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BnrnnError(
            f"{folder} is in no git repository that can be read ({error}): since=... needs one; leave it out"
        ) from None
