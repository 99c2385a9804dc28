"""The reference for the recurrences of GRU and light GRU: a plain loop over time, using autograd.

The gates are r z n in this order, as in torch.nn.GRU (Cho et al. 2014, arXiv:1406.1078). With u = W_hh h + b_hh:

    r = σ(x_r + u_r);   z = σ(x_z + u_z);   n = tanh(x_n + r ⊙ u_n);   h = (1 - z) ⊙ n + z ⊙ h

A light GRU (Ravanelli et al. 2018, arXiv:1803.10225) has no reset gate r: the gates are z n, and
n = act(x_n + u_n). Padding is as in bnrnn.scan.lstm.reference.
"""

from typing import TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Result = tuple[Tensor, Tensor]
NONLINEARITIES = ("tanh", "relu")


def shapes(T: int, B: int, G: int, H: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arguments of a scan, by name."""
    return {"x_proj": (T, B, G), "h": (B, H), "weight_hh": (G, H), "gamma_hh": (G,), "bias_hh": (G,),
            "mask": (B, H)}  # fmt: skip


class GRUOptions(TypedDict, total=False):
    """The optional arguments of `gru_scan`, which every engine accepts."""

    gamma_hh: Tensor | None
    bias_hh: Tensor | None
    mask: Tensor | None
    nonlinearity: str
    eps: float
    batch_sizes: list[int] | None
    product_dtype: torch.dtype | None


def gru_scan(
    x_proj: Float[Tensor, "T B G"],
    h: Float[Tensor, "B H"],
    weight_hh: Float[Tensor, "G H"],
    *,
    gamma_hh: Float[Tensor, " G"] | None = None,
    bias_hh: Float[Tensor, " G"] | None = None,
    mask: Float[Tensor, "B H"] | None = None,
    nonlinearity: str = "tanh",
    eps: float = 1e-5,
    batch_sizes: list[int] | None = None,
    product_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"]]:
    """Run the recurrence over T steps. Return h of all steps, and the last h.

    Args:
        x_proj: the input product, with its normalization and bias if any. With G = 3H there is a reset gate, with
            G = 2H there is none.
        gamma_hh: scale of the layer-normalized recurrent product; None turns its normalization off. See `standardize`.
        bias_hh: b_hh, added to the recurrent product, after its normalization if any.
        mask: factor of the candidate n, the same at every step: a mask of recurrent dropout.
        nonlinearity: of the candidate, "tanh" or "relu".
        eps: added to the variance of the layer normalization.
        batch_sizes: number of sequences that run at each step, never increasing; None means all at every step.
        product_dtype: precision of W_hh h, such as torch.bfloat16; all other values keep the dtype of the arguments.
    """
    B, H = h.shape
    weight = weight_hh.T.to(product_dtype or weight_hh.dtype)
    act = torch.relu if nonlinearity == "relu" else torch.tanh
    ys: list[Tensor] = []
    for t, x in enumerate(x_proj.unbind(0)):
        n = batch_sizes[t] if batch_sizes else B  # so many sequences run; the others keep their state
        x, before = (x, h) if n == B else (x[:n], h[:n])
        u = (before.to(weight.dtype) @ weight).to(h.dtype)  # (n, G)
        if gamma_hh is not None:
            u = standardize(u, H, eps) * gamma_hh
        if bias_hh is not None:
            u = u + bias_hh
        *reset, x_z, x_n = x.chunk(x.shape[1] // H, dim=1)
        *u_r, u_z, u_n = u.chunk(x.shape[1] // H, dim=1)
        if reset:
            u_n = (reset[0] + u_r[0]).sigmoid() * u_n
        z, candidate = (x_z + u_z).sigmoid(), act(x_n + u_n)
        if mask is not None:
            candidate = candidate * mask[:n]
        now = z * before + (1 - z) * candidate
        h = now if n == B else torch.cat([now, h[n:]])
        ys.append(h)
    return torch.stack(ys), h


def standardize(v: Float[Tensor, "*batch G"], H: int, eps: float) -> Float[Tensor, "*batch G"]:
    """Layer normalization (Ba et al. 2016, arXiv:1607.06450, eqs. 3-4) without scale and shift.

    The units of the gates are normalized together. The candidate of a GRU with a reset gate, where the product is
    multiplied with r, is normalized for itself, as in the GRU of the paper's supplementary material.
    """
    parts = v.split([2 * H] if v.shape[-1] == 2 * H else [2 * H, H], dim=-1)
    return torch.cat([F.layer_norm(part, part.shape[-1:], eps=eps) for part in parts], dim=-1)
