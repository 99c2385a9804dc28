"""The reference for recurrent highway networks, Zilly et al. 2016 (arXiv:1607.03474): a plain loop, using autograd.

At each time step the state passes through D highway layers. Only the first layer reads the input:

    a_d = R_d s_{d-1} + [d = 1] W x + b_d
    h, t, c = tanh, σ, σ of the three parts of a_d, in this order
    s_d = h ⊙ t + s_{d-1} ⊙ c

With coupled gates, c = 1 - t and a_d has two parts. The normalizations of Zhang et al. 2017 are optional: `gamma_s`
normalizes the state s_{d-1} in R_d s_{d-1} (not in s_{d-1} ⊙ c), `gamma_z` the sum a_d, and `gamma_x` the input
product. Padding is as in bnrnn.scan.lstm.reference.
"""

from typing import NamedTuple, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.norm.reference import normalize


class RHNStatistics(NamedTuple):
    """Means and variances per time step: (T, G) for the input product, (T, K, H) for states, (T, D, G) for sums a_d."""

    mean_x: Tensor | None = None
    var_x: Tensor | None = None
    mean_s: Tensor | None = None
    var_s: Tensor | None = None
    mean_z: Tensor | None = None
    var_z: Tensor | None = None


Result = tuple[Tensor, Tensor, RHNStatistics]


def shapes(T: int, B: int, G: int, D: int, H: int, K: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arguments and statistics of a scan, by name. The first K layers normalize their input state."""
    return {"x_proj": (T, B, G), "s": (B, H), "weight": (D, G, H), "bias": (D, G), "gamma_x": (G,), "gamma_s": (K, H),
            "beta_s": (K, H), "gamma_z": (D, G), "mean_x": (T, G), "var_x": (T, G), "mean_s": (T, K, H),
            "var_s": (T, K, H), "mean_z": (T, D, G), "var_z": (T, D, G)}  # fmt: skip


class RHNOptions(TypedDict, total=False):
    """The optional arguments of `rhn_scan`, which every engine accepts."""

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
    """Run the recurrence over T steps. Return s_D of all steps, the last s_D, and the statistics that were used.

    Args:
        x_proj: the input product W x. With G = 2 H the gates are coupled, with G = 3 H they are not.
        weight: R_1 to R_D.
        bias: b_d, added to a_d, after its normalization if there is one.
        gamma_x: scale of the normalized input product; None turns its normalization off.
        gamma_s, beta_s: scale and shift of the normalized state in R_d s_{d-1}, for the first K layers.
        gamma_z: scale of the normalized sums a_d; None turns their normalization off.
        population: statistics to normalize with. None uses those of the batch, and gradients flow through them.
        batch_sizes: number of sequences that run at each step, never increasing; None means all at every step.
        product_dtype: precision of the products with R_d, such as torch.bfloat16; all other values keep the dtype of
            the arguments.
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
