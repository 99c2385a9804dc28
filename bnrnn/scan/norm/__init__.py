"""Batch normalization of whole sequences, before the recurrence, by the engine that fits."""

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan.arguments import check_sizes, check_tensors, raised
from bnrnn.scan.backends import backend
from bnrnn.scan.native.build import plain
from bnrnn.scan.norm import cpu, reference
from bnrnn.scan.tracing import traced

Result = tuple[Tensor, Tensor, Tensor]


def normalize_sequence(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None = None, batch_sizes: list[int] | None = None,
) -> Result:  # fmt: skip
    """reference.normalize_sequence by the chosen engine; `fused` and `triton` have none of their own.

    The output of bfloat16 or float16 is float32, as are the statistics. Raises BnrnnError for tensors that do not fit
    each other.
    """
    return _normalize("normalize_sequence", len(x), x, gamma, beta, eps, population, batch_sizes)


def normalize_over_time(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None = None, batch_sizes: list[int] | None = None,
) -> Result:  # fmt: skip
    """reference.normalize_over_time by the chosen engine, as `normalize_sequence`."""
    return _normalize("normalize_over_time", 1, x, gamma, beta, eps, population, batch_sizes)


def _normalize(
    name: str, num_statistics: int, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None, batch_sizes: list[int] | None,
) -> Result:  # fmt: skip
    if x.dtype in (torch.bfloat16, torch.float16):  # all of them: the kernels take parameters to have the dtype of x
        x, gamma, beta = map(raised, (x, gamma, beta))
        population = population and (population[0].float(), population[1].float())
    if x.dim() != 3:
        raise BnrnnError(f"x must be (T, B, F), got {tuple(x.shape)}")
    T, B, num_features = x.shape
    mean, var = population or (None, None)
    shapes = {"gamma": (num_features,), "beta": (num_features,), "mean": (num_statistics, num_features),
              "var": (num_statistics, num_features)}  # fmt: skip
    check_tensors(x, shapes, {"gamma": gamma, "beta": beta, "mean": mean, "var": var}, of="x")
    check_sizes(batch_sizes, T, B)
    if traced() or backend(x.device, x.dtype) != "cpu":
        return getattr(reference, name)(x, gamma, beta, eps, population, batch_sizes)
    beta = None if beta is None else plain(beta)
    return getattr(cpu, name)(x, plain(gamma), beta, eps, population, batch_sizes)
