"""The recurrence of LSTM, input-normalized LSTM and BN-LSTM, computed by the selected engine."""

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import operator
from bnrnn.scan.arguments import (
    check_memory,
    check_not_empty,
    check_sizes,
    check_tensors,
    once_per_form,
    statistics_by_name,
)
from bnrnn.scan.backends import backend, triton_engine
from bnrnn.scan.dispatch import Engines, in_float32
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
    return in_float32(_scan, x_proj, h, c, weight_hh, weight_ih=weight_ih, overwrite=overwrite, **options)


def _scan(
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    weight_ih: Tensor | None,
    overwrite: bool,
    **options: Any,
) -> Result:
    _check(x_proj, {"h": h, "c": c, "weight_hh": weight_hh, "weight_ih": weight_ih, **options})
    if weight_ih is not None:
        return fused_scan(CompiledLSTM, x_proj, h, c, weight_hh, weight_ih=weight_ih, **options)
    return _engines(x_proj, h, c, weight_hh, overwrite=overwrite, **options)


def _has_one_feature(x: Tensor, weight_ih: Tensor) -> bool:
    """Whether x has one feature and several steps, whose product with weight_ih the engine need not store."""
    if traced() or x.dim() != 3 or x.requires_grad or autocast_is_on(x.device):
        return False
    if x.shape[0] == 1 or x.shape[1] == 0 or x.shape[2] != 1:
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


def _triton(options: dict[str, Any]) -> Callable[..., Result] | str:
    """The scan of the engine `triton`, or what that lacks."""
    if options.get("over", "batch") != "batch" or options.get("noise") is not None:
        return "layer normalization, zoneout and recurrent dropout"
    return triton_engine().triton_scan


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
_engines = Engines(
    lstm_scan, reference.lstm_scan, _operator_scan, fused_scan, compiled=CompiledLSTM, steps=LSTMSteps, triton=_triton
)
