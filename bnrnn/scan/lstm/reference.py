"""The reference for the recurrence of LSTM, input-normalized LSTM and BN-LSTM: a plain loop over time, using autograd.

The order of the gates is torch's, i f g o. Equation numbers are those of Cooijmans et al. 2016 (arXiv:1603.09025). With
layer normalization, they are eqs. 20 to 22 of Ba et al. 2016 (arXiv:1607.06450). Zoneout is eqs. 2 to 5 of Krueger et
al. 2017 (arXiv:1606.01305).

In a padded batch, the sequences are sorted by decreasing length and padded at the end. As in torch's PackedSequence,
`batch_sizes[t]` is the number of sequences that run at step t; finished sequences keep their state.
"""

from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.noise import Noise
from bnrnn.scan.norm.layer import normalize_rows
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

OVER = ("batch", "layer", "gate")  # what statistics are taken over


def groups_of(over: str) -> int:
    """The number of parts of a row of gates that have statistics of their own in layer normalization."""
    return 4 if over == "gate" else 1


def shapes(T: int, B: int, H: int, over: str = "batch") -> dict[str, tuple[int, ...]]:
    """The shapes of the arguments and statistics of a scan, by name."""
    G, K = 4 * H, groups_of(over)
    of_gates, of_cell = ((T, G), (T, H)) if over == "batch" else ((T, B, K), (T, B, 1))
    return {"x_proj": (T, B, G), "h": (B, H), "c": (B, H), "weight_hh": (G, H), "gamma_ih": (G,), "gamma_hh": (G,),
            "bias": (G,), "gamma_c": (H,), "beta_c": (H,), "mean_ih": of_gates, "var_ih": of_gates,
            "mean_hh": of_gates, "var_hh": of_gates, "mean_c": of_cell, "var_c": of_cell}  # fmt: skip


class LSTMOptions(TypedDict, total=False):
    """The optional arguments of `lstm_scan`, which every engine accepts.

    - gamma_ih: scale of the normalized input product; None turns its normalization off.
    - gamma_hh: scale of the normalized recurrent product; None turns its normalization off.
    - bias: added to the gates.
    - gamma_c: scale of the normalized cell output; None turns its normalization off.
    - beta_c: shift of the cell output, with or without normalization.
    - population: statistics to normalize with. None uses those of the batch, and gradients flow through them.
    - batch_sizes: number of sequences that run at each step, never increasing; None means all at every step.
    - ended_count: whether finished sequences count in the batch statistics, with the state that they keep, as in the
      code released for Cooijmans et al. 2016, section 5.4. By default only running sequences count.
    - product_dtype: precision of h W_hh^T, such as torch.bfloat16; all other values keep the dtype of the arguments.
    - over: what statistics are taken over. "batch" is batch normalization. "layer" is layer normalization, over all
      gates of a sequence together, and "gate" over each gate alone; these have no population statistics.
    - noise: zoneout and recurrent dropout; None means neither.
    """

    gamma_ih: Float[Tensor, " G"] | None
    gamma_hh: Float[Tensor, " G"] | None
    bias: Float[Tensor, " G"] | None
    gamma_c: Float[Tensor, " H"] | None
    beta_c: Float[Tensor, " H"] | None
    eps: float
    population: Statistics | None
    batch_sizes: list[int] | None
    ended_count: bool
    product_dtype: torch.dtype | None
    over: str
    noise: Noise | None


def lstm_scan(
    x_proj: Float[Tensor, "T B G"],
    h: Float[Tensor, "B H"],
    c: Float[Tensor, "B H"],
    weight_hh: Float[Tensor, "G H"],
    **options: Unpack[LSTMOptions],
) -> tuple[Float[Tensor, "T B H"], tuple[Float[Tensor, "B H"], Float[Tensor, "B H"]], Statistics]:
    """Run the recurrence over T steps. Return h of all steps, the last state (h, c), and the statistics that were used.

    Args:
        x_proj: the input product W_ih x, or any other part of the gates that does not depend on h.
        options: see LSTMOptions. Layer normalization returns no statistics.
    """
    batch_size, sizes, noise = h.shape[0], options.get("batch_sizes"), options.get("noise")
    weight = weight_hh.T.to(options.get("product_dtype") or weight_hh.dtype)
    noise = noise and noise.on(x_proj.device)
    norm, ys = _Norm(len(x_proj), options), []
    for t, x_t in enumerate(x_proj.unbind(0)):
        n = sizes[t] if sizes else batch_size  # so many sequences run; the others keep their state
        counted = batch_size if options.get("ended_count") else n  # so many sequences count in the statistics
        u = (_first(h, counted).to(weight.dtype) @ weight).to(h.dtype)  # (B, G)
        gates = norm(u, "hh", "gamma_hh", None, t) + norm(_first(x_t, counted), "ih", "gamma_ih", "bias", t)  # eq. 6
        i, f, g, o = _first(gates, n).chunk(4, dim=1)  # (B, H) each
        kept_c, kept_h, passed = noise.factors(t, _first(h, n)) if noise else (None, None, None)
        g = g.tanh() if passed is None else passed * g.tanh()
        new_c = _rest_kept(f.sigmoid() * _first(c, n) + i.sigmoid() * g, c)  # eq. 7
        z = norm(_first(new_c, counted), "c", "gamma_c", "beta_c", t)
        new_h = _rest_kept(o.sigmoid() * _first(z, n).tanh(), h)  # eq. 8
        h, c = _zoneout(kept_h, h, new_h), _zoneout(kept_c, c, new_c)
        ys.append(h)
    return torch.stack(ys), (h, c), norm.used()


class _Norm:
    """Normalizes the terms of a scan, and collects the statistics that it uses."""

    def __init__(self, num_steps: int, options: Any) -> None:
        self.options, self.eps, self.over = options, options.get("eps", 1e-5), options.get("over", "batch")
        given = options.get("population") or Statistics()
        steps = {name: [None] * num_steps if s is None else s.unbind(0) for name, s in given._asdict().items()}
        self.given: dict[str, Any] = steps
        self.seen: dict[str, list[Tensor]] = {name: [] for name in Statistics._fields}

    def __call__(self, v: Tensor, term: str, of_gamma: str, of_beta: str | None, t: int) -> Tensor:
        """Normalize, scale and shift v at step t. Without gamma, only shift it."""
        gamma, beta = self.options.get(of_gamma), self.options.get(of_beta)
        if gamma is None:
            return v if beta is None else v + beta
        if self.over != "batch":
            return normalize_rows(v, gamma, beta, self.eps, 1 if term == "c" else groups_of(self.over))
        names = f"mean_{term}", f"var_{term}"
        v, *statistics = normalize(v, gamma, beta, self.eps, *(self.given[name][t] for name in names))
        for name, value in zip(names, statistics, strict=True):
            self.seen[name].append(value)
        return v

    def used(self) -> Statistics:
        return Statistics(*(torch.stack(values) if values else None for values in self.seen.values()))


def _zoneout(kept: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """Keep so large parts (n, H) of the old values of the first n sequences. None means to keep nothing."""
    if kept is None:
        return new
    n = kept.shape[0]
    return _rest_kept(kept * _first(old, n) + (1 - kept) * _first(new, n), new)


def _first(x: Tensor, n: int) -> Tensor:
    return x if n == x.shape[0] else x[:n]  # a slice of all rows would still copy its gradient


def _rest_kept(new: Tensor, old: Tensor) -> Tensor:
    return new if new.shape[0] == old.shape[0] else torch.cat([new, old[new.shape[0] :]])
