"""The recurrence of recurrent highway networks, Zilly et al. 2016 (arXiv:1607.03474), as a plain loop in autograd.

At each time step the state goes through D highway layers, of which only the first sees the input:

    h, t, c = tanh(a_d), σ(a_d), σ(a_d), each of its own part of a_d = R_d s_{d-1} + [d = 1] W x + b_d
    s_d = h ⊙ t + s_{d-1} ⊙ c,   c = 1 - t where the gates are coupled

Gates stand in the order h t (c). Zhang et al. 2017 normalize within it: `gamma_s` the state that enters a layer, on its
way to R_d alone; `gamma_z` the sum a_d; `gamma_x` the input product. Padding is as in bnrnn.scan.lstm.reference.
"""

from typing import NamedTuple, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.norm.reference import normalize


class RHNStatistics(NamedTuple):
    """Means and variances per time step: (T, G) of the input product, (T, K, H) of states, (T, D, G) of sums."""

    mean_x: Tensor | None = None
    var_x: Tensor | None = None
    mean_s: Tensor | None = None
    var_s: Tensor | None = None
    mean_z: Tensor | None = None
    var_z: Tensor | None = None


Result = tuple[Tensor, Tensor, RHNStatistics]


class Options(TypedDict, total=False):
    """The arguments of `rhn_scan` that may be left out; every engine takes them."""

    bias: Tensor | None
    gamma_x: Tensor | None
    gamma_s: Tensor | None
    beta_s: Tensor | None
    gamma_z: Tensor | None
    eps: float
    population: RHNStatistics | None
    batch_sizes: list[int] | None
    product_dtype: torch.dtype | None


def rhn_scan(
    x_proj: Float[Tensor, "T B G"],
    s: Float[Tensor, "B H"],
    weight: Float[Tensor, "D G H"],
    *,
    bias: Float[Tensor, "D G"] | None = None,
    gamma_x: Float[Tensor, " G"] | None = None,
    gamma_s: Float[Tensor, "K H"] | None = None,
    beta_s: Float[Tensor, "K H"] | None = None,
    gamma_z: Float[Tensor, "D G"] | None = None,
    eps: float = 1e-5,
    population: RHNStatistics | None = None,
    batch_sizes: list[int] | None = None,
    product_dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"], RHNStatistics]:
    """Run the recurrence over T steps and return every s_D, the last one, and the statistics it normalized with.

    Args:
        x_proj: the input product W x; with G = 2 H gates are coupled, with 3 H they are not.
        weight: R_1 to R_D.
        bias: of a_d, after its normalization if it has one.
        gamma_x: scale of the normalized input product; None leaves it as it is.
        gamma_s, beta_s: scale and shift of the normalized state before R_d, for the first K layers.
        gamma_z: scale of the normalized sums.
        population: statistics to normalize with; None uses those of the batch and sends gradients through them.
        batch_sizes: how many sequences run at each step, never increasing; None: all at every step.
        product_dtype: precision of the products with R_d, such as torch.bfloat16; all else keeps that of the arguments.
    """
    T, B, G = x_proj.shape
    D, H = len(weight), s.shape[1]
    given = population or RHNStatistics()
    low = weight.to(product_dtype or weight.dtype)
    seen: list[list[Tensor]] = [[] for _ in RHNStatistics._fields]

    def norm(v: Tensor, which: int, gamma: Tensor, beta: Tensor | None, *place: int) -> Tensor:
        mean, var = (None if p is None else p[place] for p in given[which : which + 2])
        v, mean, var = normalize(v, gamma, beta, eps, mean, var)
        seen[which].append(mean)
        seen[which + 1].append(var)
        return v

    ys = []
    for t, x in enumerate(x_proj.unbind(0)):
        n = batch_sizes[t] if batch_sizes else B
        x, before = (x, s) if n == B else (x[:n], s[:n])
        now = before
        if gamma_x is not None:
            x = norm(x, 0, gamma_x, None, t)
        for d in range(D):
            of_d = now
            if gamma_s is not None and d < len(gamma_s):
                of_d = norm(now, 2, gamma_s[d], None if beta_s is None else beta_s[d], t, d)
            a = (of_d.to(low.dtype) @ low[d].T).to(of_d.dtype)  # (n, G)
            if d == 0:
                a = a + x
            b = None if bias is None else bias[d]
            if gamma_z is not None:
                a = norm(a, 4, gamma_z[d], b, t, d)
            elif b is not None:
                a = a + b
            gates = a.chunk(G // H, dim=1)
            transform = gates[1].sigmoid()
            carry = gates[2].sigmoid() if G == 3 * H else 1 - transform
            now = gates[0].tanh() * transform + now * carry
        s = now if n == B else torch.cat([now, s[n:]])
        ys.append(s)
    shapes = [(T, G), (T, G), *[(T, -1, H)] * 2, *[(T, D, G)] * 2]
    used = (torch.stack(v).view(shape) if v else None for v, shape in zip(seen, shapes, strict=True))
    return torch.stack(ys), s, RHNStatistics(*used)
