"""The recurrences, each as one function over a whole sequence, with several engines behind one signature.

`reference` is the readable loop in autograd and `fused` one autograd function with a backward derived by hand, both for
any device and dtype; `cpu` is `fused` with its steps compiled, for float32 on the CPU. Up to rounding,
all give the same numbers. `auto` takes `cpu` where it can run and `reference` elsewhere.
"""

import logging
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import lstm, lstm_cpu, norm
from bnrnn.scan.lstm import Statistics
from bnrnn.scan.lstm_cpu import CpuEngine, library
from bnrnn.scan.lstm_fused import AtenEngine, fused_scan

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
    """The engine that scans of this device use, for products of this dtype. Raises BnrnnError if the chosen one cannot."""
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
def _engine(name: str) -> Any:
    return {"fused": AtenEngine, "cpu": CpuEngine}[name]()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for x (T, B, I) and W (G, I), by the chosen engine."""
    plain = torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype
    return F.linear(x, weight) if plain or backend(x.device, x.dtype) != "cpu" else lstm_cpu.linear(x, weight)


def lstm_scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    population: Statistics | None = None,
    overwrite: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """bnrnn.scan.lstm.lstm_scan by the chosen engine, with more freedom in the arguments.

    - Every tensor may have a leading axis R of replicas, which share nothing but the shape: R layers in one call.
    - bfloat16 and float16 may come in, or be asked for by torch.autocast: products then have that precision, and
      statistics, states and everything else float32; y has the precision that x_proj had, and h and c keep theirs.
    - With `overwrite`, an engine may take over the memory of x_proj, whose values are then lost.
    """
    low = torch.get_autocast_dtype(x_proj.device.type) if torch.is_autocast_enabled(x_proj.device.type) else None
    given, of_h, of_c = x_proj.dtype, h.dtype, c.dtype
    if low is not None or given in (torch.bfloat16, torch.float16):
        kwargs = {k: _raised(v) for k, v in kwargs.items()} | {"product_dtype": low or given}
        x_proj, h, c, weight_hh = map(_raised, (x_proj, h, c, weight_hh))
        population = population and Statistics(*map(_raised, population))
    with torch.autocast(x_proj.device.type, enabled=False):
        run = partial(_replicas if x_proj.dim() == 4 else _scan, overwrite=overwrite, population=population, **kwargs)
        y, (h, c), used = run(x_proj, h, c, weight_hh)
    return y.to(given), (h.to(of_h), c.to(of_c)), used


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def _scan(x_proj: Tensor, *args: Any, overwrite: bool, **kwargs: Any) -> Any:
    name = backend(x_proj.device, kwargs.get("product_dtype") or x_proj.dtype)
    if name == "reference":
        return lstm.lstm_scan(x_proj, *args, **kwargs)
    return fused_scan(_engine(name), x_proj, *args, overwrite=overwrite, **kwargs)


def _replicas(*args: Tensor, population: Statistics | None, **kwargs: Any) -> Any:
    """One call a replica: on a CPU a single one keeps a core busy."""
    results = []
    for r in range(len(args[0])):
        own = {k: v[r] if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        own["population"] = population and Statistics(*(None if s is None else s[r] for s in population))
        results.append(_scan(*(a[r] for a in args), **own))
    ys, states, used = zip(*results, strict=True)
    h, c = (torch.stack(values) for values in zip(*states, strict=True))
    stacked = (None if values[0] is None else torch.stack(values) for values in zip(*used, strict=True))
    return torch.stack(ys), (h, c), Statistics(*stacked)


def normalize_sequence(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """bnrnn.scan.norm.normalize_sequence by the chosen engine; `fused` has none of its own."""
    engine = lstm_cpu if backend(x.device, x.dtype) == "cpu" else norm
    return engine.normalize_sequence(x, *args, **kwargs)
