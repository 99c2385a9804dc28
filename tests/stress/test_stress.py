"""The short form of `make stress`, and readers that it must complain about."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_json
from tests.stress.damage import damage_input
from tests.stress.inputs import Input


@pytest.mark.slow
def test_killed_trainings_end_as_undisturbed_ones_and_damaged_inputs_are_named():
    """In a process of its own: it replaces the checksums of the published corpora by those of tiny ones."""
    command = [sys.executable, "-m", "tests.stress", "kills=2", "inputs=88", "seed=1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {name: int(number) for number, name in re.findall(r"^ *(\d+) (.+)$", run.stdout, re.MULTILINE)}
    assert counts["kills"] == 2 and counts["equal"] >= 1
    assert counts["named"] >= 70 and sum(v for k, v in counts.items() if ": named" in k) == counts["named"]
    assert len({name.rpartition(": ")[0] for name in counts if ": " in name}) == 22


GOOD = '{"a": 12}'


def is_good(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_text(errors="replace") == GOOD


def crash(path: Path) -> None:
    if not is_good(path):
        raise RuntimeError("a bug")


def remove(path: Path) -> None:
    if not is_good(path):
        path.rename(path.with_name("other"))
        raise BnrnnError(f"{path} is damaged")


def be_vague(path: Path) -> None:
    if not is_good(path):
        raise BnrnnError("something is damaged")


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (crash, "traceback"),
        (remove, "altered"),
        (be_vague, "unnamed"),
        (lambda path: read_json(path, "remove it", "a record"), "accepted, differs"),
    ],
)
def test_a_careless_reader_is_found_with_the_simplest_damage(tmp_path, monkeypatch, read, outcome):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "inputs/file.json"
    path.parent.mkdir()
    path.write_text(GOOD)
    one, found = Input("a record", path.parent, lambda: read(path), [path]), Counter()
    with pytest.raises(AssertionError, match=rf"^a record: file.json, .*: {outcome}\. "):
        damage_input(one, tmp_path, 60, 0, found)
    assert found["a record", outcome] >= 1
