"""Recurrent highway networks on a GPU: one fused Triton kernel per highway layer, time step and direction.

As in lstm/triton.py, the launches are replayed from captured CUDA graphs, and the kernel or cuBLAS computes the
products. Signature and equations are those of fused.py; triton_kernels.py lists the arrays.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from bnrnn.scan import autograd
from bnrnn.scan.norm.reference import standardize, through_norm
from bnrnn.scan.rhn.fused import PARAMETERS
from bnrnn.scan.rhn.reference import RHNStatistics
from bnrnn.scan.rhn.triton_kernels import ENTRIES, backward_layer, forward_layer
from bnrnn.scan.triton_shared import form, tuning
from bnrnn.scan.triton_shared.launches import Launches, launches, ready
from bnrnn.scan.triton_shared.tuning import Division, microseconds


@dataclass(frozen=True)
class Form(form.Form):
    """The form of an RHN's scan. The first `num_entered` layers normalize the state that enters."""

    num_gates: int
    num_layers: int
    num_entered: int

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "Q": self.num_gates, "D": self.num_layers, "L": self.num_entered, "IX": "gamma_x" in self.given,
            "Z": "gamma_z" in self.given, "SHIFTED": "bias" in self.given, "STATE_SHIFTED": "beta_s" in self.given,
        }  # fmt: skip

    def of_layer(self, d: int, forward: bool) -> dict[str, Any]:
        """The constants that depend on the layer and the direction."""
        D, L = self.num_layers, self.num_entered
        place = {"FIRST": d == 0, "TOP": d == D - 1}
        if not forward:
            return {**place, "NEXT_ENTERED": (d + 1) % D < L}
        return {**place, "ENTERED": d < L, "NEXT_ENTERS": (d + 1) % D < L, "KEEP": self.keep}


@dataclass
class Steps:
    """The arrays of a scan, by the names of triton_kernels.ENTRIES, and its form."""

    form: Form
    arrays: dict[str, Tensor]
    num_first: int  # number of sequences that run at the first step

    def fields(self) -> dict[str, Any]:
        return vars(self)

    def forward(self) -> None:
        self.run("forward")

    def results(self) -> tuple[Tensor, Tensor]:
        D, states = self.form.num_layers, self.arrays["states"]
        return states[D::D].clone(), states[-1].clone()

    def gradients(self, dy: Tensor, ds: Tensor) -> dict[str, Tensor | None]:
        of, a = self.form, self.arrays
        given = {f"d{name}": torch.zeros_like(a[name]) for name in of.given}
        if "dx" not in a:
            a["dx"] = torch.empty_like(a["x"])
        a |= {"dy": ready(dy), "ds": ds.clone(memory_format=torch.contiguous_format), **given}
        self.run("backward")
        # Of the initial state, what flows through R of the first layer.
        n = self.num_first
        dv = (a["a"][0, :n].to(of.low) @ a["weight"][0].to(of.low)).float()
        if of.num_entered:
            dbeta = given["dbeta_s"][0] if "dbeta_s" in given else None
            dv = through_norm(dv, a["normal"][0, 0, :n], a["gamma_s"][0], a["var_s"][0, 0], of.eps, of.batch,
                              given["dgamma_s"][0], dbeta)  # fmt: skip
        a["ds"][:n] += dv
        of_parameters = {name: given[f"d{name}"] for name in of.given}
        return {"x_proj": a["dx"], "s": a["ds"], "weight": _weight_gradient(of, a), **of_parameters}

    def run(self, direction: str, division: Division | None = None) -> None:
        """Launch all layers of all steps in this direction."""
        of, a = self.form, self.arrays
        T, B, _ = a["x"].shape
        division = division or tuning.division(
            of.size("rhn", 1, of.num_gates, direction), of.device, partial(_measure, of, T, B, direction)
        )
        forward = direction == "forward"
        key = (of, direction, division, None if division.fused else B)
        of_form = launches(key, of.device, partial(_launches, of, B, direction, division))
        weight = a["weight"].to(of.low)
        if division.fused:
            weight = weight if forward else weight.transpose(1, 2).contiguous()
        else:
            of_form.fixed["weight"].copy_(weight)
            if forward:
                of_form.fixed["state"].copy_(a["entering"][0] if of.num_entered else a["states"][0])
            else:
                of_form.fixed["state"].zero_()  # after the last step
        clock = 0 if forward else T - 1
        of_form.run(T, {**a, "weight": weight, "clock": clock, "steps": T, "batch_size": B})


def _launches(of: Form, B: int, direction: str, division: Division) -> Launches:
    """The launches of one direction. Those with cuBLAS have fixed buffers for its factors and its result."""
    D, H, G = of.num_layers, of.hidden_size, of.num_gates * of.hidden_size
    forward = direction == "forward"
    constants = of.constants() | division.constants()
    kernel, grid = forward_layer if forward else backward_layer, (triton.cdiv(H, division.units),)
    fixed: dict[str, Tensor] = {}
    if not division.fused:
        shapes = {"weight": (D, G, H), "state": (B, H if forward else G), "product": (B, G if forward else H)}
        fixed = {name: torch.empty(shape, dtype=of.low, device=of.device) for name, shape in shapes.items()}

    def step(table: Tensor, offset: int) -> None:
        for d in range(D) if forward else reversed(range(D)):
            if fixed:
                weight = fixed["weight"][d].t() if forward else fixed["weight"][(d + 1) % D]
                torch.mm(fixed["state"], weight, out=fixed["product"])
            kernel[grid](table, offset, d, of.eps, **constants, **of.of_layer(d, forward))

    return Launches(of.device, ENTRIES, step, 1 if forward else -1, fixed)


def _weight_gradient(of: Form, a: dict[str, Tensor]) -> Tensor:
    """The gradient of the recurrent weights (D, G, H), after the backward pass: one batched product over all steps."""
    T, B, _ = a["x"].shape
    D, L, H = of.num_layers, of.num_entered, of.hidden_size
    entering = a["states"][:-1].view(T, D, B, H).transpose(0, 1)  # (D, T, B, H)
    if L:
        scaled = a["normal"][:T].transpose(0, 1) * a["gamma_s"][:, None, None]
        if "beta_s" in a:
            scaled = scaled + a["beta_s"][:, None, None]
        entering = torch.cat([scaled, entering[L:]])
    da = a["a"].view(T, D, B, -1).transpose(0, 1).flatten(1, 2)  # (D, TB, G)
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
) -> tuple[Tensor, Tensor, RHNStatistics]:
    """`rhn_scan` of reference.py in float32."""
    (T, _, G), (D, _, H) = x_proj.shape, weight.shape
    given = {name: parameters.get(name) for name in PARAMETERS}
    gamma_s = given["gamma_s"]
    inputs = (x_proj, s, weight, *given.values())
    of = Form(
        hidden_size=H,
        num_gates=G // H,
        num_layers=D,
        num_entered=0 if gamma_s is None else min(len(gamma_s), D),
        **form.options(x_proj, inputs, given, population, batch_sizes, eps, product_dtype),
    )
    with torch.no_grad():
        arrays = _arrays(of, x_proj, s, weight, given, population, batch_sizes)
    steps = Steps(of, arrays, batch_sizes[0] if batch_sizes else x_proj.shape[1])
    y, s = autograd.run(Steps, steps, ("x_proj", "s", "weight", *PARAMETERS), inputs)
    used = (steps.arrays.get(name) for name in RHNStatistics._fields)
    return y, s, RHNStatistics(*(None if v is None else v[:T] for v in used))


def _arrays(
    of: Form, x_proj: Tensor, s: Tensor, weight: Tensor, given: dict[str, Tensor | None],
    population: RHNStatistics | None, batch_sizes: list[int] | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The arrays of a scan with these arguments, and the normalized initial state."""
    (T, B, G), (D, _, H), L = x_proj.shape, weight.shape, of.num_entered
    arrays = {name: ready(p.detach()) for name, p in given.items() if p is not None}
    x = ready(x_proj.detach())
    states = x.new_empty(T * D + 1, B, H)
    states[0] = s
    arrays |= {"x": x, "states": states, "weight": ready(weight.detach())}
    shapes = {"x": (T, G), "s": (T + 1, L, H), "z": (T, D, G)}
    for name, value in (population or RHNStatistics())._asdict().items():
        if given[f"gamma_{name[-1]}"] is not None:
            arrays[name] = x.new_empty(shapes[name[-1]]) if value is None else ready(value.detach())
    if of.keep:
        arrays |= {"a": x.new_empty(T * D, B, G), "normal_x": x}
        if "gamma_x" in of.given:
            arrays["normal_x"] = arrays["dx"] = torch.empty_like(x)
    if batch_sizes is not None:
        arrays["running"] = form.sizes(batch_sizes, x.device)
    if L:
        arrays |= _enter(of, arrays, T, B, B if batch_sizes is None else batch_sizes[0])
    return arrays


def _enter(of: Form, a: dict[str, Tensor], T: int, B: int, n: int) -> dict[str, Tensor]:
    """The arrays of normalized states, of which the first n sequences enter the first step."""
    H, L = of.hidden_size, of.num_entered
    new = a["x"].new_zeros
    arrays = {"entering": new(2, B, H)} | ({"normal": new(T + 1, L, B, H)} if of.keep else {})
    v = standardize(a["states"][0, :n], a["mean_s"][0, 0], a["var_s"][0, 0], of.eps, of.batch)
    if of.keep:
        arrays["normal"][0, 0, :n] = v
    v = v * a["gamma_s"][0]
    arrays["entering"][0, :n] = v + a["beta_s"][0] if "beta_s" in a else v
    return arrays


def _measure(of: Form, T: int, B: int, direction: str, division: Division) -> float:
    """Microseconds of a layer of a step with this division, on random data."""
    T, H, D, L = min(T, 32), of.hidden_size, of.num_layers, of.num_entered
    G = of.num_gates * H
    generator = torch.Generator(of.device).manual_seed(0)  # not the one that a training draws from

    def draw(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, device=of.device, generator=generator)

    sizes = {"bias": (D, G), "gamma_x": (G,), "gamma_s": (L, H), "beta_s": (L, H), "gamma_z": (D, G)}
    given = {name: draw(*sizes[name]) if name in of.given else None for name in PARAMETERS}
    of_population = [(T, G), (T, L, H), (T, D, G)]
    population = None if of.batch else RHNStatistics(*(draw(*s).abs() for s in of_population for _ in range(2)))
    arrays = _arrays(of, draw(T, B, G), draw(B, H), draw(D, G, H), given, population, [B] * T if of.padded else None)
    arrays |= {f"d{name}": torch.zeros_like(p) for name, p in given.items() if p is not None}
    arrays |= {"dy": draw(T, B, H), "ds": draw(B, H)} | ({} if "dx" in arrays else {"dx": draw(T, B, G)})
    return microseconds(partial(Steps(of, arrays, B).run, direction, division)) / (T * D)
