"""result.json: the date and the hardware that it records."""

import subprocess
from datetime import UTC, datetime, timedelta, timezone
from importlib.metadata import version

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_record, write_record
from bnrnn.training import provenance as provenance_module
from bnrnn.training.device import hardware
from bnrnn.training.pieces import joined, note_engine
from bnrnn.training.provenance import environment, provenance, today
from bnrnn.training.results import FILE, Result


class Clock(datetime):
    """Half an hour before midnight in UTC; the next day where the machine is."""

    @classmethod
    def now(cls, tz=None) -> datetime:
        return datetime(2026, 11, 24, 23, 30, tzinfo=UTC).astimezone(tz or timezone(timedelta(hours=2)))


def stored(date: str = "") -> Result:
    return Result("a/b", {}, "finished", 2, 1, {"test/loss": 1.0}, 0.5, 3, ["abc"], {"device": "cpu"}, {}, date=date)


def test_the_date_is_that_of_utc(monkeypatch):
    monkeypatch.setattr("bnrnn.training.provenance.datetime", Clock)
    assert today() == "2026-11-24" == provenance()["date"]


def test_a_commit_says_whether_code_differs_from_it_and_a_wheel_has_its_version(tmp_path, monkeypatch):
    def git(*args: str) -> str:
        name = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *name, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    commit = provenance_module.git_commit.__wrapped__  # without its cache
    monkeypatch.setattr(provenance_module, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() == "unknown"
    (tmp_path / "bnrnn").mkdir()
    (tmp_path / "bnrnn/a.py").write_text("first\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    (tmp_path / "notes.txt").write_text("not code\n")
    assert commit() == git("rev-parse", "HEAD")[:12]
    (tmp_path / "bnrnn/a.py").write_text("second\n")
    assert commit() == git("rev-parse", "HEAD")[:12] + "+changes"
    monkeypatch.setattr(provenance_module, "PACKAGE", tmp_path)
    assert commit() == f"v{version('bnrnn')}"


def test_a_result_keeps_its_date_and_older_ones_have_none(tmp_path):
    stored("2026-11-24").write(tmp_path)
    content = read_record(tmp_path / FILE, "")
    assert content["date"] == "2026-11-24" == Result.read(tmp_path / FILE).date
    write_record(tmp_path / FILE, content | {"date": 20261124})
    with pytest.raises(BnrnnError, match="date is 20261124"):
        Result.read(tmp_path / FILE)
    del content["date"]
    write_record(tmp_path / FILE, content)
    assert Result.read(tmp_path / FILE) == stored()


def test_the_environment_names_the_hardware():
    device = torch.device("cpu")
    assert environment(device)["hardware"] == hardware(device) == provenance()["environment"]["hardware"]


def test_a_run_may_move_to_another_processor_which_its_pieces_tell():
    here = {"hardware": "x86_64", "torch": "2.13.0"}
    there = here | {"hardware": "x86_64 (AMD EPYC, AVX512)"}
    pieces = joined(joined([], 0, "abc", here, "data", "same"), 5, "abc", there, "data", "same")
    assert [(piece["update"], piece["hardware"]) for piece in pieces] == [(0, "x86_64"), (5, there["hardware"])]


def test_a_piece_whose_engine_failed_says_so_and_is_resumed_as_it_was_begun():
    selected = {"backend": "triton", "torch": "2.13.0"}
    pieces = joined([], 0, "abc", selected, "data", "same")
    note_engine(pieces[-1], "triton")
    assert "ran" not in pieces[-1]
    note_engine(pieces[-1], "triton+fused")
    pieces = joined(pieces, 5, "abc", selected, "data", "same")
    assert [(piece["update"], piece["ran"]) for piece in pieces] == [(0, "triton+fused")]
