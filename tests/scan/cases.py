"""Random arguments of the scans, all their outputs and gradients, and a comparison with the reference in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bnrnn import scan
from bnrnn.scan.gru import reference as gru
from bnrnn.scan.lstm import reference as lstm
from bnrnn.scan.rhn import reference as rhn
from tests.helpers import assert_near, without_shape_checks

NAMES = ("x_proj", "h", "c", "weight_hh", "gamma_ih", "gamma_hh", "bias", "gamma_c", "beta_c")
OPTIONAL = NAMES[4:]
ALL = (True,) * 5
OF_RHN = ("bias", "gamma_x", "gamma_s", "beta_s", "gamma_z")
ALL_OF_RHN = dict.fromkeys(OF_RHN, True)
OF_GRU = ("gamma_hh", "bias_hh", "mask")


def problem(T: int, B: int, H: int, given: Sequence[bool] = ALL, population: bool = False, **options) -> dict:
    """Random arguments of an LSTM's scan in float64; `given` says which of OPTIONAL are not None."""
    shapes = lstm.shapes(T, B, H)
    args = {name: torch.randn(shapes[name], dtype=torch.float64) for name in NAMES}
    args["weight_hh"] /= H**0.5
    args["gamma_hh"] *= 0.3  # larger scales make the recurrence chaotic, and rounding errors grow with every step
    absent = dict.fromkeys(name for name, there in zip(OPTIONAL, given, strict=True) if not there)
    return args | absent | {"population": _statistics(lstm.Statistics, shapes) if population else None, **options}


def rhn_problem(
    T=5, B=6, H=7, D=3, coupled=False, given=ALL_OF_RHN, K: int | None = None, population=False, **options
) -> dict:
    """Random arguments of an RHN's scan in float64; `given` says which of OF_RHN are there."""
    shapes = rhn.shapes(T, B, (2 if coupled else 3) * H, D, H, D if K is None else K)
    names = ("x_proj", "s", "weight", *(name for name in OF_RHN if given[name]))
    args = {name: torch.randn(shapes[name]).double() for name in names}
    args["weight"] /= H**0.5
    for name in {"gamma_s", "gamma_z"}.intersection(args):
        args[name] *= 0.5
    absent = dict.fromkeys(name for name in rhn.RHNStatistics._fields if not given[f"gamma_{name[-1]}"])
    statistics = _statistics(rhn.RHNStatistics, shapes)._replace(**absent)
    return args | {"population": statistics if population else None, **options}


def gru_problem(T=5, B=6, H=7, num_gates=3, given: Sequence[bool] = (True,) * 3, population=False, **options) -> dict:
    """Random arguments of a GRU's scan in float64; `given` says which of OF_GRU are there. It has no population."""
    shapes = gru.shapes(T, B, num_gates * H, H)
    names = ("x_proj", "h", "weight_hh", *(name for name, there in zip(OF_GRU, given, strict=True) if there))
    args: dict[str, Any] = {name: torch.randn(shapes[name]).double() for name in names}
    args["weight_hh"] /= H**0.5
    return args | options


def _statistics(kind: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    drawn = (torch.rand(shapes[n]) + 0.1 if n.startswith("var") else torch.randn(shapes[n]) for n in kind._fields)
    return kind(*(value.double() for value in drawn))


def in_dtype(problem: dict, dtype: torch.dtype = torch.float32) -> dict:
    """A copy of the arguments in another precision."""
    return tree_map_only(Tensor, lambda v: v.detach().to(dtype if v.is_floating_point() else v, copy=True), problem)


def everything(run: Callable, problem: dict, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Outputs, statistics and gradients, by name."""
    torch.manual_seed(1)
    args = in_dtype(problem, dtype)
    leaves = {name: value.requires_grad_() for name, value in args.items() if isinstance(value, Tensor)}
    y, last, *used = run(**args)
    outputs = {"y": y, **({"s": last} if isinstance(last, Tensor) else dict(zip("hc", last, strict=True)))}
    weights = [torch.randn(value.shape, dtype=torch.float64).to(value.device, dtype) for value in outputs.values()]
    loss = sum((v * w).sum() for v, w in zip(outputs.values(), weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    seen = {name: value for of in used for name, value in of._asdict().items() if value is not None}
    return {**outputs, **seen, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def rounding_error(reference: Callable, problem: dict, moved: float) -> float:
    """The largest relative error of the reference in float32, where the arguments are moved by about `moved`."""
    problem = problem | {k: v * (1 + moved * torch.randn_like(v)) for k, v in problem.items() if isinstance(v, Tensor)}
    exact, found = everything(reference, problem), everything(reference, problem, torch.float32)
    return max(((found[k] - v).norm() / v.norm()).item() for k, v in exact.items() if v.norm() > 1e-9)


def assert_agrees(engine: str, problem: dict) -> None:
    """All that an engine computes, in float32 if it is not `fused`, agrees with the reference in float64."""
    of_lstm = "c" in problem
    if of_lstm:
        run, reference = scan.lstm_scan, lstm.lstm_scan
    else:
        run, reference = (scan.rhn_scan, rhn.rhn_scan) if "weight" in problem else (scan.gru_scan, gru.gru_scan)
    scan.set_backend(engine)
    dtype = torch.float64 if engine == "fused" else torch.float32
    expected, found = everything(reference, problem), everything(run, problem, dtype)
    assert found.keys() == expected.keys()
    tol = 1e-9
    if dtype == torch.float32:
        # Of two values, normalized to ±1, gradients are small differences of large numbers. The reference itself
        # then has an error above 1e-5 in float32, and an engine may have an error of about the same size.
        with without_shape_checks():
            errors = [rounding_error(reference, problem, moved) for moved in ([0] if of_lstm else [0, *[1e-7] * 3])]
        tol = max(1e-5, 3 * max(errors))
    # Some gradients are 0 except for rounding, because normalization removes them; these are compared with the largest.
    largest = max(ref.norm().item() for name, ref in expected.items() if name.startswith("d"))
    for name, ref in expected.items():
        if ref.numel() and ref.abs().max() < 1e-12:
            assert found[name].norm() < tol * largest, name
        else:
            assert_near(name, ref, found[name], tol)
