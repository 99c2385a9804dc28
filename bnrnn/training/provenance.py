"""Where a number comes from: the date, the commit and the environment that results and analyses record."""

import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from bnrnn.config import PACKAGE, ROOT
from bnrnn.scan import backend
from bnrnn.training.device import hardware

CPU = torch.device("cpu")


def environment(device: torch.device, precision: str = "float32") -> dict[str, Any]:
    """The versions, hardware and engine on which results may depend; without names of machines."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": device.type,
        "hardware": hardware(device),
        "backend": backend(device, torch.bfloat16 if precision == "bfloat16" else torch.get_default_dtype()),
        "precision": precision,
        "num_threads": torch.get_num_threads(),
    }


def today() -> str:
    """The present date in UTC, such as 2026-11-24."""
    return datetime.now(UTC).date().isoformat()


@cache
def git_commit() -> str:
    """The commit of the running code, with "+changes" if files differ from it, at the first call of the process.

    Later changes of the files do not affect the running code. For a package installed from a
    wheel, it is the tag of its version, such as v0.1.0; without git, "unknown".
    """
    if ROOT == PACKAGE:
        return f"v{version('bnrnn')}"

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        edited = git("status", "--porcelain", "--", "bnrnn", "conf", "experiments/*/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if edited else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance(device: torch.device = CPU) -> dict[str, Any]:
    """The date, the commit and the environment, which analyses store with their numbers."""
    return {"date": today(), "commit": git_commit(), "environment": environment(device)}
