"""The recurrence as one autograd function over the whole sequence, with a backward derived by hand.

What lies between the matrix products of two time steps is a pair of step functions: `AtenSteps` here, for any device
and dtype, or a compiled kernel (lstm_cpu.py). The signature and the equations are those of bnrnn.scan.lstm.

Backward of step t, with m() the mean over the batch, z = BN(c), û and ĉ normalized, without scale and shift:
    dz = dh σ(o) (1 - tanh²z);      dγ_c += Σ dz ĉ;   dβ_c += Σ dz
    dc += γ_c rstd_c (dz - m(dz) - ĉ m(dz ĉ))                       (dz itself without normalization)
    da = dgates from dc and dh;     dγ_hh += Σ da û;  dc_{t-1} = dc σ(f)
    du = γ_hh rstd_hh (da - m(da) - û m(da û));       dh_{t-1} += du W_hh;   dW_hh += duᵀ h_{t-1}
Under population statistics the m() terms vanish. Gates are recomputed from û rather than stored.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bnrnn.scan.lstm import Statistics
from bnrnn.scan.norm import moments


@dataclass
class Saved:
    """What a forward pass leaves to its backward pass; time is the first axis."""

    x: Tensor  # (T, B, 4H), gates_x
    u: Tensor  # (T, B, 4H), normalized recurrent term; turned into its gradient
    c: Tensor  # (T, B, H)
    c_0: Tensor  # (B, H)
    mean_hh: Tensor  # (T, 4H), of the batch or of the population, like those below
    rstd_hh: Tensor
    mean_c: Tensor  # (T, H)
    rstd_c: Tensor
    gamma_hh: Tensor | None
    gamma_c: Tensor | None
    beta_c: Tensor | None
    eps: float
    batch: bool  # whether the statistics are those of the batch

    def c_prev(self, t: int) -> Tensor:
        return self.c[t - 1] if t else self.c_0


@runtime_checkable
class Steps(Protocol):
    """The elementwise and normalizing part of one time step."""

    def forward(self, s: Saved, t: int, h: Tensor) -> None:
        """From u[t] = h W_hh^T and c_prev: write u[t] normalized, the statistics of step t, c[t], and h (B, H)."""
        ...

    def backward(
        self, s: Saved, t: int, dh: Tensor, dc: Tensor, da: Tensor, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """From dh and dc of step t: write da (B, 4H), u[t] as its gradient, dc as that of c_prev; add to `sums`, the
        gradients of gamma_hh, gamma_c and beta_c."""
        ...


def _standardize(v: Tensor, mean: Tensor, rstd: Tensor, eps: float, batch: bool) -> Tensor:
    """(v - mean) rstd, after writing the batch's own statistics into mean and rstd if `batch`."""
    if batch:
        m, var = moments(v)
        mean.copy_(m)
        rstd.copy_((var + eps).rsqrt())
    return (v - mean) * rstd


def _through_norm(dv: Tensor, v: Tensor, scale: Tensor, batch: bool) -> Tensor:
    """Gradient with respect to what was normalized to v, given that of v's scaled form."""
    if batch:
        dv = dv - dv.mean(0) - v * (dv * v).mean(0)
    return scale * dv


class AtenSteps:
    """Steps in torch's own operations: any device, any dtype."""

    def forward(self, s: Saved, t: int, h: Tensor) -> None:
        if s.gamma_hh is not None:
            s.u[t] = _standardize(s.u[t], s.mean_hh[t], s.rstd_hh[t], s.eps, s.batch)
        i, f, g, o = self._gates(s, t)
        s.c[t] = f * s.c_prev(t) + i * g
        if s.gamma_c is not None:
            z = _standardize(s.c[t], s.mean_c[t], s.rstd_c[t], s.eps, s.batch) * s.gamma_c
        else:
            z = s.c[t]
        torch.mul(o, (z if s.beta_c is None else z + s.beta_c).tanh(), out=h)

    def _gates(self, s: Saved, t: int) -> tuple[Tensor, ...]:
        a = s.x[t] + (s.u[t] if s.gamma_hh is None else s.gamma_hh * s.u[t])
        i, f, g, o = a.chunk(4, dim=1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def backward(
        self, s: Saved, t: int, dh: Tensor, dc: Tensor, da: Tensor, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        i, f, g, o = self._gates(s, t)
        c_hat = s.c[t] if s.gamma_c is None else (s.c[t] - s.mean_c[t]) * s.rstd_c[t]
        z = c_hat if s.gamma_c is None else s.gamma_c * c_hat
        tanh_z = (z if s.beta_c is None else z + s.beta_c).tanh()
        dz = dh * o * (1 - tanh_z.square())
        sums[1].add_((dz * c_hat).sum(0))
        sums[2].add_(dz.sum(0))
        dc += dz if s.gamma_c is None else _through_norm(dz, c_hat, s.gamma_c * s.rstd_c[t], s.batch)
        parts = (dc * g * i * (1 - i), dc * s.c_prev(t) * f * (1 - f), dc * i * (1 - g * g), dh * tanh_z * o * (1 - o))
        torch.cat(parts, dim=1, out=da)
        dc *= f
        if s.gamma_hh is None:
            s.u[t] = da
        else:
            sums[0].add_((da * s.u[t]).sum(0))
            s.u[t] = _through_norm(da, s.u[t], s.gamma_hh * s.rstd_hh[t], s.batch)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, eps: float, population: Statistics | None, seen: list[Any] | None,
                x: Tensor, h: Tensor, c: Tensor, weight_hh: Tensor, gamma_hh: Tensor | None, gamma_c: Tensor | None,
                beta_c: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        T, B, G = x.shape
        H = G // 4

        def statistics(var: Tensor | None, mean: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
            if mean is not None and var is not None:
                return mean.contiguous(), (var + eps).rsqrt()
            return x.new_empty(T, size), x.new_empty(T, size)

        given = population or Statistics()
        mean_hh, rstd_hh = statistics(given.var_hh, given.mean_hh, G)
        mean_c, rstd_c = statistics(given.var_c, given.mean_c, H)
        s = Saved(x.contiguous(), x.new_empty(T, B, G), x.new_empty(T, B, H), c.contiguous(), mean_hh, rstd_hh, mean_c,
                  rstd_c, gamma_hh, gamma_c, beta_c, eps, population is None)  # fmt: skip
        y, h_0, weight_t = x.new_empty(T, B, H), h, weight_hh.t()
        for t in range(T):
            u = torch.mm(h, weight_t, out=s.u[t])
            of_u = () if seen is None else moments(u)
            h = y[t]
            steps.forward(s, t, h)
            if seen is not None:
                seen.append((*of_u, *moments(s.c[t])))
        ctx.save_for_backward(y, h_0, weight_hh)
        ctx.steps, ctx.saved = steps, s
        return y, s.c[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        dy, dc = grads
        y, h_0, weight_hh = ctx.saved_tensors
        if ctx.saved is None:
            raise RuntimeError("this scan was run backward before and its buffers are spent: run it forward again")
        s, ctx.saved = ctx.saved, None
        dc, dh, da = dc.clone(), torch.zeros_like(h_0, memory_format=torch.contiguous_format), torch.empty_like(s.u)
        sums = (s.u.new_zeros(s.u.shape[2]), s.c.new_zeros(s.c.shape[2]), s.c.new_zeros(s.c.shape[2]))
        for t in reversed(range(len(y))):
            dh += dy[t]
            ctx.steps.backward(s, t, dh, dc, da[t], sums)
            torch.mm(s.u[t], weight_hh, out=dh)
        dweight = s.u[0].t() @ h_0
        if len(y) > 1:
            dweight.addmm_(s.u[1:].flatten(0, 1).t(), y[:-1].flatten(0, 1))
        scales = [
            total if parameter is not None else None
            for total, parameter in zip(sums, (s.gamma_hh, s.gamma_c, s.beta_c), strict=True)
        ]
        return None, None, None, None, da, dh, dc, dweight, *scales


def fused_scan(
    steps: Steps,
    gates_x: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    gamma_hh: Tensor | None = None,
    gamma_c: Tensor | None = None,
    beta_c: Tensor | None = None,
    eps: float = 1e-5,
    population: Statistics | None = None,
    collect: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """bnrnn.scan.lstm.lstm_scan with the given steps. A second backward through one scan raises RuntimeError."""
    seen: list[Any] | None = [] if collect else None
    y, c = _Scan.apply(steps, eps, population, seen, gates_x, h, c, weight_hh, gamma_hh, gamma_c, beta_c)
    statistics = Statistics(*map(torch.stack, zip(*seen, strict=True))) if seen else Statistics()
    return y, (y[-1], c), statistics
