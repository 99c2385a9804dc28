"""Random arguments of a scan, all its outputs and gradients, and their comparison with the reference in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bnrnn import scan
from bnrnn.scan.lstm.reference import Statistics, lstm_scan
from tests.helpers import assert_near, without_shape_checks

NAMES = ("x_proj", "h", "c", "weight_hh", "gamma_ih", "gamma_hh", "bias", "gamma_c", "beta_c")
OPTIONAL = NAMES[4:]
ALL = (True,) * 5


def problem(T: int, B: int, H: int, given: Sequence[bool] = ALL, population: bool = False, **options) -> dict:
    """Random arguments in float64; `given` names those of OPTIONAL that are not None."""
    shapes = [(T, B, 4 * H), (B, H), (B, H), (4 * H, H), *((4 * H,),) * 3, (H,), (H,)]
    args = {
        n: torch.randn(s, dtype=torch.float64) if g else None
        for n, s, g in zip(NAMES, shapes, (True,) * 4 + tuple(given), strict=True)
    }
    args["weight_hh"] /= H**0.5
    if args["gamma_hh"] is not None:
        args["gamma_hh"] *= 0.3  # larger scales make the recurrence chaotic, and rounding errors grow with every step
    if population:
        pairs = [(torch.randn(T, n), torch.rand(T, n) + 0.1) for n in (4 * H, 4 * H, H)]
        population = Statistics(*(v.double() for pair in pairs for v in pair))
    return {**args, "population": population or None, **options}


def everything(run: Callable, problem: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs, statistics and gradients, by name."""
    torch.manual_seed(1)
    args = {n: None if problem[n] is None else problem[n].to(dtype).requires_grad_() for n in NAMES}
    population = problem["population"] and Statistics(*(s.to(dtype) for s in problem["population"]))
    options = {k: v for k, v in problem.items() if k not in NAMES and k != "population"}
    y, (h, c), used = run(
        *(args[n] for n in NAMES[:4]), **{n: args[n] for n in OPTIONAL}, population=population, **options
    )
    weights = [torch.randn(v.shape, dtype=torch.float64).to(dtype) for v in (y, h, c)]
    leaves = {n: a for n, a in args.items() if a is not None}
    loss = sum((v * w).sum() for v, w in zip((y, h, c), weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    seen = {n: v for n, v in used._asdict().items() if v is not None}
    return {"y": y, "h": h, "c": c, **seen, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def assert_agrees(name: str, problem: dict) -> None:
    expected = everything(lstm_scan, problem, torch.float64)
    scan.set_backend(name)
    dtype = torch.float64 if name == "fused" else torch.float32
    found = everything(scan.lstm_scan, problem, dtype)
    assert found.keys() == expected.keys()
    tol = 1e-9
    if dtype == torch.float32:
        # In a batch of two, normalized to ±1, gradients are small differences of large numbers. The reference itself
        # then has an error above 1e-5 in float32, and an engine may have an error of about the same size.
        with without_shape_checks():
            rounded = everything(lstm_scan, problem, dtype)
        errors = [(rounded[k] - ref).norm() / ref.norm().clamp_min(1e-8) for k, ref in expected.items()]
        tol = max(1e-5, 3 * max(errors).item())
    for key, ref in expected.items():
        assert_near(key, ref, found[key], tol)
