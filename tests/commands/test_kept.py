"""The core hours that were kept since a moment, in a repository with two commits."""

import subprocess
import time
from datetime import datetime

import pytest

from bnrnn.commands.kept import render_kept
from bnrnn.errors import BnrnnError
from bnrnn.train import train
from bnrnn.training.results import FILE, Result
from tests.test_train import interrupt_at, short


def commit(folder, when: float) -> None:
    date = {"GIT_AUTHOR_DATE": f"{when:.0f} +0000", "GIT_COMMITTER_DATE": f"{when:.0f} +0000"}
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["add", "-A"], [*who, "commit", "-qm", "runs"]):
        subprocess.run(["git", *command], cwd=folder, check=True, env={"PATH": "/usr/bin:/bin", **date})


def test_what_was_trained_after_the_last_commit_before_the_moment_is_counted(tmp_path, monkeypatch):
    runs, now = tmp_path / "runs", time.time()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    old = train(short("model=lstm"), runs / "old")
    with pytest.raises(SystemExit):
        interrupt_at(2, short("model=lstm"), runs / "new")
    commit(tmp_path, now - 7200)
    finished = train(short("model=lstm"), runs / "new")
    for result, hours in ((old, 9.0), (finished, 0.5)):
        result.cpu_seconds = 3600 * hours
    finished.write(runs / "new")
    assert (Result.read(runs / "new" / FILE).cpu_seconds, old.cpu_seconds) == (1800, 32400)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    line = render_kept(runs, datetime.fromtimestamp(now - 3600))
    assert "0.5 core hours of updates were kept, of 2.0 that the 2 cores had (25%)" in line
    with pytest.raises(BnrnnError, match="is before the first commit"):
        render_kept(runs, datetime.fromtimestamp(now - 9000))


def test_outside_a_repository_it_is_an_error(tmp_path):
    with pytest.raises(BnrnnError, match="is in no git repository"):
        render_kept(tmp_path, datetime.now())
