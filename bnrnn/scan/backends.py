"""Which engine runs a recurrence.

`reference` is the readable loop in autograd and `fused` one autograd function with a backward derived by hand, both for
any device and dtype; `cpu` is `fused` with its steps compiled, for float32 on the CPU, and `triton` the same for GPUs.
Up to rounding, all give the same numbers. `auto` takes `cpu` or `triton` where they can run and `reference` elsewhere.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from bnrnn.errors import BnrnnError
from bnrnn.scan.native.build import library
from bnrnn.scan.tracing import exporting, transformed

ENGINES = ("reference", "fused", "cpu", "triton")
BACKENDS = ("auto", *ENGINES)
OUTSIDE = (
    "on a GPU the scan stays outside of compiled programs: for fullgraph=True, bnrnn.scan.set_backend('reference')"
)
_chosen = "auto"


def set_backend(name: str) -> None:
    """Choose the engine for every scan of this process. Raises BnrnnError for a name that is unknown or cannot run."""
    global _chosen
    if name not in BACKENDS:
        raise BnrnnError(f"backend={name} is unknown: use {', '.join(BACKENDS)}")
    if name == "cpu":
        library()
    if name == "triton":
        triton_engine()
    _chosen = name


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """The engine of scans on this device with products of this dtype. Raises BnrnnError if the chosen one cannot."""
    if transformed():
        if _chosen not in ("auto", "reference"):
            raise BnrnnError(f"backend={_chosen} cannot run within torch.func: use auto or reference")
        return "reference"
    fits = device.type == "cpu" and dtype == torch.float32
    if _chosen == "auto" and fits:
        return "cpu" if _has(library) else "reference"
    if _chosen == "cpu" and not fits:
        raise BnrnnError(f"backend=cpu is for float32 on the CPU, not for {dtype} on {device}: use auto or reference")
    on_triton = dtype != torch.float64 and (device.type == "cuda" or _interpreted())
    if _chosen == "triton" and not on_triton:
        raise BnrnnError(f"backend=triton runs float32 or shorter types on a GPU, not {dtype} on {device}: use auto")
    if _chosen != "auto":
        return _chosen
    return "triton" if device.type == "cuda" and on_triton and _has(triton_engine) else "reference"


def recorded(device: torch.device) -> str:
    """How a scan enters a program that torch records: as its `reference`, as one `operator`, or not (`outside`).

    The operator runs the engine `cpu`, or `fused` where that cannot run (see operator.py).
    """
    if exporting() or _chosen == "reference":
        return "reference"
    return "operator" if device.type == "cpu" else "outside"


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """The lower precision that products of such tensors are asked to have: autocast's, or their own; None for none."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def _interpreted() -> bool:
    """Whether Triton's kernels run in Python here, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def triton_engine(recurrence: str = "lstm") -> ModuleType:
    """The Triton engine, imported when first needed: it is optional, and slow to import."""
    try:
        return import_module(f"bnrnn.scan.{recurrence}.triton")
    except ImportError as error:
        raise BnrnnError(f"backend=triton cannot be imported ({error}): pip install triton, or use auto") from error


@cache
def _has(kernel: Callable[[], Any]) -> bool:
    """Whether a kernel can be had here; says why if not, once."""
    try:
        kernel()
    except BnrnnError as error:
        logging.getLogger("bnrnn").warning("%s. The reference runs instead, more slowly.", error)
        return False
    return True
