"""The recurrence of the tanh RNN, with or without batch normalization of its summed pre-activation: the reference."""

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.norm.reference import normalize


def rnn_scan(
    x_proj: Float[Tensor, "T B H"],
    h: Float[Tensor, "B H"],
    weight_hh: Float[Tensor, "H H"],
    gamma: Float[Tensor, " H"] | None = None,
    beta: Float[Tensor, " H"] | None = None,
    eps: float = 1e-5,
    population: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"], tuple[Tensor | None, Tensor | None]]:
    """Run h_t = tanh(BN(W_hh h_{t-1} + x_proj_t; gamma, beta)) and return every h, the last one, and statistics.

    gamma None leaves the sum as it is; population None normalizes with the batch's statistics. The statistics returned
    are (T, H) means and variances of the sum, None without gamma.
    """
    means, variances = population or ([None] * len(x_proj), [None] * len(x_proj))
    ys, seen = [], []
    for x_t, mean, var in zip(x_proj.unbind(0), means, variances, strict=True):
        a = h @ weight_hh.T + x_t  # (B, H)
        if gamma is not None:
            a, mean, var = normalize(a, gamma, beta, eps, mean, var)
            seen.append((mean, var))
        h = torch.tanh(a)
        ys.append(h)
    statistics = (torch.stack([m for m, _ in seen]), torch.stack([v for _, v in seen])) if seen else (None, None)
    return torch.stack(ys), h, statistics
