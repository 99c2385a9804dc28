"""The recurrence of recurrent highway networks, computed by the selected engine."""

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan import operator
from bnrnn.scan.arguments import check_sizes, check_tensors, once_per_form, raised, statistics_by_name
from bnrnn.scan.backends import OUTSIDE, backend, product_dtype, recorded, triton_engine, without_autocast
from bnrnn.scan.graphs import Captured
from bnrnn.scan.rhn import reference
from bnrnn.scan.rhn.cpu import CpuSteps
from bnrnn.scan.rhn.fused import PARAMETERS, Steps, prepare, rhn_fused_scan
from bnrnn.scan.rhn.reference import Options, Result, RHNStatistics
from bnrnn.scan.tracing import traced


def rhn_scan(x_proj: Tensor, s: Tensor, weight: Tensor, **options: Unpack[Options]) -> Result:
    """Run bnrnn.scan.rhn.reference.rhn_scan on the selected engine.

    bfloat16, float16 and autocast are treated as in `lstm_scan`; there is no axis of replicas. Raises BnrnnError for
    shapes, dtypes or devices that do not match.
    """
    low = product_dtype(x_proj.device, x_proj.dtype)
    given, of_s = x_proj.dtype, s.dtype
    if low is not None:
        options = {k: raised(v) for k, v in options.items()} | {"product_dtype": low}  # pyright: ignore
        x_proj, s, weight = map(raised, (x_proj, s, weight))
        if population := options.get("population"):
            options["population"] = RHNStatistics(*map(raised, population))
    _check(x_proj, {"s": s, "weight": weight, **options})
    with without_autocast(x_proj.device):
        if traced():
            name = recorded(x_proj.device)
        elif x_proj.shape[1] == 0:
            name = "reference"  # other engines expect at least one sequence
        else:
            name = backend(x_proj.device, options.get("product_dtype") or x_proj.dtype)
        if name == "reference":
            run = reference.rhn_scan
        elif name == "operator":
            run = _operator_scan
        elif name == "outside":
            run = torch.compiler.disable(rhn_scan, reason=OUTSIDE)
        elif name == "triton":
            run = triton_engine("rhn").rhn_triton_scan
        else:
            run = partial(rhn_fused_scan, {"cpu": CpuSteps, "fused": partial(Captured, Steps)}[name])
        y, s, used = run(x_proj, s, weight, **options)  # pyright: ignore[reportCallIssue]
    return y.to(given), s.to(of_s), used


@once_per_form
def _check(x_proj: Tensor, given: dict[str, Any]) -> None:
    """Raise BnrnnError for arguments of `rhn_scan` that do not match each other."""
    if given["weight"].dim() != 3:
        raise BnrnnError(f"weight must be (D, G, H), got {tuple(given['weight'].shape)}")
    D, G, H = given["weight"].shape
    if x_proj.dim() != 3 or x_proj.shape[2] not in (2 * H, 3 * H):
        raise BnrnnError(f"x_proj must be (T, B, 2H) or (T, B, 3H) with H = {H}, got {tuple(x_proj.shape)}")
    T, B, G = x_proj.shape
    gamma_s = given.get("gamma_s")
    K = 0 if gamma_s is None else min(len(gamma_s), D)  # number of layers whose input state is normalized
    shapes = {"s": (B, H), "weight": (D, G, H), "bias": (D, G), "gamma_x": (G,), "gamma_s": (K, H), "beta_s": (K, H),
              "gamma_z": (D, G), "mean_x": (T, G), "var_x": (T, G), "mean_s": (T, K, H), "var_s": (T, K, H),
              "mean_z": (T, D, G), "var_z": (T, D, G)}  # fmt: skip
    check_tensors(x_proj, shapes, given)
    check_tensors(x_proj, shapes, statistics_by_name(given.get("population"), ("x", "s", "z"), given))
    check_sizes(given.get("batch_sizes"), T, B)


def _operator_scan(
    x_proj: Tensor, s: Tensor, weight: Tensor, population: RHNStatistics | None = None, **options: Any
) -> Result:
    tensors = {"x_proj": x_proj, "s": s, "weight": weight, **{name: options.pop(name, None) for name in PARAMETERS}}
    return operator.scan("rhn", tensors, population, options)


def _prepare(fits: bool, tensors: dict[str, Tensor], population: RHNStatistics | None, **options: Any) -> Steps:
    used = {name: options[name] for name in ("eps", "batch_sizes", "product_dtype")}
    return prepare(CpuSteps if fits else Steps, **tensors, population=population, **used)  # pyright: ignore


def _shapes(given: dict[str, Tensor], statistics: list[str], keep: bool) -> list[tuple[int, ...]]:
    (T, B, G), (D, _, H) = given["x_proj"].shape, given["weight"].shape
    K = len(given["gamma_s"]) if "gamma_s" in given else 0
    sizes = {"x": (G,), "s": (K, H), "z": (D, G)}
    kept = [(T, B, G), (T, D, B, G), (T, D, B, H), *[(T, K, B, H)] * (K > 0)] if keep else []
    return [(T, B, H), (B, H), *((T, *sizes[name[-1]]) for name in statistics), *kept]


operator.RECURRENCES["rhn"] = operator.Recurrence(_prepare, _shapes, RHNStatistics, kept=("x", "a", "states", "normal"))
