"""The recurrence of the tanh RNN, with optional batch normalization of its pre-activation.

The engine `triton` runs it as a highway network with one layer and one gate; all others run the reference.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.scan.arguments import check_memory, check_not_empty, raised
from bnrnn.scan.backends import backend, product_dtype, triton_engine, without_autocast
from bnrnn.scan.norm.reference import normalize
from bnrnn.scan.rhn.reference import RHNStatistics
from bnrnn.scan.tracing import traced
from bnrnn.scan.trials import Trial

Result = tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]


def rnn_scan(
    x_proj: Float[Tensor, "T B H"],
    h: Float[Tensor, "B H"],
    weight_hh: Float[Tensor, "H H"],
    gamma: Float[Tensor, " H"] | None = None,
    beta: Float[Tensor, " H"] | None = None,
    eps: float = 1e-5,
    population: tuple[Tensor, Tensor] | None = None,
    batch_sizes: list[int] | None = None,
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"], tuple[Tensor | None, Tensor | None]]:
    """Run h_t = tanh(BN(W_hh h_{t-1} + x_proj_t; gamma, beta)), Cooijmans et al. 2016 (arXiv:1603.09025), section 4.

    Args:
        x_proj: the input product W_ih x.
        gamma: None turns normalization off.
        population: means and variances (T, H) to normalize with; None uses those of the batch.
        batch_sizes: number of sequences that run at each step, never increasing; None means all at every step. Finished
            sequences keep their h, and do not count in the statistics.

    Returns h of all steps, the last h, and the means and variances (T, H) that were used, which are None without gamma.
    Raises BnrnnError for empty sequences and for freed memory.
    """
    check_memory({"x_proj": x_proj, "h": h, "weight_hh": weight_hh, "gamma": gamma, "beta": beta,
                  "population": population})  # fmt: skip
    check_not_empty(len(x_proj), len(weight_hh))
    named: dict[str, Any] = {
        "gamma": gamma,
        "beta": beta,
        "eps": eps,
        "population": population,
        "batch_sizes": batch_sizes,
    }
    if not traced() and backend(x_proj.device, product_dtype(x_proj.device, x_proj.dtype) or x_proj.dtype) == "triton":
        tensors = raised(x_proj), raised(h), raised(weight_hh)
        low = {"product_dtype": product_dtype(x_proj.device, x_proj.dtype)}
        options: dict[str, Any] = named | {"gamma": raised(gamma), "beta": raised(beta)} | low
        with without_autocast(x_proj.device):
            if Trial("rnn_scan", _on_triton, _on_reference, "reference", tensors, options).passed():
                y, last, used = _on_triton(*tensors, **options)
                return y.to(x_proj.dtype), last.to(h.dtype), used
    return _on_reference(x_proj, h, weight_hh, **named)


def _on_reference(
    x_proj: Tensor, h: Tensor, weight_hh: Tensor, *, gamma: Tensor | None, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None, batch_sizes: list[int] | None, product_dtype: torch.dtype | None = None,
) -> Result:  # fmt: skip
    means, variances = population or ([None] * len(x_proj), [None] * len(x_proj))
    ys, seen = [], []
    sizes = batch_sizes or [len(h)] * len(x_proj)
    for x_t, n, mean, var in zip(x_proj.unbind(0), sizes, means, variances, strict=True):
        a = _product(h[:n], weight_hh, product_dtype) + x_t[:n]  # (n, H)
        if gamma is not None:
            a, mean, var = normalize(a, gamma, beta, eps, mean, var)
            seen.append((mean, var))
        h = torch.tanh(a) if n == len(h) else torch.cat([torch.tanh(a), h[n:]])
        ys.append(h)
    statistics = (torch.stack([m for m, _ in seen]), torch.stack([v for _, v in seen])) if seen else (None, None)
    return torch.stack(ys), h, statistics


def _product(h: Tensor, weight_hh: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The recurrent product in another precision; None means that of its factors."""
    return h @ weight_hh.T if dtype is None else (h.to(dtype) @ weight_hh.T.to(dtype)).to(h.dtype)


def _on_triton(
    x_proj: Tensor, h: Tensor, weight_hh: Tensor, *, gamma: Tensor | None, beta: Tensor | None, eps: float,
    population: tuple[Tensor, Tensor] | None, batch_sizes: list[int] | None, product_dtype: torch.dtype | None,
) -> Result:  # fmt: skip
    """The scan of float32 tensors."""
    mean, var = population or (None, None)
    parameters = {"gamma_z": gamma, "bias": beta}
    y, last, used = triton_engine("rhn").rhn_triton_scan(
        x_proj,
        h,
        weight_hh[None],
        eps=eps,
        population=None if mean is None or var is None else RHNStatistics(mean_z=mean[:, None], var_z=var[:, None]),
        batch_sizes=batch_sizes,
        product_dtype=product_dtype,
        **{name: None if value is None else value[None] for name, value in parameters.items()},
    )
    seen = (None if v is None else v[:, 0] for v in (used.mean_z, used.var_z))
    return y, last, tuple(seen)  # pyright: ignore
