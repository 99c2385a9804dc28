"""Comparison of tensors by relative error, with one table of tolerances."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_near(name: str, ref: Tensor, out: Tensor, tol: float | None = None) -> None:
    """The relative error of `out`, for the precision that `out` has; NaN fails too."""
    tol = TOLERANCE[out.dtype] if tol is None else tol
    error = (out - ref).norm() / ref.norm().clamp_min(1e-8)
    assert error < tol, f"{name}: relative error {error:.2e}"


@contextmanager
def without_shape_checks() -> Iterator[None]:
    """Inside, annotated shapes are not checked: for what was called with the check and is now repeated many times."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
