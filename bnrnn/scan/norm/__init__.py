"""Batch normalization of whole sequences, before the recurrence, computed by the selected engine."""

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan.arguments import check_memory, check_sizes, check_tensors, raised
from bnrnn.scan.backends import backend
from bnrnn.scan.native.build import plain
from bnrnn.scan.norm import cpu, reference
from bnrnn.scan.tracing import traced

Result = tuple[Tensor, Tensor, Tensor]


def normalize_sequence(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None = None, batch_sizes: list[int] | None = None,
) -> Result:  # fmt: skip
    """Run reference.normalize_sequence on the selected engine; the engines `fused` and `triton` use the reference.

    For bfloat16 and float16 inputs, the output and the statistics are float32. Raises BnrnnError for shapes, dtypes or
    devices that do not match, for zero time steps, and for freed memory.
    """
    return _normalize("normalize_sequence", len(x), x, gamma, beta, eps, population, batch_sizes)


def normalize_over_time(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None = None, batch_sizes: list[int] | None = None,
) -> Result:  # fmt: skip
    """Run reference.normalize_over_time on the selected engine, as `normalize_sequence` does."""
    return _normalize("normalize_over_time", 1, x, gamma, beta, eps, population, batch_sizes)


def _normalize(
    name: str, num_statistics: int, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None, batch_sizes: list[int] | None,
) -> Result:  # fmt: skip
    check_memory({"x": x, "gamma": gamma, "beta": beta, "population": population})
    if x.dtype in (torch.bfloat16, torch.float16):  # convert all tensors: the kernels expect one dtype
        x, gamma, beta = map(raised, (x, gamma, beta))
        population = population and (population[0].float(), population[1].float())
    if x.dim() != 3:
        raise BnrnnError(f"x must be (T, B, F), got {tuple(x.shape)}")
    T, B, num_features = x.shape
    if T == 0:
        raise BnrnnError(f"x must have at least one time step, got {tuple(x.shape)}: leave out the call")
    mean, var = population or (None, None)
    shapes = {"gamma": (num_features,), "beta": (num_features,), "mean": (num_statistics, num_features),
              "var": (num_statistics, num_features)}  # fmt: skip
    check_tensors(x, shapes, {"gamma": gamma, "beta": beta, "mean": mean, "var": var}, of="x")
    check_sizes(batch_sizes, T, B)
    if traced() or B == 0 or backend(x.device, x.dtype) != "cpu":
        return getattr(reference, name)(x, gamma, beta, eps, population, batch_sizes)
    beta = None if beta is None else plain(beta)
    return getattr(cpu, name)(x, plain(gamma), beta, eps, population, batch_sizes)
