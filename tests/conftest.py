"""Settings of all tests: one thread, no network, no records of earlier runs."""

import os

os.environ |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ["TRITON_INTERPRET"] = "1"  # kernels for a GPU run in Python, on the CPU

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
