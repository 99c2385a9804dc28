"""The Triton kernels in the emulator. This process has Triton's interpreter; others have its compiler."""

import json
import os
import subprocess
import sys

import pytest

from bnrnn.config import ROOT


def run(*command: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_compiled_kernels_agree_with_the_reference_and_nothing_conflicts():
    rows = [line.split(" | ") for line in run("scripts.emulate", "--few")]
    assert len(rows) == 5 and {row[1] for row in rows} == {"80", "90"} and all(row[-3] == "[]" for row in rows)
    assert all(float(row[6]) < float(row[7]) for row in rows)
    # If the factors of products were not rounded to the nearest TF32 number, this error would be 0.0015.
    assert [float(row[6]) < 8e-4 for row in rows if row[0] == "BN-LSTM padded, 40 x 20"] == [True]


@pytest.mark.slow
def test_barriers_that_are_deleted_or_moved_are_noticed():
    damage = [json.loads(line) for line in run("tests.emulator.mutations", "order", "80", "16")]
    assert {row["change"] for row in damage} == {"deleted", "earlier", "later"} and len(damage) >= 12
    assert not [row for row in damage if not row["noticed"]]
