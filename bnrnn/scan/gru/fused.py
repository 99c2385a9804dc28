"""The recurrences of GRU and light GRU as one autograd function, with a backward pass derived by hand.

`GRUSteps` runs the time steps with torch operations; the compiled engine (cpu.py) is a subclass. Signature and
equations are those of reference.py. Backward pass of step t, with û the normalized recurrent product (or the product
itself), u = γ û + b, m() the mean over the units that are normalized together, and μ the mask:
    dn = dh (1 - z) μ act'(n);   dz = dh (h_{t-1} - μ n) z (1 - z);   dr = dn u_n r (1 - r)
    dx = [dr, dz, dn];   du = [dr, dz, dn r];   db += Σ du;   dγ += Σ du û;   dμ += dh (1 - z) n
    dû = γ du;   du = rstd (dû - m(dû) - û m(dû û));   dh_{t-1} = dh z + du W_hh;   dW_hh += duᵀ h_{t-1}
A light GRU has no r; without normalization its du is dx. The gates of the forward pass overwrite x, and the gradients
overwrite the gates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.graphs import Captured
from bnrnn.scan.gru.reference import GRUOptions, Result, shapes, standardize
from bnrnn.scan.native.build import plain
from bnrnn.scan.steps import FusedSteps, common_fields, detached

PARAMETERS = ("gamma_hh", "bias_hh", "mask")


class NoStatistics(NamedTuple):
    """These recurrences have no statistics of the batch."""


@dataclass(kw_only=True)
class GRUSteps(FusedSteps):
    """The steps of a GRU (x has 3H columns) or light GRU (2H), with torch operations."""

    # What the backward pass needs beside the gates; None without gradients. With normalization, û (T, B, G) and rstd
    # (T, B, 2), or (T, B, 1) for a light GRU; û is overwritten with du. Without, the product with the candidate's
    # weights (T, B, H), overwritten with its gradient, if there is a reset gate.
    u: Tensor | None
    rstd: Tensor | None
    y: Tensor  # (T, B, H)
    h_0: Tensor  # (B, H)
    weight_hh: Tensor  # (G, H)
    nonlinearity: str
    keep: bool  # whether there will be a backward pass

    written = ("x", "u", "rstd", "y")

    @property
    def has_reset(self) -> bool:
        return len(self.weight_hh) == 3 * self.weight_hh.shape[1]

    def forward(self) -> None:
        """Fill y, and, with `keep`, u and rstd, and write the gates into x."""
        gamma, bias, mask = (self.parameters[name] for name in PARAMETERS)
        h, H, weight = self.h_0, self.h_0.shape[1], self.weight_hh.t()
        act = torch.relu if self.nonlinearity == "relu" else torch.tanh
        for t in range(len(self.y)):
            n = self.running(t)
            before, x = h[:n], self.x[t, :n]
            u = self._normalized(t, self.product(before, weight))
            if self.u is not None:
                self.u[t, :n] = u[:, -self.u.shape[2] :]
            u = u if gamma is None else u * gamma
            u = u if bias is None else u + bias
            gates = (x[:, :-H] + u[:, :-H]).sigmoid()
            candidate = act(x[:, -H:] + (gates[:, :H] * u[:, -H:] if self.has_reset else u[:, -H:]))
            if self.keep:
                x[:, :-H], x[:, -H:] = gates, candidate
            now = candidate if mask is None else candidate * mask[:n]
            self.y[t, :n], self.y[t, n:] = torch.lerp(now, before, gates[:, -H:]), h[n:]
            h = self.y[t]

    def _normalized(self, t: int, u: Tensor) -> Tensor:
        """û, if the product is normalized. Stores rstd."""
        if self.parameters["gamma_hh"] is None:
            return u
        H = u.shape[1] // (3 if self.has_reset else 2)
        if self.rstd is not None:
            variances = [part.var(1, correction=0) for part in (u[:, : 2 * H], u[:, 2 * H :]) if part.shape[1]]
            self.rstd[t, : len(u)] = (torch.stack(variances, 1) + self.eps).rsqrt()
        return standardize(u, H, self.eps)

    def backward(self, dy: Tensor, dh: Tensor, grads: dict[str, Tensor]) -> None:
        """Backpropagate dy, the gradient of y, and dh, the gradient of the last state.

        Writes the gradient of x into x, du into u, and the gradient of the initial state into dh. Adds the gradients of
        the parameters to `grads`, and stores the gradient of weight_hh there.
        """
        for t in reversed(range(len(self.y))):
            n = self.running(t)
            dh += dy[t]
            before = self.y[t - 1, :n] if t else self.h_0[:n]
            dh[:n] = self._step_back(t, n, before, dh[:n], grads)
        before = torch.cat([self.h_0[None], self.y[:-1]]).flatten(0, 1)
        du = self.x if self.u is None else self.u
        if self.has_reset and self.rstd is None:
            du = torch.cat([self.x[:, :, : -dh.shape[1]], du], dim=2)
        grads["weight_hh"] = self.outer(du.flatten(0, 1), before)

    def _step_back(self, t: int, n: int, before: Tensor, dh: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Return the gradient of the state before step t, given that of the state after it, for n sequences."""
        gamma, bias, mask = (self.parameters[name] for name in PARAMETERS)
        H = dh.shape[1]
        *reset, z, candidate = self.x[t, :n].split(H, dim=1)
        dn = dh * (1 - z)
        if mask is not None:
            grads["mask"][:n] += dn * candidate
            dn = dn * mask[:n]
        dz = dh * (before - (candidate if mask is None else candidate * mask[:n])) * z * (1 - z)
        dn = dn * ((candidate > 0) if self.nonlinearity == "relu" else 1 - candidate.square())
        dx = du = torch.cat([dz, dn], dim=1)
        if reset:
            assert self.u is not None
            r, u_n = reset[0], self.u[t, :n, -H:]
            u_n = u_n if gamma is None else u_n * gamma[-H:]
            dr = dn * (u_n if bias is None else u_n + bias[-H:]) * r * (1 - r)
            dx, du = torch.cat([dr, dz, dn], dim=1), torch.cat([dr, dz, dn * r], dim=1)
        if bias is not None:
            grads["bias_hh"] += du.sum(0)
        back = dh * z
        self.x[t, :n], self.x[t, n:] = dx, 0
        if gamma is not None:
            du = self._through_norm(t, n, du, gamma, grads["gamma_hh"])
        if self.u is not None:
            self.u[t, :n], self.u[t, n:] = du[:, -self.u.shape[2] :], 0
        return back + self.product(du, self.weight_hh)

    def _through_norm(self, t: int, n: int, du: Tensor, gamma: Tensor, dgamma: Tensor) -> Tensor:
        """Backpropagate through `standardize` and the scale. Adds to dgamma."""
        assert self.u is not None and self.rstd is not None
        u, H = self.u[t, :n], du.shape[1] // (3 if self.has_reset else 2)
        dgamma += (du * u).sum(0)
        parts = []
        for k, part in enumerate([slice(0, 2 * H), slice(2 * H, 3 * H)][: self.rstd.shape[2]]):
            d, hat = du[:, part] * gamma[part], u[:, part]
            through = d - d.mean(1, keepdim=True) - hat * (d * hat).mean(1, keepdim=True)
            parts.append(self.rstd[t, :n, k : k + 1] * through)
        return torch.cat(parts, dim=1)

    def results(self) -> tuple[Tensor, Tensor]:
        """y and the last state, after the forward pass. A state of its own may be changed, and keeps no other step."""
        return self.y, self.y[-1].clone()

    def gradients(self, dy: Tensor, dlast: Tensor) -> dict[str, Tensor | None]:
        """Gradients with respect to the scan's arguments, by name, given those of `results`; spends the buffers."""
        dh = plain(dlast).clone()
        grads = {name: torch.zeros_like(p) for name, p in self.parameters.items() if p is not None}
        self.backward(plain(dy), dh, grads)
        return {"x_proj": self.x, "h": dh, **grads}


def gru_fused_scan(
    engine: Callable[..., GRUSteps | Captured],
    x_proj: Tensor,
    h: Tensor,
    weight_hh: Tensor,
    *,
    overwrite: bool = False,
    **options: Unpack[GRUOptions],
) -> Result:
    """`gru_scan` of reference.py, whose time steps `engine` runs.

    Args:
        overwrite: whether to reuse the memory of x_proj instead of a copy. Its values are then lost.
    """
    inputs = {"x_proj": x_proj, "h": h, "weight_hh": weight_hh}
    tensors = inputs | {name: options.get(name) for name in PARAMETERS}
    with_grad = torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in tensors.values())
    steps = prepare(engine, **inputs, keep=with_grad, overwrite=overwrite, **options)
    if with_grad:
        return autograd.run(engine, steps, tensors)
    steps.forward()
    return steps.results()


def prepare(
    engine: Callable[..., GRUSteps | Captured],
    x_proj: Tensor,
    h: Tensor,
    weight_hh: Tensor,
    *,
    keep: bool,
    overwrite: bool = False,
    **options: Unpack[GRUOptions],
) -> GRUSteps | Captured:
    """The steps of `gru_fused_scan` with these arguments, to be run."""
    (T, B, G), H = x_proj.shape, h.shape[1]
    x, normalized = detached(x_proj), options.get("gamma_hh") is not None
    if keep and not overwrite and x.data_ptr() == x_proj.data_ptr():
        x = x.clone()
    columns = G if normalized else H if G == 3 * H else 0
    return engine(
        x=x,
        u=x.new_empty(T, B, columns) if keep and columns else None,
        rstd=x.new_empty(T, B, G // H - 1) if keep and normalized else None,
        y=x.new_empty(T, B, H),
        h_0=detached(h),
        weight_hh=detached(weight_hh),
        nonlinearity=options.get("nonlinearity", "tanh"),
        keep=keep,
        **common_fields(x, PARAMETERS, NoStatistics, shapes(T, B, G, H), options),
    )
