"""The time steps of the engines `fused` and `cpu`: what all recurrences share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnrnn.scan.native.build import plain
from bnrnn.scan.norm.reference import standardize, through_norm


@dataclass(kw_only=True)
class FusedSteps:
    """The arguments of a scan, and the values that the forward pass stores for the backward pass.

    A term, such as "hh", is a part of the recurrence that may be normalized. `place` is the index of its statistics.
    """

    x: Tensor  # (T, B, G), input product; the forward pass normalizes it, the backward pass writes its gradient here
    parameters: dict[str, Tensor | None]
    statistics: Any  # named tuple: those of the population, or memory for those of the batch
    batch: bool  # whether to use batch statistics
    eps: float
    batch_sizes: list[int] | None
    product_dtype: torch.dtype

    written: ClassVar[tuple[str, ...]]  # by the forward pass; with batch statistics, also `statistics`

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def running(self, t: int) -> int:
        """Number of sequences that run at step t."""
        return self.batch_sizes[t] if self.batch_sizes else self.x.shape[1]

    def product(self, v: Tensor, weight: Tensor) -> Tensor:
        return (v.to(self.product_dtype) @ weight.to(self.product_dtype)).to(v.dtype)

    def outer(self, da: Tensor, v: Tensor) -> Tensor:
        """The gradient of a weight, whose products with v have the gradient da."""
        return (da.to(self.product_dtype).t() @ v.to(self.product_dtype)).to(da.dtype)

    def normalized(self, v: Tensor, term: str, *place: int) -> Tensor:
        """Normalize v, and store the statistics if they are the batch's. Returns v if the term is not normalized."""
        mean, var = getattr(self.statistics, f"mean_{term}"), getattr(self.statistics, f"var_{term}")
        return v if mean is None else standardize(v, mean[place], var[place], self.eps, self.batch)

    def through_norm(
        self, dv: Tensor, v: Tensor, term: str, place: tuple[int, ...], gamma: Tensor | None, dgamma: Tensor | None,
        dbeta: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Backpropagate through `normalized`, as norm.reference.through_norm. Returns dv if it did nothing."""
        if gamma is None or dgamma is None:
            return dv
        var = getattr(self.statistics, f"var_{term}")[place]
        return through_norm(dv, v, gamma, var, self.eps, self.batch, dgamma, dbeta)


def detached(value: Tensor) -> Tensor:
    """The values of a tensor as engines read them."""
    return plain(value.detach() if value.requires_grad else value)


def common_fields(
    x_proj: Tensor, parameters: tuple[str, ...], statistics: Any, shapes: dict[str, tuple[int, ...]],
    options: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The fields of FusedSteps except x.

    Args:
        parameters: names of the options that are parameters.
        statistics: named tuple of all statistics.
        shapes: their shapes by name.
    """
    given, population = {name: options.get(name) for name in parameters}, options.get("population")
    used = [
        None if given[f"gamma_{name.partition('_')[2]}"] is None
        else x_proj.new_empty(shapes[name]) if value is None else plain(value)
        for name, value in (population or statistics())._asdict().items()
    ]  # fmt: skip
    return {
        "parameters": {name: None if value is None else detached(value) for name, value in given.items()},
        "statistics": statistics(*used),
        "batch": population is None,
        "eps": options.get("eps", 1e-5),
        "batch_sizes": options.get("batch_sizes"),
        "product_dtype": options.get("product_dtype") or x_proj.dtype,
    }
