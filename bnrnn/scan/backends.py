"""Which engine runs a recurrence.

- `reference` is a readable loop that autograd differentiates, for any device and dtype.
- `fused` is one autograd function with a backward pass derived by hand, for any device and dtype.
- `cpu` is `fused` with compiled time steps, for float32 on the CPU. A call of a single step may take torch's operations
  instead, as the reference does (dispatch.py says when).
- `triton` is the same for GPUs.

All engines give the same numbers, except for rounding. `auto` selects `cpu` or `triton` if they can run, otherwise
`reference`. On a GPU it first compares `triton` with `reference`, once for the device (selfcheck.py) and once for every
form of a scan (trials.py), and selects `fused` if they differ or if Triton is missing.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError, first_line
from bnrnn.scan.native.build import library
from bnrnn.scan.tracing import autocast_is_on, exporting, traced, transformed

ENGINES = ("reference", "fused", "cpu", "triton")
BACKENDS = ("auto", *ENGINES)
OUTSIDE = (
    "on a GPU the scan stays outside of compiled programs: for fullgraph=True, bnrnn.scan.set_backend('reference')"
)
_chosen = "auto"
_checks: list[Callable[[torch.device], str | None]] = []
_problems: dict[torch.device, str | None] = {}  # what is wrong with the Triton engine, by device
_ran: set[str] = set()  # the engines that have run scans for which `triton` was selected


def set_backend(name: str) -> None:
    """Select the engine for all scans of this process.

    Raises BnrnnError for an unknown name, and for an engine that cannot run on this machine.
    """
    global _chosen
    if name not in BACKENDS:
        raise BnrnnError(f"backend={name} is unknown: use {', '.join(BACKENDS)}")
    if name == "cpu":
        library()
    if name == "triton":
        triton_engine()
    _chosen = name
    _ran.clear()


def is_chosen(name: str) -> bool:
    """Whether this engine was selected by name."""
    return _chosen == name


def note(engine: str) -> None:
    """Record that an engine runs a scan for which `triton` was selected."""
    _ran.add(engine)


def engine_that_ran(selected: str) -> str:
    """The engine that has run since `set_backend`, such as `triton+fused` if that has not run all forms of scans.

    Args:
        selected: the engine that was selected, which is also the answer if no scan has run.
    """
    return "+".join(name for name in reversed(ENGINES) if name in _ran) or selected


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """The engine that runs scans on this device with products of this dtype.

    Raises BnrnnError if the engine selected with `set_backend` does not support them.
    """
    if transformed():
        if _chosen not in ("auto", "reference"):
            raise BnrnnError(f"backend={_chosen} cannot run within torch.func: use auto or reference")
        return "reference"
    fits = device.type == "cpu" and dtype == torch.float32
    if _chosen == "auto" and fits:
        return "cpu" if _has(library) else "reference"
    if _chosen == "cpu" and not fits:
        raise BnrnnError(f"backend=cpu supports float32 on the CPU, not {dtype} on {device}: use auto or reference")
    on_triton = dtype != torch.float64 and (device.type == "cuda" or _interpreted())
    if _chosen == "triton" and not on_triton:
        raise BnrnnError(
            f"backend=triton supports float32, bfloat16 and float16 on a GPU, not {dtype} on {device}: use auto"
        )
    if _chosen != "auto":
        return _chosen
    if device.type == "cuda" and on_triton:
        return "triton" if _has(triton_engine, "The engine `fused`") and _is_right(device) else "fused"
    return "reference"


def engine_of(x_proj: Tensor, product_dtype: torch.dtype | None) -> str:
    """The engine that runs a scan of x_proj (T, B, G), or how the scan enters a program that torch records."""
    if traced():
        return recorded(x_proj.device)
    if x_proj.shape[1] == 0:
        return "reference"  # other engines expect at least one sequence
    return backend(x_proj.device, product_dtype or x_proj.dtype)


def recorded(device: torch.device) -> str:
    """How a scan enters a program that torch records: as its `reference`, as one `operator`, or not (`outside`).

    The operator runs the engine `cpu`, or `fused` where that cannot run (see operator.py).
    """
    if exporting() or _chosen == "reference":
        return "reference"
    return "operator" if device.type == "cpu" else "outside"


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """The lower precision of matrix products: autocast's if it is on, else that of bfloat16 or float16 tensors.

    None means that products have the full precision of their factors, as those of float64 always have.
    """
    if autocast_is_on(device) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager in which autocast is off."""
    if autocast_is_on(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # takes less time


def _interpreted() -> bool:
    """Whether Triton's interpreter is on, which runs the kernels in Python, for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def triton_engine(recurrence: str = "lstm") -> ModuleType:
    """Import the Triton engine, which is optional and slow to import. Raises BnrnnError if Triton is missing."""
    try:
        return import_module(f"bnrnn.scan.{recurrence}.triton")
    except Exception as error:  # another version of Triton may also lack what the kernels need
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise BnrnnError(f"backend=triton cannot be imported ({problem}): pip install triton, or use auto") from error


@cache
def say_that_fused_runs(lacking: str) -> None:
    """Log, once per process, what the Triton engine has no kernels for."""
    logging.getLogger("bnrnn").warning("The engine `triton` lacks %s. The engine `fused` runs instead.", lacking)


def check_with(find_problem: Callable[[torch.device], str | None]) -> None:
    """Set the check of the Triton engine: it returns what is wrong on a device, or None."""
    _checks[:] = [find_problem]


def _is_right(device: torch.device) -> bool:
    """Whether the Triton engine computes what the reference does. Found once per process; if not, the log says so."""
    if torch.cuda.is_current_stream_capturing():  # the check would wait for the GPU, which a capture forbids
        return True
    if device not in _problems:
        _problems[device] = next((text for find in _checks if (text := find(device)) is not None), None)
        if _problems[device] is not None:
            message = "The Triton engine is wrong on this machine (%s). The engine `fused` runs instead, more slowly."
            logging.getLogger("bnrnn").warning(message, _problems[device])
    return _problems[device] is None


@cache
def _has(kernel: Callable[[], Any], instead: str = "The reference") -> bool:
    """Whether a kernel is available on this machine. If not, log once the reason and the engine that runs instead."""
    try:
        kernel()
    except BnrnnError as error:
        logging.getLogger("bnrnn").warning("%s. %s runs instead, more slowly.", error, instead)
        return False
    return True
