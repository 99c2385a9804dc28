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
from typing import Any, Unpack

import torch
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.graphs import Captured
from bnrnn.scan.native.build import plain
from bnrnn.scan.norm.reference import standardize, through_norm
from bnrnn.scan.rhn.reference import Options, Result, RHNStatistics

PARAMETERS = ("bias", "gamma_x", "gamma_s", "beta_s", "gamma_z")


@dataclass
class Steps:
    """The arguments of a scan, and the values that the forward pass stores for the backward pass."""

    x: Tensor  # (T, B, G), input product; the forward pass normalizes it, the backward pass writes its gradient here
    a: Tensor  # (T, D, B, G), the sums a_d, after normalization if any; the backward pass writes their gradients here
    states: Tensor  # (T, D, B, H), s_d
    normal: Tensor | None  # (T, K, B, H), normalized states that enter the first K layers
    s_0: Tensor  # (B, H)
    weight: Tensor  # (D, G, H)
    parameters: dict[str, Tensor | None]
    statistics: RHNStatistics
    batch: bool  # whether to use batch statistics
    eps: float
    batch_sizes: list[int] | None
    product_dtype: torch.dtype

    written = ("x", "a", "states", "normal")  # by the forward pass; with batch statistics, also `statistics`

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def running(self, t: int) -> int:
        return self.batch_sizes[t] if self.batch_sizes else self.x.shape[1]

    def before(self, t: int, d: int) -> Tensor:
        """s_{d-1}, the state that enters layer d of step t."""
        return self.states[t, d - 1] if d else self.states[t - 1, -1] if t else self.s_0

    def product(self, v: Tensor, weight: Tensor) -> Tensor:
        return (v.to(self.product_dtype) @ weight.to(self.product_dtype)).to(v.dtype)

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
        mean_x, var_x, mean_s, var_s, mean_z, var_z = self.statistics
        for t in range(len(self.x)):
            n = self.running(t)
            if mean_x is not None and var_x is not None:
                self.x[t, :n] = standardize(self.x[t, :n], mean_x[t], var_x[t], self.eps, self.batch)
            for d, weight in enumerate(self.weight):
                now, place = self.before(t, d)[:n], (t, d)
                if self.normal is not None and d < self.normal.shape[1]:
                    assert mean_s is not None and var_s is not None
                    self.normal[t, d, :n] = standardize(now, mean_s[place], var_s[place], self.eps, self.batch)
                a = self.product(self.entering(now, t, d, n), weight.t())
                if d == 0:
                    a += self.scaled_input(t, n)
                if mean_z is not None and var_z is not None:
                    a = standardize(a, mean_z[place], var_z[place], self.eps, self.batch)
                self.a[t, d, :n] = a
                h, transform, carry = self.gates(t, d, n)
                self.states[t, d, :n] = torch.addcmul(h * transform, now, carry)
                self.states[t, d, n:] = self.before(t, d)[n:]

    def scaled_input(self, t: int, n: int) -> Tensor:
        gamma = self.parameters["gamma_x"]
        return self.x[t, :n] if gamma is None else self.x[t, :n] * gamma

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
            dweight[d] = self.outer(self.a[:, d].reshape(T * B, G), self.entering_all(before, d).reshape(T * B, -1))
        return dweight

    def outer(self, da: Tensor, v: Tensor) -> Tensor:
        return (da.to(self.product_dtype).t() @ v.to(self.product_dtype)).to(da.dtype)

    def entering_all(self, before: Tensor, d: int) -> Tensor:
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
            da = self._norm_back(
                da, self.a[t, d, :n], gamma[d], self.statistics.var_z, (t, d), grads["gamma_z"][d], of_bias
            )
        elif bias is not None:
            grads["bias"][d] += da.sum(0)
        self.a[t, d, :n], self.a[t, d, n:] = da, 0
        dv = self.product(da, self.weight[d])
        gamma, beta = self.parameters["gamma_s"], self.parameters["beta_s"]
        if gamma is None or self.normal is None or d >= len(gamma):
            return back + dv
        of_beta = None if beta is None else grads["beta_s"][d]
        normal = self.normal[t, d, :n]
        return back + self._norm_back(dv, normal, gamma[d], self.statistics.var_s, (t, d), grads["gamma_s"][d], of_beta)

    def _input_back(self, t: int, n: int, grads: dict[str, Tensor]) -> None:
        dx, gamma = self.a[t, 0, :n], self.parameters["gamma_x"]
        if gamma is not None:
            dx = self._norm_back(dx, self.x[t, :n], gamma, self.statistics.var_x, (t,), grads["gamma_x"], None)
        self.x[t, :n], self.x[t, n:] = dx, 0

    def _norm_back(
        self, dv: Tensor, v: Tensor, gamma: Tensor, var: Tensor | None, place: tuple[int, ...], dgamma: Tensor,
        dbeta: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert var is not None
        return through_norm(dv, v, gamma, var[place], self.eps, self.batch, dgamma, dbeta)

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
    engine: Callable[..., Steps | Captured],
    x_proj: Tensor,
    s: Tensor,
    weight: Tensor,
    **options: Unpack[Options],
) -> Result:
    """`rhn_scan` of reference.py, whose time steps `engine` runs."""
    steps = prepare(engine, x_proj, s, weight, **options)
    inputs = (x_proj, s, weight, *(options.get(name) for name in PARAMETERS))
    y, s = autograd.run(engine, steps, ("x_proj", "s", "weight", *PARAMETERS), inputs)
    return y, s, steps.statistics


def prepare(
    engine: Callable[..., Steps | Captured],
    x_proj: Tensor,
    s: Tensor,
    weight: Tensor,
    **options: Unpack[Options],
) -> Steps | Captured:
    """The steps of `rhn_fused_scan` with these arguments, to be run."""
    (T, B, G), (D, _, H) = x_proj.shape, weight.shape
    given, population = {name: options.get(name) for name in PARAMETERS}, options.get("population")
    constant = {name: None if p is None else plain(p.detach()) for name, p in given.items()}
    K = 0 if constant["gamma_s"] is None else len(constant["gamma_s"])
    shapes = {"gamma_x": (T, G), "gamma_s": (T, K, H), "gamma_z": (T, D, G)}
    used = [
        None if given[name] is None else x_proj.new_empty(shape) if value is None else plain(value)
        for (name, shape), value in zip(
            [pair for pair in shapes.items() for _ in range(2)], population or RHNStatistics(), strict=True
        )
    ]
    return engine(
        x=plain(x_proj.detach()).clone(),
        a=x_proj.new_empty(T, D, B, G),
        states=x_proj.new_empty(T, D, B, H),
        normal=x_proj.new_zeros(T, K, B, H) if K else None,
        s_0=plain(s.detach()),
        weight=plain(weight.detach()),
        parameters=constant,
        statistics=RHNStatistics(*used),
        batch=population is None,
        eps=options.get("eps", 1e-5),
        batch_sizes=options.get("batch_sizes"),
        product_dtype=options.get("product_dtype") or weight.dtype,
    )
