"""The recurrence as one autograd function over the whole sequence, with a backward pass derived by hand.

`Steps` runs the time steps with torch operations, for any device and dtype; the compiled engine (cpu.py) is a subclass.
Signature and equations are those of reference.py.

Backward pass of step t. m() is the mean over the batch, z = BN(c), and x̂, û and ĉ are the normalized values before
scale and shift:
    dz = dh σ(o) (1 - tanh²z);      dγ_c += Σ dz ĉ;   dβ_c += Σ dz
    dc += γ_c rstd_c (dz - m(dz) - ĉ m(dz ĉ))                       (without normalization: dc += dz)
    da = dgates from dc and dh;     db += Σ da;       dγ_hh += Σ da û;    dγ_ih += Σ da x̂;    dc_{t-1} = dc σ(f)
    dx = γ_ih rstd_ih (da - m(da) - x̂ m(da x̂))
    du = γ_hh rstd_hh (da - m(da) - û m(da û));       dh_{t-1} += du W_hh;   dW_hh += duᵀ h_{t-1}
With population statistics, the m() terms are zero. To save memory, the backward pass recomputes the gates from x̂ and û,
and overwrites these with the gradients of x and u. With c and h, this takes ten numbers per unit and step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.graphs import Captured
from bnrnn.scan.lstm.reference import Options, Result, Statistics
from bnrnn.scan.native.build import plain
from bnrnn.scan.norm.reference import standardize, through_norm

PARAMETERS = ("gamma_ih", "gamma_hh", "bias", "gamma_c", "beta_c")


@dataclass
class Steps:
    """The arguments of a scan, and the values that the forward pass stores for the backward pass."""

    x: Tensor  # (T, B, 4H), input product; the forward pass normalizes it, the backward pass writes its gradient here
    # (T, B, 4H), normalized recurrent product; the backward pass overwrites it; None without gradients
    u: Tensor | None
    c: Tensor  # (T, B, H)
    y: Tensor  # (T, B, H)
    h_0: Tensor  # (B, H)
    c_0: Tensor
    weight_hh: Tensor  # (4H, H)
    weight_ih: Tensor | None  # (4H, 1) if x is the only input feature (T, B, 1) instead of the input product
    parameters: dict[str, Tensor | None]
    statistics: Statistics
    batch: bool  # whether to use batch statistics
    eps: float
    batch_sizes: list[int] | None
    ended_count: bool
    product_dtype: torch.dtype

    written = ("x", "u", "c", "y")  # by the forward pass; with batch statistics, also `statistics`

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def running(self, t: int) -> int:
        """Number of sequences that run at step t."""
        return self.batch_sizes[t] if self.batch_sizes else self.x.shape[1]

    def counted(self, t: int) -> int:
        """Number of sequences that count in the statistics of step t."""
        return self.x.shape[1] if self.ended_count else self.running(t)

    def forward(self) -> None:
        """Fill y, c and u, normalize x in place, and, with batch statistics, fill the statistics."""
        y = self.y
        gamma_ih, gamma_hh, _, gamma_c, beta_c = (self.parameters[name] for name in PARAMETERS)
        mean_ih, var_ih, mean_hh, var_hh, mean_c, var_c = self.statistics
        weight, h, c = self.weight_hh.t().to(self.product_dtype), self.h_0, self.c_0
        for t in range(len(y)):
            n, counted = self.running(t), self.counted(t)
            u = (h[:counted].to(weight.dtype) @ weight).to(h.dtype)
            if gamma_hh is not None:
                u = standardize(u, mean_hh[t], var_hh[t], self.eps, self.batch)  # pyright: ignore
            if gamma_ih is not None:
                self.x[t, :counted] = standardize(self.x[t, :counted], mean_ih[t], var_ih[t], self.eps, self.batch)  # pyright: ignore
            if self.u is not None:
                self.u[t, :counted] = u
            i, f, g, o = self._gates(u[:n], self.x[t, :n])
            self.c[t, :n], self.c[t, n:] = f * c[:n] + i * g, c[n:]
            c = self.c[t]
            z = c[:n]
            if gamma_c is not None:
                z = standardize(c[:counted], mean_c[t], var_c[t], self.eps, self.batch)[:n] * gamma_c  # pyright: ignore
            y[t, :n], y[t, n:] = o * (z if beta_c is None else z + beta_c).tanh(), h[n:]
            h = y[t]

    def _gates(self, u: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        for name, value in (("gamma_hh", u), ("gamma_ih", x)):
            gamma = self.parameters[name]
            scaled = value if gamma is None else gamma * value
            u, x = (scaled, x) if name == "gamma_hh" else (u, scaled)
        bias = self.parameters["bias"]
        i, f, g, o = (u + x if bias is None else u + x + bias).chunk(4, dim=1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def backward(self, dy: Tensor, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> None:
        """Backpropagate dy, the gradient of y, and dh and dc, the gradients of the last state.

        Writes the gradient of x into x, and the gradients of the initial state into dh and dc. Adds the gradients of
        the parameters, and of weight_ih if it is given, to `grads`, and stores the gradient of weight_hh there.
        """
        assert self.u is not None
        y = self.y
        weight = self.weight_hh.to(self.product_dtype)
        for t in reversed(range(len(y))):
            n, counted = self.running(t), self.counted(t)
            dh += dy[t]
            self._step_back(t, n, counted, dh[:n], dc, grads)
            dh_prev = (self.u[t, :counted].to(weight.dtype) @ weight).to(dh.dtype)
            dh[:n] = dh_prev[:n]
            dh[n:counted] += dh_prev[n:]
        h_prev = torch.cat([self.h_0[None], y[:-1]]).flatten(0, 1).to(weight.dtype)
        grads["weight_hh"] = (self.u.flatten(0, 1).t().to(weight.dtype) @ h_prev).to(dh.dtype)

    def _step_back(self, t: int, n: int, counted: int, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> None:
        gamma_ih, gamma_hh, bias, gamma_c, beta_c = (self.parameters[name] for name in PARAMETERS)
        _, var_ih, _, var_hh, mean_c, var_c = (None if v is None else v[t] for v in self.statistics)
        assert self.u is not None
        u, x, c = self.u[t, :counted], self.x[t, :counted], self.c[t, :counted]
        c_prev = self.c[t - 1] if t else self.c_0
        i, f, g, o = self._gates(u[:n], x[:n])
        c_hat = c if gamma_c is None else (c - mean_c) * (var_c + self.eps).rsqrt()  # pyright: ignore
        z = c_hat[:n] if gamma_c is None else gamma_c * c_hat[:n]
        tanh_z = (z if beta_c is None else z + beta_c).tanh()
        dz = torch.zeros_like(c)
        dz[:n] = dh * o * (1 - tanh_z.square())
        if gamma_c is not None and var_c is not None:
            dz = through_norm(dz, c_hat, gamma_c, var_c, self.eps, self.batch, grads["gamma_c"], grads.get("beta_c"))
        elif beta_c is not None:
            grads["beta_c"] += dz.sum(0)
        dc[:counted] += dz
        d = dc[:n]
        da = torch.zeros_like(u)
        parts = (d * g * i * (1 - i), d * c_prev[:n] * f * (1 - f), d * i * (1 - g * g), dh * tanh_z * o * (1 - o))
        torch.cat(parts, dim=1, out=da[:n])
        dc[:n] *= f
        if bias is not None:
            grads["bias"] += da.sum(0)
        for name, v, gamma, var in (("gamma_hh", u, gamma_hh, var_hh), ("gamma_ih", x, gamma_ih, var_ih)):
            if gamma is None or var is None:
                v.copy_(da)
            else:
                v.copy_(through_norm(da, v, gamma, var, self.eps, self.batch, grads[name], None))
        self.u[t, counted:] = 0
        self.x[t, counted:] = 0

    def results(self) -> tuple[Tensor, Tensor]:
        """y and the last c, after the forward pass."""
        return self.y, self.c[-1].clone()

    def gradients(self, dy: Tensor, dlast: Tensor) -> dict[str, Tensor | None]:
        """Gradients with respect to the scan's arguments, by name, given those of `results`; spends the buffers."""
        dc = plain(dlast).clone()
        dh = torch.zeros_like(dc)
        added_to = {"weight_ih": self.weight_ih, **self.parameters}
        grads = {name: torch.zeros_like(p) for name, p in added_to.items() if p is not None}
        self.backward(plain(dy), dh, dc, grads)
        return {"x_proj": self.x if self.weight_ih is None else None, "h": dh, "c": dc, **grads}


def fused_scan(
    engine: Callable[..., Steps | Captured],
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    weight_ih: Tensor | None = None,
    overwrite: bool = False,
    **options: Unpack[Options],
) -> Result:
    """`lstm_scan` of reference.py, whose time steps `engine` runs.

    Args:
        overwrite: whether to reuse the memory of x_proj instead of a copy. Its values are then lost.
        weight_ih: (4H, 1). If given, x_proj is the only feature of the input (T, B, 1), which gets no gradient.

    """
    inputs = (x_proj, h, c, weight_hh, weight_ih, *(options.get(name) for name in PARAMETERS))
    with_grad = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs)
    steps = prepare(engine, *inputs[:5], with_grad=with_grad, overwrite=overwrite, **options)
    if with_grad:
        names = ("x_proj", "h", "c", "weight_hh", "weight_ih", *PARAMETERS)
        y, c = autograd.run(engine, steps, names, inputs)
    else:
        steps.forward()
        y, c = steps.results()
    return y, (y[-1].clone(), c), steps.statistics  # a state of its own may be changed, and keeps no other step


def prepare(
    engine: Callable[..., Steps | Captured],
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    weight_ih: Tensor | None = None,
    *,
    with_grad: bool,
    overwrite: bool = False,
    **options: Unpack[Options],
) -> Steps | Captured:
    """The steps of `fused_scan` with these arguments, to be run."""
    T, B, _ = x_proj.shape
    G, H = weight_hh.shape
    given = {name: options.get(name) for name in PARAMETERS}
    inputs = (x_proj, h, c, weight_hh, weight_ih, *given.values())
    constant = [None if v is None else plain(v.detach() if v.requires_grad else v) for v in inputs]
    x, h_0, c_0, weight, of_input, *parameters = constant
    assert x is not None and h_0 is not None and c_0 is not None and weight is not None
    if weight_ih is None and not overwrite and x.data_ptr() == x_proj.data_ptr():
        x = x.clone()
    population = options.get("population")
    sizes = [(name, size) for name, size in (("gamma_ih", G), ("gamma_hh", G), ("gamma_c", H)) for _ in range(2)]
    used = Statistics(
        *(
            None if given[name] is None else x.new_empty(T, size) if value is None else plain(value)
            for (name, size), value in zip(sizes, population or Statistics(), strict=True)
        )
    )
    return engine(
        x=x,
        u=x.new_empty(T, B, G) if with_grad else None,
        c=x.new_empty(T, B, H),
        y=x.new_empty(T, B, H),
        h_0=h_0,
        c_0=c_0,
        weight_hh=weight,
        weight_ih=of_input,
        parameters=dict(zip(PARAMETERS, parameters, strict=True)),
        statistics=used,
        batch=population is None,
        eps=options.get("eps", 1e-5),
        batch_sizes=options.get("batch_sizes"),
        ended_count=options.get("ended_count", False),
        product_dtype=options.get("product_dtype") or weight.dtype,
    )
