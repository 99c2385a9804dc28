"""Layer normalization, Ba et al. 2016 (arXiv:1607.06450), eq. 4: the statistics of a row are those of its units.

The units may be divided into groups of equal size, such as the gates, each of which has statistics of its own.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.norm.reference import variance


def normalize_rows(
    x: Float[Tensor, "B F"],
    gamma: Float[Tensor, " F"],
    beta: Float[Tensor, " F"] | None,
    eps: float,
    groups: int = 1,
) -> Float[Tensor, "B F"]:
    """LN(x; gamma, beta)."""
    if groups == 1:
        return F.layer_norm(x, x.shape[1:], gamma, beta, eps)
    parts = x.unflatten(1, (groups, -1))
    y = gamma * F.layer_norm(parts, parts.shape[2:], eps=eps).flatten(1)
    return y if beta is None else y + beta


def standardize_rows(
    v: Float[Tensor, "B F"], mean: Float[Tensor, "B K"], var: Float[Tensor, "B K"], eps: float
) -> Float[Tensor, "B F"]:
    """(v - mean) / sqrt(var + eps). Writes the statistics of the K groups of each row into mean and var."""
    parts = v.unflatten(1, (mean.shape[1], -1))
    out, mean_now, rstd = torch.native_layer_norm(parts, parts.shape[2:], None, None, eps)
    mean.copy_(mean_now.squeeze(2))
    var.copy_(variance(rstd, eps).squeeze(2))
    return out.flatten(1)


def through_rows(
    dv: Float[Tensor, "B F"],
    v: Float[Tensor, "B F"],
    gamma: Float[Tensor, " F"],
    var: Float[Tensor, "B K"],
    eps: float,
    dgamma: Float[Tensor, " F"],
    dbeta: Float[Tensor, " F"] | None,
) -> Float[Tensor, "B F"]:
    """Backpropagate through layer normalization, and add to dgamma and dbeta.

    Args:
        dv: gradient of the output, after scale and shift.
        v: the normalized values, before scale and shift.

    Returns the gradient of the values before normalization.
    """
    dgamma += (dv * v).sum(0)
    if dbeta is not None:
        dbeta += dv.sum(0)
    d, v = (part.unflatten(1, (var.shape[1], -1)) for part in (gamma * dv, v))
    dx = d - d.mean(2, keepdim=True) - v * (d * v).mean(2, keepdim=True)
    return (dx * (var + eps).rsqrt()[..., None]).flatten(1)
