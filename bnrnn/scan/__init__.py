"""The recurrences, each as one function over a whole sequence, with several engines behind one signature.

`reference` is the readable loop in autograd and `fused` one autograd function with a backward derived by hand, both for
any device and dtype; `cpu` is `fused` with a compiled time step, for float32 on the CPU. Up to rounding,
all give the same numbers. `auto` takes `cpu` where it can run and `reference` elsewhere.
"""

import logging
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import lstm, lstm_cpu, norm
from bnrnn.scan.lstm_cpu import CpuSteps, library
from bnrnn.scan.lstm_fused import AtenSteps, fused_scan

BACKENDS = ("auto", "reference", "fused", "cpu")
_chosen = "auto"


def set_backend(name: str) -> None:
    """Choose the engine for every scan of this process. Raises BnrnnError for a name that is unknown or cannot run."""
    global _chosen
    if name not in BACKENDS:
        raise BnrnnError(f"backend={name} is unknown: use {', '.join(BACKENDS)}")
    if name == "cpu":
        library()
    _chosen = name


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """The engine that scans of this device and dtype use. Raises BnrnnError if the chosen one cannot."""
    fits = device.type == "cpu" and dtype == torch.float32
    if _chosen == "cpu" and not fits:
        raise BnrnnError(f"backend=cpu is for float32 on the CPU, not for {dtype} on {device}: use auto or reference")
    if _chosen != "auto":
        return _chosen
    return "cpu" if fits and _has_kernel() else "reference"


@cache
def _has_kernel() -> bool:
    """Whether the compiled kernel can be had here; says why if not, once."""
    try:
        library()
    except BnrnnError as error:
        logging.getLogger("bnrnn").warning("%s. The reference runs instead, more slowly.", error)
        return False
    return True


@cache
def _steps(name: str) -> Any:
    return {"fused": AtenSteps, "cpu": CpuSteps}[name]()


def lstm_scan(gates_x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """bnrnn.scan.lstm.lstm_scan by the chosen engine."""
    name = backend(gates_x.device, gates_x.dtype)
    run = lstm.lstm_scan if name == "reference" else partial(fused_scan, _steps(name))
    return run(gates_x, *args, **kwargs)


def normalize_sequence(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """bnrnn.scan.norm.normalize_sequence by the chosen engine; `fused` has none of its own."""
    engine = lstm_cpu if backend(x.device, x.dtype) == "cpu" else norm
    return engine.normalize_sequence(x, *args, **kwargs)
