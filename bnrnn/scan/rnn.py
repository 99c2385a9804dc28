"""The reference for the recurrence of the tanh RNN, with optional batch normalization of its pre-activation."""

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
    """Run h_t = tanh(BN(W_hh h_{t-1} + x_proj_t; gamma, beta)), Cooijmans et al. 2016 (arXiv:1603.09025), section 4.

    Args:
        x_proj: the input product W_ih x.
        gamma: None turns normalization off.
        population: means and variances (T, H) to normalize with; None uses those of the batch.

    Returns h of all steps, the last h, and the means and variances (T, H) that were used, which are None without gamma.
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
