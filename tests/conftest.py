"""Settings of all tests: one thread, no network, no records of earlier runs."""

import os
import shutil
from contextlib import nullcontext

os.environ |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ["TRITON_INTERPRET"] = "1"  # kernels for a GPU run in Python, on the CPU

import pytest
import torch

from tests.helpers import without_shape_checks

# Tests of whole runs repeat the same calls thousands of times, which would take twice as long with annotated shapes
# checked. The tests of layers, models and data check them.
WHOLE_RUNS = ("tests/training/", "tests/commands/", "tests/stress/", "tests/test_train", "tests/test_resume.py",
              "tests/test_identity.py", "tests/test_bench.py", "tests/test_examples.py", "tests/test_running.py",
              "tests/test_faults.py")  # fmt: skip


@pytest.fixture(autouse=True)
def _deterministic(request):
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)  # a test that trained before has set it
    torch.manual_seed(0)
    whole = request.node.nodeid.startswith(WHOLE_RUNS)
    with without_shape_checks() if whole else nullcontext():
        yield


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slurm") and (reason := without_slurm(config.option.markexpr)):
            item.add_marker(pytest.mark.skip(reason=reason))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def without_slurm(selected: str) -> str:
    """Why tests on a Slurm cluster are skipped: they take half an hour, and need its daemons and root."""
    if "slurm" not in selected:
        return "takes half an hour: make test-slurm"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: tests/commands/slurm_cluster.sh install"
    return "" if os.getuid() == 0 else "needs root"
