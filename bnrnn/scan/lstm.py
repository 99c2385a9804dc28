"""The recurrence of LSTM, input-normalized LSTM and BN-LSTM, as a plain loop over time in autograd: the reference.

Gates stand in torch's order i f g o. Equation numbers are those of Cooijmans et al. 2016 (arXiv:1603.09025).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.norm import moments, normalize


class Statistics(NamedTuple):
    """Means and variances per time step, (T, 4H) of the recurrent term and (T, H) of the cell; None where unused."""

    mean_hh: Tensor | None = None
    var_hh: Tensor | None = None
    mean_c: Tensor | None = None
    var_c: Tensor | None = None


def lstm_scan(
    gates_x: Float[Tensor, "T B G"],
    h: Float[Tensor, "B H"],
    c: Float[Tensor, "B H"],
    weight_hh: Float[Tensor, "G H"],
    gamma_hh: Float[Tensor, " G"] | None = None,
    gamma_c: Float[Tensor, " H"] | None = None,
    beta_c: Float[Tensor, " H"] | None = None,
    eps: float = 1e-5,
    population: Statistics | None = None,
    collect: bool = False,
) -> tuple[Float[Tensor, "T B H"], tuple[Float[Tensor, "B H"], Float[Tensor, "B H"]], Statistics]:
    """Run the recurrence over T steps and return every h, the last state, and statistics if `collect` asks for them.

    Args:
        gates_x: the input's share of the gates with the bias, normalized or not: what does not depend on h.
        gamma_hh: scale of the normalized recurrent term; None leaves that term as it is.
        gamma_c: scale of the normalized cell output; None leaves it as it is.
        beta_c: shift of the cell output, normalized or not; None for none.
        population: statistics to normalize with; None uses those of the batch and sends gradients through them.
    """
    num_steps = len(gates_x)
    given = [[None] * num_steps if s is None else s.unbind(0) for s in population or Statistics()]
    ys, seen_u, seen_c = [], [], []
    for t, x_t in enumerate(gates_x.unbind(0)):
        mean_hh, var_hh, mean_c, var_c = (s[t] for s in given)
        u = h @ weight_hh.T  # (B, G)
        gates = x_t + (u if gamma_hh is None else normalize(u, gamma_hh, None, eps, mean_hh, var_hh))  # eq. 6
        i, f, g, o = gates.chunk(4, dim=1)  # (B, H) each
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()  # eq. 7
        if gamma_c is not None:
            z = normalize(c, gamma_c, beta_c, eps, mean_c, var_c)
        else:
            z = c if beta_c is None else c + beta_c
        h = o.sigmoid() * z.tanh()  # eq. 8
        ys.append(h)
        if collect:
            seen_u.append(moments(u))
            seen_c.append(moments(c))
    seen = Statistics()
    if collect:
        seen = Statistics(*(torch.stack(s) for s in (*zip(*seen_u, strict=True), *zip(*seen_c, strict=True))))
    return torch.stack(ys), (h, c), seen
