"""The Triton kernels in the emulator. This process has Triton's interpreter; others have its compiler."""

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


@pytest.mark.slow
def test_a_barrier_that_is_deleted_is_noticed():
    lines = run("tests.emulator.mutations", "barriers", "80", "16")
    deleted = [line for line in lines if " deleted: " in line]
    assert len(deleted) >= 4 and not [line for line in deleted if "NOT NOTICED" in line]
