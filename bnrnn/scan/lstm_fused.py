"""The recurrence as one autograd function over the whole sequence, with a backward derived by hand.

What runs the steps is an engine: `AtenEngine` here, in torch's own operations for any device and dtype, or a compiled
one (lstm_cpu.py, lstm_triton.py). Signature and equations are those of bnrnn.scan.lstm.

Backward of step t, with m() the mean over the batch, z = BN(c); x̂, û and ĉ normalized, without scale and shift:
    dz = dh σ(o) (1 - tanh²z);      dγ_c += Σ dz ĉ;   dβ_c += Σ dz
    dc += γ_c rstd_c (dz - m(dz) - ĉ m(dz ĉ))                       (dz itself without normalization)
    da = dgates from dc and dh;     db += Σ da;       dγ_hh += Σ da û;    dγ_ih += Σ da x̂;    dc_{t-1} = dc σ(f)
    dx = γ_ih rstd_ih (da - m(da) - x̂ m(da x̂))
    du = γ_hh rstd_hh (da - m(da) - û m(da û));       dh_{t-1} += du W_hh;   dW_hh += duᵀ h_{t-1}
Under population statistics the m() terms vanish. Gates are recomputed from x̂ and û rather than stored, and the
gradients of x and u take their places: with c and h, ten numbers a unit and step.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bnrnn.scan.lstm import Statistics
from bnrnn.scan.norm import standardize, through_norm

PARAMETERS = ("gamma_ih", "gamma_hh", "bias", "gamma_c", "beta_c")


@dataclass
class Sequence:
    """One sequence's arguments and what its forward pass leaves to its backward pass; time is the first axis."""

    x: Tensor  # (T, B, 4H), input product; normalized by the forward pass; its gradient after the backward pass
    u: Tensor | None  # (T, B, 4H), normalized recurrent product; its gradient after; None if no backward pass will come
    c: Tensor  # (T, B, H)
    h_0: Tensor  # (B, H)
    c_0: Tensor
    weight_hh: Tensor  # (4H, H)
    weight_ih: Tensor | None  # (4H, 1), where x is the input's one feature (T, B, 1) in place of its product
    parameters: dict[str, Tensor | None]
    statistics: Statistics
    batch: bool  # whether the statistics are those of the batch
    eps: float
    batch_sizes: list[int] | None
    ended_count: bool
    product_dtype: torch.dtype

    def running(self, t: int) -> int:
        """Sequences that run at step t."""
        return self.batch_sizes[t] if self.batch_sizes else self.x.shape[1]

    def counted(self, t: int) -> int:
        """Sequences in the statistics of step t."""
        return self.x.shape[1] if self.ended_count else self.running(t)


@runtime_checkable
class Engine(Protocol):
    """What runs the steps of a sequence."""

    def forward(self, s: Sequence, y: Tensor) -> None:
        """Write y (T, B, H), s.c, s.u, s.x normalized, and s.statistics if they are those of the batch."""
        ...

    def backward(self, s: Sequence, y: Tensor, dy: Tensor, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Given the gradients of y and of the last state, turn s.x and s.u into their gradients and dh and dc into
        those of the first state; add to the parameters' `grads`; return the gradient of weight_hh."""
        ...


class AtenEngine:
    """Steps in torch's own operations: any device, any dtype."""

    def forward(self, s: Sequence, y: Tensor) -> None:
        gamma_ih, gamma_hh, _, gamma_c, beta_c = (s.parameters[name] for name in PARAMETERS)
        mean_ih, var_ih, mean_hh, var_hh, mean_c, var_c = s.statistics
        weight, h, c = s.weight_hh.t().to(s.product_dtype), s.h_0, s.c_0
        for t in range(len(y)):
            n, counted = s.running(t), s.counted(t)
            u = (h[:counted].to(weight.dtype) @ weight).to(h.dtype)
            if gamma_hh is not None:
                u = standardize(u, mean_hh[t], var_hh[t], s.eps, s.batch)  # pyright: ignore
            if gamma_ih is not None:
                s.x[t, :counted] = standardize(s.x[t, :counted], mean_ih[t], var_ih[t], s.eps, s.batch)  # pyright: ignore
            if s.u is not None:
                s.u[t, :counted] = u
            i, f, g, o = self._gates(s, u[:n], s.x[t, :n])
            s.c[t, :n], s.c[t, n:] = f * c[:n] + i * g, c[n:]
            c = s.c[t]
            z = c[:n]
            if gamma_c is not None:
                z = standardize(c[:counted], mean_c[t], var_c[t], s.eps, s.batch)[:n] * gamma_c  # pyright: ignore
            y[t, :n], y[t, n:] = o * (z if beta_c is None else z + beta_c).tanh(), h[n:]
            h = y[t]

    def _gates(self, s: Sequence, u: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        for name, value in (("gamma_hh", u), ("gamma_ih", x)):
            gamma = s.parameters[name]
            scaled = value if gamma is None else gamma * value
            u, x = (scaled, x) if name == "gamma_hh" else (u, scaled)
        bias = s.parameters["bias"]
        i, f, g, o = (u + x if bias is None else u + x + bias).chunk(4, dim=1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def backward(self, s: Sequence, y: Tensor, dy: Tensor, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> Tensor:
        assert s.u is not None
        weight = s.weight_hh.to(s.product_dtype)
        for t in reversed(range(len(y))):
            n, counted = s.running(t), s.counted(t)
            dh += dy[t]
            self._step_back(s, t, n, counted, dh[:n], dc, grads)
            dh_prev = (s.u[t, :counted].to(weight.dtype) @ weight).to(dh.dtype)
            dh[:n] = dh_prev[:n]
            dh[n:counted] += dh_prev[n:]
        h_prev = torch.cat([s.h_0[None], y[:-1]]).flatten(0, 1).to(weight.dtype)
        return (s.u.flatten(0, 1).t().to(weight.dtype) @ h_prev).to(dh.dtype)

    def _step_back(
        self, s: Sequence, t: int, n: int, counted: int, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]
    ) -> None:
        gamma_ih, gamma_hh, bias, gamma_c, beta_c = (s.parameters[name] for name in PARAMETERS)
        _, var_ih, _, var_hh, mean_c, var_c = (None if v is None else v[t] for v in s.statistics)
        assert s.u is not None
        u, x, c, c_prev = s.u[t, :counted], s.x[t, :counted], s.c[t, :counted], s.c[t - 1] if t else s.c_0
        i, f, g, o = self._gates(s, u[:n], x[:n])
        c_hat = c if gamma_c is None else (c - mean_c) * (var_c + s.eps).rsqrt()  # pyright: ignore
        z = c_hat[:n] if gamma_c is None else gamma_c * c_hat[:n]
        tanh_z = (z if beta_c is None else z + beta_c).tanh()
        dz = torch.zeros_like(c)
        dz[:n] = dh * o * (1 - tanh_z.square())
        if gamma_c is not None and var_c is not None:
            dz = through_norm(dz, c_hat, gamma_c, var_c, s.eps, s.batch, grads["gamma_c"], grads.get("beta_c"))
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
                v.copy_(through_norm(da, v, gamma, var, s.eps, s.batch, grads[name], None))
        s.u[t, counted:] = 0
        s.x[t, counted:] = 0


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, sequences: list[Sequence], x: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        first = sequences[0]
        y = first.c.new_empty(len(sequences), *first.c.shape)
        for s, y_r in zip(sequences, y, strict=True):
            engine.forward(s, y_r)
        ctx.save_for_backward(y, *inputs[3:5])  # autograd watches that neither is changed before the backward pass
        ctx.engine, ctx.sequences, ctx.x = engine, sequences, x
        return y, torch.stack([s.c[-1] for s in sequences])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        y, _, weight_ih = ctx.saved_tensors
        if ctx.sequences is None:
            raise RuntimeError("this scan was run backward before and its buffers are spent: run it forward again")
        sequences, x = ctx.sequences, ctx.x
        ctx.sequences = ctx.x = None
        dy, dc = grads[0].contiguous(), grads[1].clone(memory_format=torch.contiguous_format)
        dh = torch.zeros_like(dc)
        given = {name: p for name, p in sequences[0].parameters.items() if p is not None}
        totals = {name: p.new_zeros(len(sequences), *p.shape) for name, p in given.items()}
        if weight_ih is not None:
            totals["weight_ih"] = torch.zeros_like(weight_ih, memory_format=torch.contiguous_format)
        of_weight = [
            ctx.engine.backward(s, y[r], dy[r], dh[r], dc[r], {name: total[r] for name, total in totals.items()})
            for r, s in enumerate(sequences)
        ]
        dweight = of_weight[0].unsqueeze(0) if len(of_weight) == 1 else torch.stack(of_weight)
        dx = x if weight_ih is None else None
        return None, None, None, dx, dh, dc, dweight, *(totals.get(name) for name in ("weight_ih", *PARAMETERS))


def fused_scan(
    engine: Engine,
    x_proj: Tensor,
    h: Tensor,
    c: Tensor,
    weight_hh: Tensor,
    *,
    eps: float = 1e-5,
    population: Statistics | None = None,
    batch_sizes: list[int] | None = None,
    ended_count: bool = False,
    product_dtype: torch.dtype | None = None,
    overwrite: bool = False,
    weight_ih: Tensor | None = None,
    **parameters: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Statistics]:
    """bnrnn.scan.lstm.lstm_scan by the given engine, with a leading axis R of replicas on every tensor.

    With `overwrite`, x_proj's memory is taken over (nobody else may need its values) instead of copied. With
    `weight_ih` (R, 4H, 1), x_proj is the one feature (R, T, B, 1) of the input itself. A second backward through one
    scan raises RuntimeError.
    """
    R, T, B, _ = x_proj.shape
    G = weight_hh.shape[1]
    given = {name: parameters.get(name) for name in PARAMETERS}
    inputs = (x_proj, h, c, weight_hh, weight_ih, *given.values())
    with_grad = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs)
    x = x_proj.detach().contiguous()
    if weight_ih is None and not overwrite and x.data_ptr() == x_proj.data_ptr():
        x = x.clone()
    of_terms = (("gamma_ih", G), ("gamma_hh", G), ("gamma_c", G // 4))
    terms = [(name, size) for name, size in of_terms for _ in range(2)]  # a mean and a variance each
    used = Statistics(
        *(
            None if given[name] is None else x.new_empty(R, T, size) if value is None else value.contiguous()
            for (name, size), value in zip(terms, population or Statistics(), strict=True)
        )
    )
    u = x.new_empty(R, T, B, G) if with_grad else None
    cells = x.new_empty(R, T, B, G // 4)
    h_0, c_0, weight = (v.detach().contiguous() for v in (h, c, weight_hh))
    of_input = None if weight_ih is None else weight_ih.detach().contiguous()
    constant = {name: None if p is None else p.detach().contiguous() for name, p in given.items()}
    sequences = [
        Sequence(
            x=x[r],
            u=None if u is None else u[r],
            c=cells[r],
            h_0=h_0[r],
            c_0=c_0[r],
            weight_hh=weight[r],
            weight_ih=None if of_input is None else of_input[r],
            parameters={name: None if p is None else p[r] for name, p in constant.items()},
            statistics=Statistics(*(None if v is None else v[r] for v in used)),
            batch=population is None,
            eps=eps,
            batch_sizes=batch_sizes,
            ended_count=ended_count,
            product_dtype=product_dtype or weight_hh.dtype,
        )
        for r in range(R)
    ]
    y, c = _Scan.apply(engine, sequences, x, *inputs)
    return y, (y[:, -1], c), used
