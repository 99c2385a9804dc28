"""Comparison of tensors by relative error, with one table of tolerances."""

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_near(name: str, ref: Tensor, out: Tensor, tol: float | None = None) -> None:
    """The relative error of `out`, for the precision that `out` has; NaN fails too."""
    tol = TOLERANCE[out.dtype] if tol is None else tol
    error = (out - ref).norm() / ref.norm().clamp_min(1e-8)
    assert error < tol, f"{name}: relative error {error:.2e}"
