"""The reference for the recurrence of LSTM, input-normalized LSTM and BN-LSTM: a plain loop over time, using autograd.

The order of the gates is torch's, i f g o. Equation numbers are those of Cooijmans et al. 2016 (arXiv:1603.09025).

In a padded batch, the sequences are sorted by decreasing length and padded at the end. As in torch's PackedSequence,
`batch_sizes[t]` is the number of sequences that run at step t; finished sequences keep their state.
"""

from typing import NamedTuple, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.norm.reference import normalize


class Statistics(NamedTuple):
    """Means and variances per time step: (T, 4H) for the two products, (T, H) for the cell; None if not normalized."""

    mean_ih: Tensor | None = None
    var_ih: Tensor | None = None
    mean_hh: Tensor | None = None
    var_hh: Tensor | None = None
    mean_c: Tensor | None = None
    var_c: Tensor | None = None


Result = tuple[Tensor, tuple[Tensor, Tensor], Statistics]


def shapes(T: int, B: int, H: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arguments and statistics of a scan, by name."""
    G = 4 * H
    return {"x_proj": (T, B, G), "h": (B, H), "c": (B, H), "weight_hh": (G, H), "gamma_ih": (G,), "gamma_hh": (G,),
            "bias": (G,), "gamma_c": (H,), "beta_c": (H,), "mean_ih": (T, G), "var_ih": (T, G), "mean_hh": (T, G),
            "var_hh": (T, G), "mean_c": (T, H), "var_c": (T, H)}  # fmt: skip


class LSTMOptions(TypedDict, total=False):
    """The optional arguments of `lstm_scan`, which every engine accepts."""

    gamma_ih: Tensor | None
    gamma_hh: Tensor | None
    bias: Tensor | None
    gamma_c: Tensor | None
    beta_c: Tensor | None
    eps: float
    population: Statistics | None
    batch_sizes: list[int] | None
    ended_count: bool
    product_dtype: torch.dtype | None


def lstm_scan(
    x_proj: Float[Tensor, "T B G"],
    h: Float[Tensor, "B H"],
    c: Float[Tensor, "B H"],
    weight_hh: Float[Tensor, "G H"],
    *,
    gamma_ih: Float[Tensor, " G"] | None = None,
    gamma_hh: Float[Tensor, " G"] | None = None,
    bias: Float[Tensor, " G"] | None = None,
    gamma_c: Float[Tensor, " H"] | None = None,
    beta_c: Float[Tensor, " H"] | None = None,
    eps: float = 1e-5,
    population: Statistics | None = None,
    batch_sizes: list[int] | None = None,
    ended_count: bool = False,
    product_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "T B H"], tuple[Float[Tensor, "B H"], Float[Tensor, "B H"]], Statistics]:
    """Run the recurrence over T steps. Return h of all steps, the last state (h, c), and the statistics that were used.

    Args:
        x_proj: the input product W_ih x, or any other part of the gates that does not depend on h.
        gamma_ih: scale of the normalized input product; None turns its normalization off.
        gamma_hh: scale of the normalized recurrent product; None turns its normalization off.
        bias: added to the gates.
        gamma_c: scale of the normalized cell output; None turns its normalization off.
        beta_c: shift of the cell output, with or without normalization.
        population: statistics to normalize with. None uses those of the batch, and gradients flow through them.
        batch_sizes: number of sequences that run at each step, never increasing; None means all at every step.
        ended_count: whether finished sequences count in the batch statistics, with the state that they keep, as in the
            code released for Cooijmans et al. 2016, section 5.4. By default only running sequences count.
        product_dtype: precision of h W_hh^T, such as torch.bfloat16; all other values keep the dtype of the arguments.
    """
    num_steps, batch_size = x_proj.shape[:2]
    given = [[None] * num_steps if s is None else s.unbind(0) for s in population or Statistics()]
    weight = weight_hh.T.to(product_dtype or weight_hh.dtype)
    ys: list[Tensor] = []
    seen: list[list[Tensor]] = [[] for _ in Statistics._fields]

    def norm(v: Tensor, which: int, gamma: Tensor | None, beta: Tensor | None, t: int) -> Tensor:
        if gamma is None:
            return v if beta is None else v + beta
        v, mean, var = normalize(v, gamma, beta, eps, given[which][t], given[which + 1][t])
        seen[which].append(mean)
        seen[which + 1].append(var)
        return v

    for t, x_t in enumerate(x_proj.unbind(0)):
        n = batch_sizes[t] if batch_sizes else batch_size  # so many sequences run; the others keep their state
        counted = batch_size if ended_count else n  # so many sequences count in the statistics
        u = (_first(h, counted).to(weight.dtype) @ weight).to(h.dtype)  # (B, G)
        gates = norm(u, 2, gamma_hh, None, t) + norm(_first(x_t, counted), 0, gamma_ih, bias, t)  # eq. 6
        i, f, g, o = _first(gates, n).chunk(4, dim=1)  # (B, H) each
        c = _rest_kept(f.sigmoid() * _first(c, n) + i.sigmoid() * g.tanh(), c)  # eq. 7
        z = norm(_first(c, counted), 4, gamma_c, beta_c, t)
        h = _rest_kept(o.sigmoid() * _first(z, n).tanh(), h)  # eq. 8
        ys.append(h)
    used = Statistics(*(torch.stack(values) if values else None for values in seen))
    return torch.stack(ys), (h, c), used


def _first(x: Tensor, n: int) -> Tensor:
    return x if n == x.shape[0] else x[:n]  # a slice of all rows would still copy its gradient


def _rest_kept(new: Tensor, old: Tensor) -> Tensor:
    return new if new.shape[0] == old.shape[0] else torch.cat([new, old[new.shape[0] :]])
