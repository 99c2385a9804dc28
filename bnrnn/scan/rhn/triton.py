"""Recurrent highway networks on a GPU: one fused Triton kernel per highway layer, time step and direction.

As in lstm/triton.py, the kernel or cuBLAS computes the products. Signature and equations are those of fused.py;
triton_kernels.py lists the arrays.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnrnn.scan.norm.reference import standardize, through_norm
from bnrnn.scan.rhn import reference
from bnrnn.scan.rhn.fused import PARAMETERS
from bnrnn.scan.rhn.reference import RHNStatistics
from bnrnn.scan.rhn.triton_kernels import ENTRIES, Constants, backward_layer, forward_layer
from bnrnn.scan.triton_shared import driver, form
from bnrnn.scan.triton_shared.driver import TritonSteps
from bnrnn.scan.triton_shared.form import Call, Form
from bnrnn.scan.triton_shared.launches import ready
from bnrnn.scan.triton_shared.tuning import Division


@dataclass(frozen=True)
class RHNForm(Form):
    """The form of an RHN's scan. The first `num_entered` layers normalize the state that enters."""

    name, entries, parameters, states, statistics = "rhn", ENTRIES, PARAMETERS, ("s",), RHNStatistics

    num_entered: int

    def calls(self, direction: str, division: Division) -> list[Call]:
        D, L = self.num_layers, self.num_entered
        kernel = forward_layer if direction == "forward" else backward_layer
        every = self.constants(division) | {
            "D": D, "L": L, "IX": "gamma_x" in self.given, "Z": "gamma_z" in self.given,
            "SHIFTED": "bias" in self.given, "STATE_SHIFTED": "beta_s" in self.given,
        }  # fmt: skip
        own = ({"FIRST": d == 0, "TOP": d == D - 1, "ENTERED": d < L, "NEXT_ENTERS": (d + 1) % D < L} for d in range(D))
        return [Call(kernel, (d,), Constants(**every, **of_layer)) for d, of_layer in enumerate(own)]

    def shapes(self, T: int, B: int) -> dict[str, tuple[int, ...]]:
        H = self.hidden_size
        return reference.shapes(T, B, self.num_gates * H, self.num_layers, H, self.num_entered)


@dataclass
class TritonRHN(TritonSteps):
    """The arrays of an RHN's scan, by the names of triton_kernels.ENTRIES."""

    num_first: int  # number of sequences that run at the first step

    @classmethod
    def make(
        cls, form: RHNForm, inputs: dict[str, Any], population: RHNStatistics | None, batch_sizes: list[int] | None,
        overwrite: bool,
    ) -> "TritonRHN":  # fmt: skip
        (T, B, G), D, H, L = inputs["x_proj"].shape, form.num_layers, form.hidden_size, form.num_entered
        # The state after the last step is normalized too.
        shapes = form.shapes(T, B) | {"mean_s": (T + 1, L, H), "var_s": (T + 1, L, H)}
        arrays = driver.common_arrays(form, inputs, population, batch_sizes, shapes)
        x = arrays["x"]
        arrays |= {"states": x.new_empty(T * D + 1, B, H), "weight": ready(inputs["weight"].detach())}
        arrays["states"][0] = inputs["s"]
        if form.keep:
            arrays |= {"a": x.new_empty(T * D, B, G), "normal_x": x}
            if "gamma_x" in form.given:
                arrays["normal_x"] = arrays["dx"] = torch.empty_like(x)
        steps = cls(form, arrays, B if batch_sizes is None else batch_sizes[0])
        if L:
            steps._enter()
        return steps

    def _enter(self) -> None:
        """Add the arrays of normalized states, and normalize the initial state."""
        of, a, n = self.form, self.arrays, self.num_first
        T, B, _ = a["x"].shape
        a["entering"] = a["x"].new_zeros(2, B, of.hidden_size)
        v = standardize(a["states"][0, :n], a["mean_s"][0, 0], a["var_s"][0, 0], of.eps, of.batch)
        if of.keep:
            a["normal"] = a["x"].new_zeros(T + 1, of.num_entered, B, of.hidden_size)
            a["normal"][0, 0, :n] = v
        v = v * a["gamma_s"][0]
        a["entering"][0, :n] = v + a["beta_s"][0] if "beta_s" in a else v

    def first_factor(self) -> Tensor:
        return self.arrays["entering" if self.form.num_entered else "states"][0]

    def results(self) -> tuple[Tensor, Tensor]:
        D, states = self.form.num_layers, self.arrays["states"]
        return states[D::D].clone(), states[-1].clone()

    def gradients(self, dy: Tensor, ds: Tensor) -> dict[str, Tensor | None]:
        of, a, n = self.form, self.arrays, self.num_first
        given = self.backward(dy=ready(dy), ds=ds.clone(memory_format=torch.contiguous_format))
        # Of the initial state, what flows through R of the first layer.
        dv = (a["a"][0, :n].to(of.low) @ a["weight"][0].to(of.low)).float()
        if of.num_entered:
            dbeta = given["beta_s"][0] if "beta_s" in given else None
            dv = through_norm(dv, a["normal"][0, 0, :n], a["gamma_s"][0], a["var_s"][0, 0], of.eps, of.batch,
                              given["gamma_s"][0], dbeta)  # fmt: skip
        a["ds"][:n] += dv
        return {"x_proj": a["dx"], "s": a["ds"], "weight": self._weight_gradient(), **given}

    def _weight_gradient(self) -> Tensor:
        """The gradient of R_1 to R_D (D, G, H), after the backward pass: one batched product over all steps."""
        of, a = self.form, self.arrays
        T, B, _ = a["x"].shape
        entering = a["states"][:-1].view(T, of.num_layers, B, -1).transpose(0, 1)  # (D, T, B, H)
        if of.num_entered:
            scaled = a["normal"][:T].transpose(0, 1) * a["gamma_s"][:, None, None]
            if "beta_s" in a:
                scaled = scaled + a["beta_s"][:, None, None]
            entering = torch.cat([scaled, entering[of.num_entered :]])
        da = a["a"].view(T, of.num_layers, B, -1).transpose(0, 1).flatten(1, 2)  # (D, TB, G)
        return (da.transpose(1, 2).to(of.low) @ entering.flatten(1, 2).to(of.low)).float()


def rhn_triton_scan(
    x_proj: Tensor,
    s: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    population: RHNStatistics | None = None,
    batch_sizes: list[int] | None = None,
    product_dtype: torch.dtype | None = None,
    **parameters: Tensor | None,
) -> reference.Result:
    """`rhn_scan` of reference.py in float32."""
    D, G, H = weight.shape
    inputs = {"x_proj": x_proj, "s": s, "weight": weight} | {name: parameters.get(name) for name in PARAMETERS}
    gamma_s = inputs["gamma_s"]
    of = RHNForm(
        hidden_size=H,
        num_gates=G // H,
        num_layers=D,
        num_entered=0 if gamma_s is None else min(len(gamma_s), D),
        **form.options(x_proj, inputs, PARAMETERS, population, batch_sizes, eps, product_dtype),
    )
    y, s, used = driver.scan(TritonRHN, of, inputs, population, batch_sizes)
    return y, s, RHNStatistics(*(None if v is None else v[: len(x_proj)] for v in used))
