"""The recurrence of recurrent highway networks, computed by the selected engine."""

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
from bnrnn.scan.backends import triton_engine
from bnrnn.scan.dispatch import Engines, in_float32
from bnrnn.scan.rhn import reference
from bnrnn.scan.rhn.cpu import CompiledRHN
from bnrnn.scan.rhn.fused import PARAMETERS, RHNSteps, prepare, rhn_fused_scan
from bnrnn.scan.rhn.reference import Result, RHNOptions, RHNStatistics


def rhn_scan(x_proj: Tensor, s: Tensor, weight: Tensor, **options: Unpack[RHNOptions]) -> Result:
    """Run bnrnn.scan.rhn.reference.rhn_scan on the selected engine.

    bfloat16, float16 and autocast are treated as in `lstm_scan`. Raises BnrnnError for shapes, dtypes or devices
    that do not match, for empty sequences, and for freed memory.
    """
    check_memory({"x_proj": x_proj, "s": s, "weight": weight, **options})
    return in_float32(_scan, x_proj, s, weight, **options)


def _scan(x_proj: Tensor, s: Tensor, weight: Tensor, **options: Any) -> Result:
    _check(x_proj, {"s": s, "weight": weight, **options})
    return _engines(x_proj, s, weight, **options)


@once_per_form
def _check(x_proj: Tensor, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `rhn_scan` that do not match each other."""
    if given["weight"].dim() != 3:
        raise BnrnnError(f"weight must be (D, G, H), got {tuple(given['weight'].shape)}")
    D, G, H = given["weight"].shape
    if x_proj.dim() != 3 or x_proj.shape[2] not in (2 * H, 3 * H):
        raise BnrnnError(f"x_proj must be (T, B, 2H) or (T, B, 3H) with H = {H}, got {tuple(x_proj.shape)}")
    T, B, G = x_proj.shape
    check_not_empty(T, H)
    gamma_s = given.get("gamma_s")
    K = 0 if gamma_s is None else min(len(gamma_s), D)  # number of layers whose input state is normalized
    shapes = reference.shapes(T, B, G, D, H, K)
    check_tensors(x_proj, shapes, given)
    check_tensors(x_proj, shapes, statistics_by_name(given.get("population"), ("x", "s", "z"), given))
    check_sizes(given.get("batch_sizes"), T, B)


def _operator_scan(
    x_proj: Tensor, s: Tensor, weight: Tensor, population: RHNStatistics | None = None, **options: Any
) -> Result:
    tensors = {"x_proj": x_proj, "s": s, "weight": weight, **{name: options.pop(name, None) for name in PARAMETERS}}
    return operator.scan("rhn", tensors, population, options)


def _prepare(fits: bool, tensors: dict[str, Tensor], population: RHNStatistics | None, **options: Any) -> RHNSteps:
    used = {name: options[name] for name in ("eps", "batch_sizes", "product_dtype")}
    return prepare(CompiledRHN if fits else RHNSteps, **tensors, population=population, **used)  # pyright: ignore


def _shapes(given: dict[str, Tensor], statistics: list[str], keep: bool) -> list[tuple[int, ...]]:
    (T, B, G), (D, _, H) = given["x_proj"].shape, given["weight"].shape
    K = len(given["gamma_s"]) if "gamma_s" in given else 0
    shapes = reference.shapes(T, B, G, D, H, K)
    kept = [(T, B, G), (T, D, B, G), (T, D, B, H), *[(T, K, B, H)] * (K > 0)] if keep else []
    return [(T, B, H), (B, H), *(shapes[name] for name in statistics), *kept]


operator.RECURRENCES["rhn"] = operator.Recurrence(_prepare, _shapes, RHNStatistics, kept=("x", "a", "states", "normal"))

_engines = Engines(
    rhn_scan, reference.rhn_scan, _operator_scan, rhn_fused_scan, compiled=CompiledRHN, steps=RHNSteps,
    triton=lambda options: triton_engine("rhn").rhn_triton_scan, single=False,
)  # fmt: skip
