"""The recurrence of LSTM, input-normalized LSTM and BN-LSTM, computed by the selected engine."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import operator
from bnrnn.scan.arguments import (
    check_memory,
    check_not_empty,
    check_sizes,
    check_tensors,
    once_per_form,
    raised,
    statistics_by_name,
)
from bnrnn.scan.backends import (
    OUTSIDE,
    backend,
    engine_of,
    product_dtype,
    say_that_fused_runs,
    triton_engine,
    without_autocast,
)
from bnrnn.scan.graphs import Captured
from bnrnn.scan.lstm import reference
from bnrnn.scan.lstm.cpu import CompiledLSTM
from bnrnn.scan.lstm.fused import PARAMETERS, LSTMSteps, fused_scan, prepare
from bnrnn.scan.lstm.reference import OVER, LSTMOptions, Result, Statistics
from bnrnn.scan.noise import Noise
from bnrnn.scan.products import linear
from bnrnn.scan.tracing import autocast_is_on, traced


def lstm_scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    weight_ih: Tensor | None = None,
    overwrite: bool = False,
    **options: Unpack[LSTMOptions],
) -> Result:
    """Run bnrnn.scan.lstm.reference.lstm_scan on the selected engine, with these extensions:

    - With `weight_ih` (4H, I), x_proj is the input x, (T, B, I) or ids (T, B), and the scan computes `linear(x)`
      itself.
    - Tensors may be bfloat16 or float16, and torch.autocast may be on. Matrix products then have that precision;
      statistics, states and all other values are float32 inside. y has the dtype of x_proj; h and c keep their dtypes.
    - With `overwrite`, an engine may reuse the memory of x_proj, whose values are then lost.

    Raises BnrnnError for shapes, dtypes or devices that do not match, for empty sequences, and for freed memory.
    """
    check_memory({"x_proj": x_proj, "h": h, "c": c, "weight_hh": weight_hh, "weight_ih": weight_ih, **options})
    if weight_ih is not None and not _has_one_feature(x_proj, weight_ih):
        x_proj, weight_ih, overwrite = linear(x_proj, weight_ih), None, True
    low = product_dtype(x_proj.device, x_proj.dtype)
    given, of_h, of_c = x_proj.dtype, h.dtype, c.dtype
    if low is not None:
        options = {k: raised(v) for k, v in options.items()} | {"product_dtype": low}  # pyright: ignore
        x_proj, h, c, weight_hh = map(raised, (x_proj, h, c, weight_hh))
    _check(x_proj, {"h": h, "c": c, "weight_hh": weight_hh, "weight_ih": weight_ih, **options})
    with without_autocast(x_proj.device):
        if weight_ih is not None:
            y, (h, c), used = fused_scan(CompiledLSTM, x_proj, h, c, weight_hh, weight_ih=weight_ih, **options)
        else:
            run = _engine(_name_of_engine(x_proj, options), overwrite)
            y, (h, c), used = run(x_proj, h, c, weight_hh, **options)
    if low is None:
        return y, (h, c), used
    return y.to(given), (h.to(of_h), c.to(of_c)), used


def _has_one_feature(x: Tensor, weight_ih: Tensor) -> bool:
    """Whether x has one feature and the engine can take x directly, without storing its product with weight_ih."""
    if traced() or x.dim() != 3 or x.requires_grad or autocast_is_on(x.device):
        return False
    if x.shape[1] == 0 or x.shape[2] != 1:
        return False
    return x.dtype == weight_ih.dtype and backend(x.device, x.dtype) == "cpu"


@once_per_form
def _check(x_proj: Tensor, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `lstm_scan` that do not match each other."""
    if given["weight_ih"] is not None:
        G = len(given["weight_ih"])
    elif x_proj.dim() != 3 or x_proj.shape[2] % 4:
        raise BnrnnError(f"x_proj must be (T, B, 4H), got {tuple(x_proj.shape)}")
    else:
        G = x_proj.shape[2]
    T, B, _ = x_proj.shape
    check_not_empty(T, G // 4)
    shapes = {"weight_ih": (G, 1), **reference.shapes(T, B, G // 4)}
    check_tensors(x_proj, shapes, given)
    check_tensors(x_proj, shapes, statistics_by_name(given.get("population"), ("ih", "hh", "c"), given))
    check_sizes(given.get("batch_sizes"), T, B)
    over = given.get("over", "batch")
    if over not in OVER:
        raise BnrnnError(f"over={over!r} is unknown: use {', '.join(map(repr, OVER))}")
    if over != "batch" and given.get("population") is not None:
        raise BnrnnError(f"over={over!r} has no population statistics: leave population out, or use over='batch'")


def _name_of_engine(x_proj: Tensor, options: LSTMOptions) -> str:
    """The engine that runs this scan. `triton` lacks layer normalization, zoneout and recurrent dropout."""
    name = engine_of(x_proj, options.get("product_dtype"))
    if name == "triton" and (options.get("over", "batch") != "batch" or options.get("noise") is not None):
        say_that_fused_runs("layer normalization, zoneout and recurrent dropout")
        return "fused"
    return name


def _engine(name: str, overwrite: bool) -> Callable[..., Result]:
    """The scan function of this engine."""
    if name == "triton":
        return partial(triton_engine().triton_scan, overwrite=overwrite)
    if name == "outside":
        return torch.compiler.disable(lstm_scan, reason=OUTSIDE)  # pyright: ignore[reportReturnType]
    if name == "reference":
        return reference.lstm_scan
    if name == "operator":
        return _operator_scan
    steps = {"cpu": CompiledLSTM, "fused": partial(Captured, LSTMSteps)}[name]
    return partial(fused_scan, steps, overwrite=overwrite)


def _operator_scan(
    x_proj: Tensor, h: Tensor, c: Tensor, weight_hh: Tensor, population: Statistics | None = None, **options: Any
) -> Result:
    tensors = {"x_proj": x_proj, "h": h, "c": c, "weight_hh": weight_hh}
    tensors |= {name: options.pop(name, None) for name in PARAMETERS}
    if (noise := options.pop("noise", None)) is not None:
        tensors["key"], options["noise"] = noise.key, list(noise[:3])
    y, c, used = operator.scan("lstm", tensors, population, options)
    return y, (y[-1], c), used if options.get("over", "batch") == "batch" else Statistics()


def _prepare(
    fits: bool, tensors: dict[str, Tensor], population: Statistics | None, keep: bool, **options: Any
) -> LSTMSteps:
    engine = CompiledLSTM if fits else LSTMSteps
    key = tensors.pop("key", None)
    if (levels := options["noise"]) is not None:
        options["noise"] = Noise(levels[0], levels[1], levels[2], key)
    return prepare(engine, **tensors, population=population, with_grad=keep, **options)  # pyright: ignore


def _shapes(given: dict[str, Tensor], statistics: list[str], keep: bool, over: str = "batch") -> list[tuple[int, ...]]:
    T, B, G = given["x_proj"].shape
    H = G // 4
    shapes = reference.shapes(T, B, H, over)
    kept = [(T, B, G), (T, B, G), (T, B, H)] if keep else []
    return [(T, B, H), (B, H), *(shapes[name] for name in statistics), *kept]


operator.RECURRENCES["lstm"] = operator.Recurrence(_prepare, _shapes, Statistics, kept=("x", "u", "c"))
