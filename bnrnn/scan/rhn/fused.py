"""The recurrence of recurrent highway networks as one autograd function, with a backward pass derived by hand.

Signature and equations are those of reference.py. Backward pass of layer d of a step, given the gradient ds of its
output. m() is the mean over the batch, ŝ and â are the normalized values before scale and shift, and σ' = σ (1 - σ):
    da = [ds t (1 - h²),  ds h σ'(t),  ds s_{d-1} σ'(c)];                 ds_{d-1} = ds c
         (coupled: [ds t (1 - h²),  ds (h - s_{d-1}) σ'(t)];              ds_{d-1} = ds (1 - t))
    db += Σ da;   dγ_z += Σ da â;   da = γ_z rstd_z (da - m(da) - â m(da â))   (without normalization: da unchanged)
    dx = da, where d = 1;   dR_d += daᵀ v;   dv = da R_d,   v = γ_s ŝ + β_s
    dγ_s += Σ dv ŝ;   dβ_s += Σ dv;   ds_{d-1} += γ_s rstd_s (dv - m(dv) - ŝ m(dv ŝ))      (without normalization: +=
    dv)
With population statistics, the m() terms are zero. The gradients of the sums a_d overwrite the sums. The gradient of
R_d is then one matrix product over all steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.graphs import Captured
from bnrnn.scan.native.build import plain
from bnrnn.scan.rhn.reference import Result, RHNOptions, RHNStatistics, shapes
from bnrnn.scan.steps import FusedSteps, common_fields, detached

PARAMETERS = ("bias", "gamma_x", "gamma_s", "beta_s", "gamma_z")


@dataclass(kw_only=True)
class RHNSteps(FusedSteps):
    """The steps of a recurrent highway network, with torch operations."""

    a: Tensor  # (T, D, B, G), the sums a_d, after normalization if any; the backward pass writes their gradients here
    states: Tensor  # (T, D, B, H), s_d
    normal: Tensor | None  # (T, K, B, H), normalized states that enter the first K layers
    s_0: Tensor  # (B, H)
    weight: Tensor  # (D, G, H)

    written = ("x", "a", "states", "normal")

    def before(self, t: int, d: int) -> Tensor:
        """s_{d-1}, the state that enters layer d of step t."""
        return self.states[t, d - 1] if d else self.states[t - 1, -1] if t else self.s_0

    def entering(self, now: Tensor, t: int, d: int, n: int) -> Tensor:
        """The factor of R_d: the state `now`, or, if it is normalized, its normalized value with scale and shift."""
        if self.normal is None or d >= self.normal.shape[1]:
            return now
        gamma, beta = self.parameters["gamma_s"], self.parameters["beta_s"]
        assert gamma is not None
        v = self.normal[t, d, :n] * gamma[d]
        return v if beta is None else v + beta[d]

    def gates(self, t: int, d: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The values h, t and c of layer d at step t, for the first n sequences."""
        gamma, bias = self.parameters["gamma_z"], self.parameters["bias"]
        a = self.a[t, d, :n]
        a = a if gamma is None else a * gamma[d]
        h, transform, *carry = (a if bias is None else a + bias[d]).split(self.states.shape[3], dim=1)
        transform = transform.sigmoid()
        return h.tanh(), transform, carry[0].sigmoid() if carry else 1 - transform

    def forward(self) -> None:
        """Fill a, states and normal, normalize x in place, and, with batch statistics, fill the statistics."""
        gamma_x = self.parameters["gamma_x"]
        for t in range(len(self.x)):
            n = self.running(t)
            if gamma_x is not None:
                self.x[t, :n] = self.normalized(self.x[t, :n], "x", t)
            for d, weight in enumerate(self.weight):
                now = self.before(t, d)[:n]
                if self.normal is not None and d < self.normal.shape[1]:
                    self.normal[t, d, :n] = self.normalized(now, "s", t, d)
                a = self.product(self.entering(now, t, d, n), weight.t())
                if d == 0:
                    a += self.x[t, :n] if gamma_x is None else self.x[t, :n] * gamma_x
                self.a[t, d, :n] = self.normalized(a, "z", t, d)
                h, transform, carry = self.gates(t, d, n)
                self.states[t, d, :n] = torch.addcmul(h * transform, now, carry)
                self.states[t, d, n:] = self.before(t, d)[n:]

    def backward(self, dy: Tensor, ds: Tensor, grads: dict[str, Tensor]) -> None:
        """Backpropagate dy, the gradient of y, and ds, the gradient of the last state.

        Overwrites x and a with their gradients and ds with the gradient of the initial state. Adds the gradients of the
        parameters to `grads`.
        """
        for t in reversed(range(len(self.x))):
            n = self.running(t)
            ds += dy[t]
            for d in reversed(range(len(self.weight))):
                ds[:n] = self._layer_back(t, d, n, ds[:n], grads)
            self._input_back(t, n, grads)

    def weight_gradient(self) -> Tensor:
        """The gradient of R_1 to R_D (D, G, H). Call it after `backward`."""
        T, D, B, G = self.a.shape
        dweight = torch.empty_like(self.weight)
        for d in range(D):
            before = self.states[:, d - 1] if d else torch.cat([self.s_0[None], self.states[:-1, -1]])
            dweight[d] = self.outer(self.a[:, d].reshape(T * B, G), self.recurrent_inputs(before, d).reshape(T * B, -1))
        return dweight

    def recurrent_inputs(self, before: Tensor, d: int) -> Tensor:
        """`entering` for all steps (T, B, H). Values of finished sequences are arbitrary: their gradients are 0."""
        if self.normal is None or d >= self.normal.shape[1]:
            return before
        gamma, beta = self.parameters["gamma_s"], self.parameters["beta_s"]
        assert gamma is not None
        v = self.normal[:, d] * gamma[d]
        return v if beta is None else v + beta[d]

    def _layer_back(self, t: int, d: int, n: int, ds: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Return the gradient of a layer's input state, given ds of its output. Overwrites a with its gradient."""
        now = self.before(t, d)[:n]
        h, transform, carry = self.gates(t, d, n)
        dh, slope = ds * transform * (1 - h * h), transform * (1 - transform)
        if self.a.shape[3] == 3 * h.shape[1]:
            da = torch.cat([dh, ds * h * slope, ds * now * carry * (1 - carry)], dim=1)
        else:
            da = torch.cat([dh, ds * (h - now) * slope], dim=1)
        back = ds * carry
        gamma, bias = self.parameters["gamma_z"], self.parameters["bias"]
        if gamma is not None:
            of_bias = None if bias is None else grads["bias"][d]
            da = self.through_norm(da, self.a[t, d, :n], "z", (t, d), gamma[d], grads["gamma_z"][d], of_bias)
        elif bias is not None:
            grads["bias"][d] += da.sum(0)
        self.a[t, d, :n], self.a[t, d, n:] = da, 0
        dv = self.product(da, self.weight[d])
        gamma, beta = self.parameters["gamma_s"], self.parameters["beta_s"]
        if gamma is None or self.normal is None or d >= len(gamma):
            return back + dv
        of_beta = None if beta is None else grads["beta_s"][d]
        normal = self.normal[t, d, :n]
        return back + self.through_norm(dv, normal, "s", (t, d), gamma[d], grads["gamma_s"][d], of_beta)

    def _input_back(self, t: int, n: int, grads: dict[str, Tensor]) -> None:
        gamma = self.parameters["gamma_x"]
        dx = self.through_norm(self.a[t, 0, :n], self.x[t, :n], "x", (t,), gamma, grads.get("gamma_x"))
        self.x[t, :n], self.x[t, n:] = dx, 0

    def results(self) -> tuple[Tensor, Tensor]:
        """y and its last step, after the forward pass."""
        y = self.states[:, -1].clone()
        return y, y[-1].clone()

    def gradients(self, dy: Tensor, dlast: Tensor) -> dict[str, Tensor | None]:
        """Gradients with respect to the scan's arguments, by name, given those of `results`; spends the buffers."""
        ds = plain(dlast).clone()
        grads = {name: torch.zeros_like(p) for name, p in self.parameters.items() if p is not None}
        self.backward(plain(dy), ds, grads)
        return {"x_proj": self.x, "s": ds, "weight": self.weight_gradient(), **grads}


def rhn_fused_scan(
    engine: Callable[..., RHNSteps | Captured],
    x_proj: Tensor,
    s: Tensor,
    weight: Tensor,
    **options: Unpack[RHNOptions],
) -> Result:
    """`rhn_scan` of reference.py, whose time steps `engine` runs."""
    steps = prepare(engine, x_proj, s, weight, **options)
    inputs = {"x_proj": x_proj, "s": s, "weight": weight} | {name: options.get(name) for name in PARAMETERS}
    y, s = autograd.run(engine, steps, inputs)
    return y, s, steps.statistics


def prepare(
    engine: Callable[..., RHNSteps | Captured],
    x_proj: Tensor,
    s: Tensor,
    weight: Tensor,
    **options: Unpack[RHNOptions],
) -> RHNSteps | Captured:
    """The steps of `rhn_fused_scan` with these arguments, to be run."""
    (T, B, G), (D, _, H) = x_proj.shape, weight.shape
    gamma_s = options.get("gamma_s")
    K = 0 if gamma_s is None else len(gamma_s)
    x = detached(x_proj).clone()
    return engine(
        x=x,
        a=x.new_empty(T, D, B, G),
        states=x.new_empty(T, D, B, H),
        normal=x.new_zeros(T, K, B, H) if K else None,
        s_0=detached(s),
        weight=detached(weight),
        **common_fields(x, PARAMETERS, RHNStatistics, shapes(T, B, G, D, H, K), options),
    )
