"""The recurrences of GRU and light GRU, computed by the selected engine."""

from functools import partial
from typing import Any, Unpack

from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import operator
from bnrnn.scan.arguments import check_memory, check_not_empty, check_sizes, check_tensors, once_per_form
from bnrnn.scan.dispatch import Engines, in_float32
from bnrnn.scan.gru import reference
from bnrnn.scan.gru.cpu import CompiledGRU
from bnrnn.scan.gru.fused import PARAMETERS, GRUSteps, NoStatistics, gru_fused_scan, prepare
from bnrnn.scan.gru.reference import NONLINEARITIES, GRUOptions, Result


def gru_scan(
    x_proj: Tensor, h: Tensor, weight_hh: Tensor, *, overwrite: bool = False, **options: Unpack[GRUOptions]
) -> Result:
    """Run bnrnn.scan.gru.reference.gru_scan on the selected engine. Where that is `triton`, `fused` runs instead.

    bfloat16, float16, autocast and `overwrite` are treated as in `lstm_scan`. Raises BnrnnError for shapes, dtypes or
    devices that do not match, for an unknown nonlinearity, for empty sequences, and for freed memory.
    """
    check_memory({"x_proj": x_proj, "h": h, "weight_hh": weight_hh, **options})
    return in_float32(_scan, x_proj, h, weight_hh, overwrite=overwrite, **options)


def _scan(x_proj: Tensor, h: Tensor, weight_hh: Tensor, *, overwrite: bool, **options: Any) -> Result:
    _check(x_proj, {"h": h, "weight_hh": weight_hh, **options})
    return _engines(x_proj, h, weight_hh, overwrite=overwrite, **options)


@once_per_form
def _check(x_proj: Tensor, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `gru_scan` that do not match each other."""
    nonlinearity = given.get("nonlinearity", "tanh")
    if nonlinearity not in NONLINEARITIES:
        raise BnrnnError(f"nonlinearity={nonlinearity!r} is unknown: use {' or '.join(map(repr, NONLINEARITIES))}")
    H = given["h"].shape[-1]
    if x_proj.dim() != 3 or x_proj.shape[2] not in (2 * H, 3 * H):
        raise BnrnnError(f"x_proj must be (T, B, 2H) or (T, B, 3H) with H = {H}, got {tuple(x_proj.shape)}")
    T, B, G = x_proj.shape
    check_not_empty(T, H)
    check_tensors(x_proj, reference.shapes(T, B, G, H), given)
    check_sizes(given.get("batch_sizes"), T, B)


def _operator_scan(x_proj: Tensor, h: Tensor, weight_hh: Tensor, nonlinearity: str = "tanh", **options: Any) -> Result:
    tensors = {"x_proj": x_proj, "h": h, "weight_hh": weight_hh}
    tensors |= {name: options.pop(name, None) for name in PARAMETERS}
    return operator.scan(f"gru_{nonlinearity}", tensors, None, options)[:2]  # pyright: ignore[reportReturnType]


def _prepare(nonlinearity: str, fits: bool, tensors: dict[str, Tensor], population: None, **options: Any) -> GRUSteps:
    used = {k: v for k, v in options.items() if k in ("eps", "batch_sizes", "product_dtype", "keep", "overwrite")}
    engine = CompiledGRU if fits else GRUSteps
    return prepare(engine, **tensors, nonlinearity=nonlinearity, **used)  # pyright: ignore


def _shapes(given: dict[str, Tensor], statistics: list[str], keep: bool) -> list[tuple[int, ...]]:
    (T, B, G), H = given["x_proj"].shape, given["h"].shape[1]
    shapes = [(T, B, H), (B, H)]
    if keep:
        shapes.append((T, B, G))
        if "gamma_hh" in given:
            shapes += [(T, B, G), (T, B, G // H - 1)]
        elif G == 3 * H:
            shapes.append((T, B, H))
    return shapes


for _name in NONLINEARITIES:
    operator.RECURRENCES[f"gru_{_name}"] = operator.Recurrence(
        partial(_prepare, _name), _shapes, NoStatistics, kept=("x", "u", "rstd")
    )

_engines = Engines(
    gru_scan, reference.gru_scan, _operator_scan, gru_fused_scan, compiled=CompiledGRU, steps=GRUSteps,
    triton=lambda options: "GRUs",
)  # fmt: skip
