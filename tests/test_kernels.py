"""Triton kernels, compiled for GPUs without having one: the interpreter accepts what the compiler does not."""

import json
import subprocess
import sys

import pytest

from bnrnn.bench.kernels import DEVICES, MOST_SHARED, kernels
from bnrnn.config import ROOT

SOME = {
    90: ["S1, whole sequence, forward", "S1, whole sequence, backward", "reader, padded, backward",
         "S1 in evaluation, forward", "RHN of 512 units, coupled, padded, backward"],
    80: ["S3, forward"],
    100: ["RHN of 512 units, forward"],
}  # fmt: skip
PROGRAM = """
import json, sys
from bnrnn.bench.kernels import resources
some = json.loads(sys.argv[1])
print(json.dumps({architecture: resources(titles, int(architecture)) for architecture, titles in some.items()}))
"""


@pytest.mark.slow
def test_they_compile_without_spills_and_fit(tmp_path):
    """In a fresh process: this one has the interpreter in place of the compiler."""
    env = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(SOME)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {int(architecture): rows for architecture, rows in json.loads(done.stdout).items()}
    print("kernel | architecture | registers, spilled bytes, shared bytes, barriers")
    for architecture, rows in found.items():
        assert list(rows) == SOME[architecture]
        for title, (registers, spilled, shared, barriers) in rows.items():
            print(title, architecture, f"{registers}, {spilled}, {shared}, {barriers}", sep=" | ")
            assert registers <= 255 and spilled <= (32 if "whole" in title else 0), title
            assert shared <= MOST_SHARED[architecture], title
            assert barriers <= 64, title


def test_the_page_has_all_kernels():
    page = (ROOT / "docs/kernels.md").read_text()
    assert all(f"| {kernel.title} |" in page for kernel in kernels())
    assert all(device in page for device in DEVICES.values())
