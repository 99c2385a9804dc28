"""The recurrence as one autograd function over the whole sequence, with a backward pass derived by hand.

`LSTMSteps` runs the time steps with torch operations, for any device and dtype; the compiled engine (cpu.py) is a
subclass.
Signature and equations are those of reference.py.

Backward pass of step t. m() is the mean over the batch, z = BN(c), and x̂, û and ĉ are the normalized values before
scale and shift:
    dz = dh σ(o) (1 - tanh²z);      dγ_c += Σ dz ĉ;   dβ_c += Σ dz
    dc += γ_c rstd_c (dz - m(dz) - ĉ m(dz ĉ))                       (without normalization: dc += dz)
    da = dgates from dc and dh;     db += Σ da;       dγ_hh += Σ da û;    dγ_ih += Σ da x̂;    dc_{t-1} = dc σ(f)
    dx = γ_ih rstd_ih (da - m(da) - x̂ m(da x̂))
    du = γ_hh rstd_hh (da - m(da) - û m(da û));       dh_{t-1} += du W_hh;   dW_hh += duᵀ h_{t-1}
With population statistics, the m() terms are zero. With layer normalization, m() is the mean over the units, and γ is
inside of it, beside dz or da.

Zoneout keeps the parts k_c and k_h of the previous c and h. Step t then begins with
    dh_{t-1} += k_h dh;   dh *= 1 - k_h;   dc_{t-1} += k_c dc;   dc *= 1 - k_c
and computes the cell before zoneout again. Recurrent dropout replaces tanh(g) by its product with a factor.

To save memory, the backward pass recomputes the gates from x̂ and û, and overwrites these with the gradients of x and u.
With c and h, this takes ten numbers per unit and step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.graphs import Captured
from bnrnn.scan.lstm.reference import LSTMOptions, Result, Statistics, shapes
from bnrnn.scan.native.build import plain
from bnrnn.scan.noise import Noise
from bnrnn.scan.norm.layer import standardize_rows, through_rows
from bnrnn.scan.norm.reference import standardize
from bnrnn.scan.steps import FusedSteps, common_fields, detached

PARAMETERS = ("gamma_ih", "gamma_hh", "bias", "gamma_c", "beta_c")


@dataclass(kw_only=True)
class LSTMSteps(FusedSteps):
    """The steps of an LSTM, with torch operations. x has 4H columns."""

    # (T, B, 4H), normalized recurrent product; the backward pass overwrites it; None without gradients
    u: Tensor | None
    c: Tensor  # (T, B, H)
    y: Tensor  # (T, B, H)
    h_0: Tensor  # (B, H)
    c_0: Tensor
    weight_hh: Tensor  # (4H, H)
    weight_ih: Tensor | None  # (4H, 1) if x is the only input feature (T, B, 1) instead of the input product
    ended_count: bool
    over: str
    noise: Noise | None

    written = ("x", "u", "c", "y")

    def counted(self, t: int) -> int:
        """Number of sequences that count in the statistics of step t."""
        return self.x.shape[1] if self.ended_count else self.running(t)

    def forward(self) -> None:
        """Fill y, c and u, normalize x in place, and, with batch statistics, fill the statistics."""
        gamma_ih, _, _, gamma_c, beta_c = (self.parameters[name] for name in PARAMETERS)
        y, weight, h, c = self.y, self.weight_hh.t().to(self.product_dtype), self.h_0, self.c_0
        for t in range(len(y)):
            n, counted = self.running(t), self.counted(t)
            u = self.normalized(self.product(h[:counted], weight), "hh", t)
            if gamma_ih is not None:
                self.x[t, :counted] = self.normalized(self.x[t, :counted], "ih", t)
            if self.u is not None:
                self.u[t, :counted] = u
            i, f, g, o = self._gates(u[:n], self.x[t, :n])
            old, kept = c, self._factors(t, n)
            self.c[t, :n], self.c[t, n:] = f * c[:n] + i * (g * kept[2] if kept else g), c[n:]
            c = self.c[t]
            z = c[:n] if gamma_c is None else self.normalized(c[:counted], "c", t)[:n] * gamma_c
            y[t, :n], y[t, n:] = o * (z if beta_c is None else z + beta_c).tanh(), h[n:]
            if kept:
                c[:n] = kept[0] * old[:n] + (1 - kept[0]) * c[:n]
                y[t, :n] = kept[1] * h[:n] + (1 - kept[1]) * y[t, :n]
            h = y[t]

    def _gates(self, u: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        gamma_ih, gamma_hh, bias, _, _ = (self.parameters[name] for name in PARAMETERS)
        a = (u if gamma_hh is None else gamma_hh * u) + (x if gamma_ih is None else gamma_ih * x)
        i, f, g, o = (a if bias is None else a + bias).chunk(4, dim=1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def _factors(self, t: int, n: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Those of `Noise` for the n sequences that run."""
        return None if self.noise is None else self.noise.factors(t, self.c_0[:n])

    def normalized(self, v: Tensor, term: str, *place: int) -> Tensor:
        mean, var = getattr(self.statistics, f"mean_{term}"), getattr(self.statistics, f"var_{term}")
        if self.over == "batch" or mean is None:
            return super().normalized(v, term, *place)
        return standardize_rows(v, mean[place][: len(v)], var[place][: len(v)], self.eps)

    def through_norm(
        self, dv: Tensor, v: Tensor, term: str, place: tuple[int, ...], gamma: Tensor | None, dgamma: Tensor | None,
        dbeta: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.over == "batch" or gamma is None or dgamma is None:
            return super().through_norm(dv, v, term, place, gamma, dgamma, dbeta)
        var = getattr(self.statistics, f"var_{term}")[place][: len(v)]
        return through_rows(dv, v, gamma, var, self.eps, dgamma, dbeta)

    def backward(self, dy: Tensor, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> None:
        """Backpropagate dy, the gradient of y, and dh and dc, the gradients of the last state.

        Writes the gradient of x into x, and the gradients of the initial state into dh and dc. Adds the gradients of
        the parameters, and of weight_ih if it is given, to `grads`, and stores the gradient of weight_hh there.
        """
        assert self.u is not None
        y, weight = self.y, self.weight_hh.to(self.product_dtype)
        for t in reversed(range(len(y))):
            n, counted = self.running(t), self.counted(t)
            dh += dy[t]
            kept = self._factors(t, n)
            through = dh[:n] if kept is None else (1 - kept[1]) * dh[:n]
            self._step_back(t, n, counted, through, dc, kept, grads)
            dh_prev = self.product(self.u[t, :counted], weight)
            dh[:n] = dh_prev[:n] if kept is None else dh_prev[:n] + kept[1] * dh[:n]
            dh[n:counted] += dh_prev[n:]
        h_prev = torch.cat([self.h_0[None], y[:-1]]).flatten(0, 1)
        grads["weight_hh"] = self.outer(self.u.flatten(0, 1), h_prev)

    def _step_back(
        self, t: int, n: int, counted: int, dh: Tensor, dc: Tensor, kept: tuple[Tensor, ...] | None,
        grads: dict[str, Tensor],
    ) -> None:  # fmt: skip
        bias, gamma_c, beta_c = (self.parameters[name] for name in ("bias", "gamma_c", "beta_c"))
        assert self.u is not None
        u, x, c = self.u[t, :counted], self.x[t, :counted], self.c[t, :counted]
        c_prev = self.c[t - 1] if t else self.c_0
        i, f, g, o = self._gates(u[:n], x[:n])
        passed = through = None
        if kept is not None:
            passed, through = kept[2], kept[0] * dc[:n]
            c = torch.cat([f * c_prev[:n] + i * (g * passed), c[n:]])  # before zoneout
            dc[:n] *= 1 - kept[0]
        if gamma_c is None:
            c_hat, z = c, c[:n]
        else:
            rows = slice(None) if self.over == "batch" else slice(counted)
            mean, var = self.statistics.mean_c[t][rows], self.statistics.var_c[t][rows]
            c_hat = standardize(c, mean, var, self.eps, False)
            z = gamma_c * c_hat[:n]
        tanh_z = (z if beta_c is None else z + beta_c).tanh()
        dz = torch.zeros_like(c)
        dz[:n] = dh * o * (1 - tanh_z.square())
        if gamma_c is not None:
            dz = self.through_norm(dz, c_hat, "c", (t,), gamma_c, grads["gamma_c"], grads.get("beta_c"))
        elif beta_c is not None:
            grads["beta_c"] += dz.sum(0)
        dc[:counted] += dz
        d = dc[:n]
        da = torch.zeros_like(u)
        d_g = d if passed is None else d * passed
        parts = (d_g * g * i * (1 - i), d * c_prev[:n] * f * (1 - f), d_g * i * (1 - g * g), dh * tanh_z * o * (1 - o))
        torch.cat(parts, dim=1, out=da[:n])
        dc[:n] *= f
        if through is not None:
            dc[:n] += through
        if bias is not None:
            grads["bias"] += da.sum(0)
        for term, v in (("hh", u), ("ih", x)):
            name = f"gamma_{term}"
            v.copy_(self.through_norm(da, v, term, (t,), self.parameters[name], grads.get(name)))
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
    engine: Callable[..., LSTMSteps | Captured],
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    weight_ih: Tensor | None = None,
    overwrite: bool = False,
    **options: Unpack[LSTMOptions],
) -> Result:
    """`lstm_scan` of reference.py, whose time steps `engine` runs.

    Args:
        overwrite: whether to reuse the memory of x_proj instead of a copy. Its values are then lost.
        weight_ih: (4H, 1). If given, x_proj is the only feature of the input (T, B, 1), which gets no gradient.

    """
    inputs = {"x_proj": x_proj, "h": h, "c": c, "weight_hh": weight_hh, "weight_ih": weight_ih}
    tensors = inputs | {name: options.get(name) for name in PARAMETERS}
    with_grad = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in tensors.values())
    steps = prepare(engine, **inputs, with_grad=with_grad, overwrite=overwrite, **options)
    if with_grad:
        y, c = autograd.run(engine, steps, tensors)
    else:
        steps.forward()
        y, c = steps.results()
    used = steps.statistics if options.get("over", "batch") == "batch" else Statistics()
    return y, (y[-1].clone(), c), used  # a state of its own may be changed, and keeps no other step


def prepare(
    engine: Callable[..., LSTMSteps | Captured],
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    weight_ih: Tensor | None = None,
    *,
    with_grad: bool,
    overwrite: bool = False,
    **options: Unpack[LSTMOptions],
) -> LSTMSteps | Captured:
    """The steps of `fused_scan` with these arguments, to be run."""
    T, B, _ = x_proj.shape
    G, H = weight_hh.shape
    x, over, noise = detached(x_proj), options.get("over", "batch"), options.get("noise")
    if weight_ih is None and not overwrite and x.data_ptr() == x_proj.data_ptr():
        x = x.clone()
    return engine(
        x=x,
        u=x.new_empty(T, B, G) if with_grad else None,
        c=x.new_empty(T, B, H),
        y=x.new_empty(T, B, H),
        h_0=detached(h),
        c_0=detached(c),
        weight_hh=detached(weight_hh),
        weight_ih=None if weight_ih is None else detached(weight_ih),
        ended_count=options.get("ended_count", False) and over == "batch",
        over=over,
        noise=noise and noise.on(x.device),
        **common_fields(x, PARAMETERS, Statistics, shapes(T, B, H, over), options),
    )
